"""Tokenizers, chat templates, incremental detokenization and stop strings.

Owns the conversion between text and token ids. Knows no models, weights or batches. Invariant:
importing this package imports neither `tokenizers` nor `jinja2`; their first use does.
"""

from cadenza.text.bad_words import bad_word_token_ids
from cadenza.text.chat import ChatTemplate
from cadenza.text.detokenizer import DecoderPlan, IncrementalDetokenizer, plan_decoder
from cadenza.text.stop import StopMatch, StopMatcher
from cadenza.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "DecoderPlan",
    "IncrementalDetokenizer",
    "StopMatch",
    "StopMatcher",
    "Tokenizer",
    "bad_word_token_ids",
    "plan_decoder",
]
