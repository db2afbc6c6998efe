"""`RuleLayout`: a row's token rules (penalties, biases, bans, allowed tokens) as int32 words, sent
when a sequence gets a row, masks with each token. Invariant: a record depends on its own sequence
alone. V vocabulary · W words of a record, as read by `token_choice` and `csrc/core/rules.h`."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cadenza.batch.sequence import Sequence
from cadenza.bounds import MAX_BIASES
from cadenza.request import MAX_BAD_WORD_TOKENS

# Header words: number of prompt tokens · sequence length from which stop tokens are allowed · the
# three penalties as float32 bits · 1 if the mask applies.
NUM_PROMPT, STOPS_FROM, PRESENCE, FREQUENCY, REPETITION, HAS_MASK = range(6)

BIAS_IDS = 16
BIAS_VALUES = BIAS_IDS + MAX_BIASES
STOPS = BIAS_VALUES + MAX_BIASES
MAX_STOPS = 192
BAD_WORDS = STOPS + MAX_STOPS
MASK = BAD_WORDS + MAX_BAD_WORD_TOKENS

NONE = -1  # Pads lists, and precedes each bad word

RuleRecord = npt.NDArray[np.int32]  # [W]


@dataclass(frozen=True, slots=True)
class RuleLayout:
    """Records for a vocabulary of `vocab_size` tokens."""

    vocab_size: int

    @property
    def num_words(self) -> int:
        """W: the words before the mask, and one mask bit per token."""
        return MASK + -(-self.vocab_size // 32)

    def encode(self, sequence: Sequence) -> RuleRecord | None:
        """[W]; None if it has no rules."""
        if not has_rules(sequence):
            return None
        params = sequence.request.params
        record = np.full(self.num_words, NONE, np.int32)
        record[:BIAS_IDS] = 0
        record[NUM_PROMPT] = sequence.num_prompt_tokens
        record[STOPS_FROM] = sequence.num_prompt_tokens + params.min_tokens
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        record[PRESENCE : REPETITION + 1] = np.array(penalties, np.float32).view(np.int32)
        ids, values = [list(column) for column in zip(*params.biases, strict=True)] or ([], [])
        record[BIAS_IDS : BIAS_IDS + len(ids)] = ids
        biases = np.array(values, np.float32).view(np.int32)
        record[BIAS_VALUES : BIAS_VALUES + len(values)] = biases
        if params.min_tokens:
            stops = sorted(sequence.stop_token_ids)
            record[STOPS : STOPS + len(stops)] = stops
        words = [word for ids in sequence.request.bad_word_token_ids for word in (NONE, *ids)]
        record[BAD_WORDS : BAD_WORDS + len(words)] = words
        if params.allowed_token_ids is not None:
            record[HAS_MASK] = 1
            record[MASK:] = self.mask_of(np.array(params.allowed_token_ids))
        elif sequence.constraint is not None:
            record[HAS_MASK] = 1  # and every bit is set, until the constraint's mask is written
        return record

    def read_mask(self, allowed: bytes) -> npt.NDArray[np.int32]:
        return np.frombuffer(allowed, "<i4", self.num_words - MASK).astype(np.int32)

    def mask_of(self, allowed: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """One bit per token, least significant first: [ceil(V / 32)]."""
        bits = np.zeros((self.num_words - MASK) * 32, np.bool_)
        bits[allowed] = True
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def ruling_fields(sequence: Sequence) -> tuple[str, ...]:
    """Fields that rule out tokens at its next position, in a fixed order; biases, penalties and
    filters never rule out every token."""
    request = sequence.request
    generated = sequence.token_ids[sequence.num_prompt_tokens :]
    is_masked = sequence.constraint is not None and any(
        byte != 0xFF for byte in sequence.constraint.allowed()
    )
    spec = request.constraint if is_masked else None
    in_force = {
        "allowed_token_ids": request.params.allowed_token_ids is not None,
        "bad_words": any(_is_begun(word, generated) for word in request.bad_word_token_ids),
        "min_tokens": bool(sequence.stop_token_ids) and len(generated) < request.params.min_tokens,
        "structured": spec is not None and spec.grammar is not None,
        "thinking_token_budget": spec is not None and spec.thinking is not None,
    }
    return tuple(name for name, rules in in_force.items() if rules)


def may_be_forced(sequence: Sequence) -> bool:
    """Whether the only token that its constraint allows can be taken unsampled: no other field may
    rule it out, and its logprob is not asked for."""
    request = sequence.request
    return (
        sequence.takes_forced
        and request.params.logprobs is None
        and request.params.allowed_token_ids is None
        and not request.bad_word_token_ids
        and sequence.num_generated_tokens >= request.params.min_tokens
    )


def _is_begun(word: tuple[int, ...], generated: list[int]) -> bool:
    start = list(word[:-1])
    return generated[len(generated) - len(start) :] == start


def has_rules(sequence: Sequence) -> bool:
    params = sequence.request.params
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or params.allowed_token_ids is not None
        or (params.min_tokens and sequence.stop_token_ids)
        or sequence.request.bad_word_token_ids
        or sequence.constraint is not None
    )
