"""`Compiling`: requests whose constraint is being compiled on another thread, before the scheduler
has them. Invariant: a request leaves in one of three ways: with a constraint for each sample,
refused, or cancelled."""

from collections.abc import Iterator
from dataclasses import dataclass

from cadenza.batch.sequence import Sequence
from cadenza.structured import CompileConstraint, Constraint, PendingConstraint

WAIT_S = 0.05  # Longest wait of an engine that has nothing else to do


@dataclass(frozen=True, slots=True)
class _Waiting:
    samples: list[Sequence]
    pending: list[PendingConstraint]


class Compiling:
    """`compile` makes the constraints of new sequences."""

    def __init__(self, compile: CompileConstraint) -> None:
        self._compile = compile
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return sum(len(each.samples) for each in self._waiting.values())

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def add(self, samples: list[Sequence]) -> None:
        spec = samples[0].request.constraint
        assert spec is not None
        pending = [self._compile(spec) for _ in samples]
        self._waiting[samples[0].request_id] = _Waiting(samples, pending)

    def cancel(self, request_id: int, sample: int | None) -> bool:
        """Of a request, or one of its samples; False if it does not wait."""
        found = self._waiting.get(request_id)
        if found is None:
            return False
        kept: list[tuple[Sequence, PendingConstraint]] = []
        for each, pending in zip(found.samples, found.pending, strict=True):
            if sample is None or each.sample == sample:
                pending.cancel()  # or the thread would be busy for nobody
            else:
                kept.append((each, pending))
        if kept:
            samples, pending = zip(*kept, strict=True)
            self._waiting[request_id] = _Waiting([*samples], [*pending])
        else:
            del self._waiting[request_id]
        return len(kept) < len(found.samples)

    def wait(self) -> None:
        for each in next(iter(self._waiting.values())).pending:
            try:
                each.result(WAIT_S)
            except TimeoutError:
                return

    def take(self) -> Iterator[tuple[list[Sequence], bool]]:
        """Of each request that is compiled, and whether its samples have their constraints."""
        done = [
            key for key, each in self._waiting.items() if all(one.done() for one in each.pending)
        ]
        for request_id in done:
            each = self._waiting.pop(request_id)
            yield each.samples, all(map(_constrain, each.samples, each.pending))


def _constrain(sequence: Sequence, pending: PendingConstraint) -> bool:
    """The constraint takes the tokens that another engine sampled and makes the masks that that one
    had, since its limits count them."""
    constraint: Constraint | None = pending.result()
    if constraint is None:
        return False
    for token_id in sequence.token_ids[sequence.num_prompt_tokens :]:
        constraint.allowed()
        constraint.accept(token_id)
    sequence.constraint = constraint
    return not constraint.has_failed
