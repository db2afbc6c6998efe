"""`NewSequences`: makes the sequences of a request, new ones or as another engine left them
(`Resumption`); `Compiling`: those whose constraint is being compiled on another thread, before the
scheduler has them. Invariant: what a sequence generates follows from its request, its id and the
engine's seed; the prompt and resumed tokens are computed again, as after a preemption."""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass

import msgspec

from cadenza.batch.draw_keys import derive_sample_seed, derive_seed
from cadenza.batch.prompt import Prompt
from cadenza.batch.sequence import Sequence
from cadenza.config import EngineLimits
from cadenza.drafting.drafts import Drafting, SharedAcceptance, drafting_of
from cadenza.events import WholePromptReason
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.scoring import compute_whole, prune
from cadenza.sparse_prefill import kept_of_mask
from cadenza.speculative_config import SpeculativeConfig
from cadenza.structured import CompileConstraint, Constraint, PendingConstraint

WAIT_S = 0.05  # Longest wait of an engine that has nothing else to do


class ResumedSample(msgspec.Struct, frozen=True, kw_only=True):
    """`num_cached_tokens`: as reported with its first token."""

    sample: int
    token_ids: tuple[int, ...] = ()
    num_cached_tokens: int | None = None


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that have not ended; `kept` and `whole_reason` as in `Started`."""

    samples: tuple[ResumedSample, ...]
    num_prompt_logprobs: int = 0
    kept: bytes | None = None
    whole_reason: WholePromptReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequences:
    """Those of one engine."""

    limits: EngineLimits
    capabilities: Set[str]  # of its runner
    eos_token_ids: frozenset[int]
    max_num_tokens: Callable[[Request], int]  # of a request: its prompt and what it may generate
    seed: int
    clock: Callable[[], float]  # seconds, monotonic
    speculation: SpeculativeConfig | None
    # of drafts of its second model; None without one
    acceptance: Mapping[bool, SharedAcceptance] | None

    def of_request(self, request_id: int, request: Request) -> list[Sequence]:
        return [self._make(request_id, request, sample) for sample in range(request.params.n)]

    def resumed(self, request_id: int, request: Request, resumption: Resumption) -> list[Sequence]:
        """Those that go on, with what another engine generated."""
        sequences: list[Sequence] = []
        for resumed in resumption.samples:
            sequence = self._make(request_id, request, resumed.sample)
            if resumption.whole_reason is not None:
                compute_whole(sequence, resumption.whole_reason)
            if sequence.awaits_kept:
                _prune(sequence, resumption.kept)
            sequence.token_ids += resumed.token_ids
            sequence.num_cached_tokens = resumed.num_cached_tokens
            if sequence.prompt.rows is not None:
                sequence.prompt.rows.skip(resumption.num_prompt_logprobs)
            sequences.append(sequence)
        return sequences

    def _make(self, request_id: int, request: Request, sample: int) -> Sequence:
        params = request.params
        seed = seed_of_sample(params, sample, request_id=request_id, engine_seed=self.seed)
        stop = frozenset(params.stop_token_ids)
        sequence = Sequence(
            request_id=request_id,
            request=request,
            sample=sample,
            seed=seed,
            max_num_tokens=self.max_num_tokens(request),
            stop_token_ids=stop if params.ignore_eos else stop | self.eos_token_ids,
            arrived_s=self.clock(),
            token_ids=list(request.prompt_token_ids),
            prompt=Prompt.of(
                request, has_rows=sample == 0, has_spans="whole_spans" in self.capabilities
            ),
            drafting=self._drafting_of(request),
            # Where no drafts are verified, several tokens of a row are not computed as one call.
            takes_forced="drafts" in self.capabilities,
        )
        if request.sparse_prefill is not None:
            _prune(sequence, request.sparse_prefill.kept)
        return sequence

    def _drafting_of(self, request: Request) -> Drafting | None:
        if "drafts" not in self.capabilities or request.pooling is not None:
            return None
        placeholder = self.limits.placeholder
        return drafting_of(request, self.speculation, self.acceptance, placeholder=placeholder)


def seed_of_sample(
    params: SamplingParams, sample: int, *, request_id: int, engine_seed: int
) -> int:
    """That of a request of one sample with the same tokens; without a seed in `params` from the
    engine's seed and the request's id."""
    seed = derive_seed(engine_seed, request_id) if params.seed is None else params.seed
    return derive_sample_seed(seed, sample)


def _prune(sequence: Sequence, mask: bytes | None) -> None:
    if mask is not None:
        prune(sequence, kept_of_mask(mask, len(sequence.request.prompt_token_ids)))


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
