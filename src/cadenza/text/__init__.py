"""Tokenizers, chat templates, detokenization and stop strings; knows no models, weights or batches.

Invariant: importing it imports neither `tokenizers` nor `jinja2`; their first use does.
"""

from cadenza.text.templates.chat import ChatTemplate
from cadenza.text.tokens.detokenizer import DecoderPlan, IncrementalDetokenizer, plan_decoder
from cadenza.text.tokens.stop import StopMatch, StopMatcher
from cadenza.text.tokens.tokenizer import Tokenizer, bad_word_token_ids

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
