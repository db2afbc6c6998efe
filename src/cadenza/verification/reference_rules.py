"""What a request's options do to logits before anything is chosen, written the plainest way.

Loops over Python lists and dictionaries, where the engine walks pages and records. Its order is the
engine's: bans (allowed tokens, bad words, the end before `min_tokens`), biases, then repetition,
frequency and presence penalties. Knows no batch and no device.
"""

from collections import Counter
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from cadenza.request import Request

Logits = npt.NDArray[np.float32]


def ruled_logits(
    logits: Logits, request: Request, generated: list[int], stop: AbstractSet[int]
) -> Logits:
    """Logits [V] as the request's options leave them after `generated`; bans are -inf."""
    params = request.params
    ruled = logits.copy()
    banned = _bad_word_ends(request, generated)
    if len(generated) < params.min_tokens:
        banned |= stop
    if params.allowed_token_ids is not None:
        banned |= set(range(len(logits))) - set(params.allowed_token_ids)
    ruled[sorted(banned)] = -np.inf
    for token_id, bias in params.biases:
        ruled[token_id] += np.float32(bias)
    repetition = np.float32(params.repetition_penalty)
    for token_id in {*request.prompt_token_ids, *generated}:
        value = ruled[token_id]
        ruled[token_id] = value / repetition if value > 0 else value * repetition
    for token_id, count in Counter(generated).items():
        ruled[token_id] -= np.float32(params.frequency_penalty) * np.float32(count)
        ruled[token_id] -= np.float32(params.presence_penalty)
    return ruled


def _bad_word_ends(request: Request, generated: list[int]) -> set[int]:
    """The last tokens of those bad words whose other tokens were just generated."""
    ends: set[int] = set()
    for *start, end in request.bad_word_token_ids:
        if generated[len(generated) - len(start) :] == start and len(start) <= len(generated):
            ends.add(end)
    return ends
