"""`Mismatch`: the first difference of a stream from its solo run, from the reference, or from what
was asked for."""

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter

from cadenza.request import Request
from cadenza.verification.play import Stream, TokenRecord
from cadenza.verification.reference import ReferenceResult

INDEPENDENT = "independent reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """`index`: of the token in the output; prompt tokens with logprobs have negative ones."""

    mode: str
    request: int
    sample: int = 0
    index: int
    expected: str
    actual: str


def first_difference(
    mode: str, expected: Stream, actual: Stream, *, bitwise: bool
) -> Mismatch | None:
    """In tokens, or if `bitwise` in any bit of logprobs."""
    pick: Callable[[TokenRecord], object] = _bits if bitwise else itemgetter(0)
    for left, right, start in (
        (expected.prompt, actual.prompt, -len(expected.prompt)),
        (expected.tokens, actual.tokens, 0),
    ):
        index = _first_unequal(map(pick, left), map(pick, right))
        if index is not None:
            return Mismatch(
                mode=mode,
                request=expected.request,
                sample=expected.sample,
                index=start + index,
                expected=_at(left, index),
                actual=_at(right, index),
            )
    return _difference_at_end(mode, expected.finish, actual)


def difference_from_reference(expected: ReferenceResult, actual: Stream) -> Mismatch | None:
    index = _first_unequal(expected.token_ids, actual.token_ids)
    if index is None:
        return _difference_at_end(INDEPENDENT, expected.finish_reason, actual)
    return Mismatch(
        mode=INDEPENDENT,
        request=actual.request,
        sample=actual.sample,
        index=index,
        expected=_at(expected.token_ids, index),
        actual=_at(actual.token_ids, index),
    )


def _difference_at_end(mode: str, finish: str, actual: Stream) -> Mismatch | None:
    if finish == actual.finish:
        return None
    return Mismatch(
        mode=mode,
        request=actual.request,
        sample=actual.sample,
        index=len(actual.tokens),
        expected=finish,
        actual=actual.error or actual.finish,
    )


def lack_of(
    request: Request, alone: Stream, has_logprobs: Callable[[TokenRecord, int | None], bool]
) -> Mismatch | None:
    if alone.finish.partition(" ")[0] not in ("stop", "length"):
        return _difference_at_end("alone", "stop or length", alone)
    params = request.params
    asks_prompt = params.prompt_logprobs is not None and alone.sample == 0
    num_prompt = len(request.prompt_token_ids) - 1 if asks_prompt else len(alone.prompt)
    for asked, count, records, start in (
        (params.prompt_logprobs, num_prompt, alone.prompt, -num_prompt),
        (params.logprobs, len(alone.tokens), alone.tokens, 0),
    ):
        has = [has_logprobs(record, asked) for record in records]
        index = _first_unequal([True] * count, has)
        if index is not None:
            return Mismatch(
                mode="alone",
                request=alone.request,
                sample=alone.sample,
                index=start + index,
                expected=f"{asked} log probabilities",
                actual=_at(records, index),
            )
    return None


def digest_of_streams(streams: Iterable[Stream]) -> str:
    state = hashlib.sha256()
    for stream in streams:
        state.update(f"{stream.request} {stream.sample} {stream.finish}\n".encode())
        for token, logprob, rank, top_ids, top_logprobs in (*stream.prompt, *stream.tokens):
            count = len(top_ids)
            numbers = (token, logprob, rank, *top_ids, *top_logprobs)
            state.update(struct.pack(f"<qfq{count}q{count}f", *numbers))
    return state.hexdigest()


def _bits(record: TokenRecord) -> bytes:
    token, logprob, rank, top_ids, top_logprobs = record
    floats = struct.pack(f"<{1 + len(top_logprobs)}d", logprob, *top_logprobs)
    return struct.pack(f"<{2 + len(top_ids)}q", token, rank, *top_ids) + floats


def _first_unequal(left: Iterable[object], right: Iterable[object]) -> int | None:
    one, other = list(left), list(right)
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _at(items: Iterable[object], index: int) -> str:
    found = list(items)
    return str(found[index]) if index < len(found) else "(ended)"
