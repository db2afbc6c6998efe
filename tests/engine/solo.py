"""What a request gives alone: the fake model run over one growing list of tokens.

Knows no scheduler, pages or cache, so that it can judge all of them.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cadenza.backends.fake import WINDOW_START, next_token, placed_token
from cadenza.backends.fake_memory import image_value
from cadenza.batch.draw_keys import derive_sample_seed, derive_seed, draw_keys
from cadenza.batch.token_rules import MASK, RuleLayout
from cadenza.engine.core import EngineCore
from cadenza.events import FinishReason
from cadenza.request import Request
from cadenza.sparse_prefill import KeptTokens, num_chunks
from tests.engine.hashed_constraint import HashedConstraint, record_of

VOCAB_SIZE = 97
EOS_TOKEN_IDS = frozenset({3, 11})

IMAGE_TOKEN_ID = VOCAB_SIZE - 1
"""Where the fake model sees."""

StreamId = tuple[int, int]
"""A request's id and which of its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloStream:
    """What a request gives when nothing else exists."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_token_id: int | None
    num_stop_tokens: int = 0
    """1 if it ended with a token that is not shown."""


def solo_stream_of(request: Request, stream: StreamId, engine: EngineCore, seed: int) -> SoloStream:
    """The stream that `engine`, made with `seed`, owes to a sample of the request."""
    request_id, sample = stream
    own_seed = request.params.seed
    first_seed = derive_seed(seed, request_id) if own_seed is None else own_seed
    return solo_stream(
        request,
        derive_sample_seed(first_seed, sample),
        engine.limits.max_model_len,
        sees=engine.limits.images is not None,
    )


@lru_cache(maxsize=20_000)
def solo_stream(
    request: Request,
    seed: int,
    max_model_len: int,
    *,
    sees: bool = False,
    kept: KeptTokens | None = None,
    window: int | None = None,
) -> SoloStream:
    """The fake model run over one growing list of tokens; `kept` are those of its prompt, if that
    is thinned out, and `window` the model's."""
    params = request.params
    tokens = seen_prompt(request)
    most = max_model_len if params.max_tokens is None else len(tokens) + params.max_tokens
    if kept is None:
        kept = KeptTokens(num_prompt_tokens=len(tokens), chunks=(*range(num_chunks(len(tokens))),))
    tokens = [tokens[index] for index in kept.indices(0, kept.num_tokens)]
    num_prompt_tokens = len(tokens)
    record = record_of(request, VOCAB_SIZE, kept)
    constraint = _constraint_of(request)
    stop = set(params.stop_token_ids) | (set() if params.ignore_eos else EOS_TOKEN_IDS)
    indices = np.arange(kept.num_prompt_tokens, most, dtype=np.int32)
    keys = draw_keys(np.full(len(indices), seed, np.uint64), indices).tolist()
    for first, second in keys:
        key = (0, 0) if params.is_greedy else (first, second)
        if constraint is not None:
            record[MASK:] = RuleLayout(VOCAB_SIZE).read_mask(constraint.allowed()).tolist()
        token_id = next_token(
            stored_history(tokens, kept, window),
            key,
            vocab_size=VOCAB_SIZE,
            rules=record,
            banned=IMAGE_TOKEN_ID if sees else None,
        )
        if token_id in stop:
            return SoloStream(
                token_ids=tuple(tokens[num_prompt_tokens:]),
                finish_reason="stop",
                stop_token_id=token_id if token_id in params.stop_token_ids else None,
                num_stop_tokens=1,
            )
        tokens.append(token_id)
        if constraint is not None:
            constraint.accept(token_id)
            if constraint.is_complete:
                break
    is_complete = constraint is not None and constraint.is_complete
    return SoloStream(
        token_ids=tuple(tokens[num_prompt_tokens:]),
        finish_reason="stop" if is_complete else "length",
        stop_token_id=None,
    )


def stored_history(tokens: list[int], kept: KeptTokens, window: int | None) -> list[int]:
    """What the fake model stores of a sequence, and what its last token sees through a window."""
    if not kept.num_skipped:
        return tokens
    places = enumerate(tokens)
    history = [placed_token(token, place, kept.index_of(place)) for place, token in places]
    if window is None:
        return history
    seen_from = max(0, kept.index_of(len(tokens) - 1) - window + 1)
    shown = [place for place in range(len(tokens)) if kept.index_of(place) >= seen_from]
    return [*history, shown[0], WINDOW_START]


def seen_prompt(request: Request) -> list[int]:
    """The prompt as the fake model stores it: placeholders as values of their images."""
    history = list(request.prompt_token_ids)
    for part in request.attachments:
        own = [at for at in range(part.start, part.end) if history[at] == IMAGE_TOKEN_ID]
        for place, at in enumerate(own):
            history[at] = image_value(part, place, IMAGE_TOKEN_ID)
    return history


def _constraint_of(request: Request) -> HashedConstraint | None:
    spec = request.constraint
    return None if spec is None else HashedConstraint(spec.grammar)
