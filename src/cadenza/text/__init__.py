"""Text at the edge: tokenizers, chat templates, and text from a stream of tokens.

Owns the turning of text into token ids and back. Knows nothing of models, weights or batches.
Invariant: importing this package loads neither `tokenizers` nor `jinja2`; the first use does.
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
