"""`NewSequences`: makes the sequences of a request, new ones or as another engine left them.
Invariant: what a sequence generates follows from its request, its id and the engine's seed."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from cadenza.batch.prompt import Pool, Prompt, PromptRowsProgress
from cadenza.batch.sequence import Sequence
from cadenza.batch.whole_spans import whole_spans_of
from cadenza.config import EngineLimits
from cadenza.drafting.drafts import Drafting, SharedAcceptance, drafting_of
from cadenza.engine.resumption import Resumption
from cadenza.engine.sample_seed import seed_of_sample
from cadenza.request import Request
from cadenza.scheduler.scoring import prune
from cadenza.sparse_prefill import kept_of_mask
from cadenza.speculative_config import SpeculativeConfig


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
            sequence.prompt.whole_reason = resumption.whole_reason
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
            prompt=self._prompt_of(request, sample),
            drafting=self._drafting_of(request),
            # Where no drafts are verified, several tokens of a row are not computed as one call.
            takes_forced="drafts" in self.capabilities,
        )
        if request.sparse_prefill is not None:
            _prune(sequence, request.sparse_prefill.kept)
        return sequence

    def _prompt_of(self, request: Request, sample: int) -> Prompt:
        has_spans = "whole_spans" in self.capabilities
        return Prompt(
            spans=whole_spans_of(request.attachments) if has_spans else (),
            rows=_progress_of(request) if sample == 0 else None,
            pool=_pool_of(request),
        )

    def _drafting_of(self, request: Request) -> Drafting | None:
        if "drafts" not in self.capabilities or request.pooling is not None:
            return None
        placeholder = self.limits.placeholder
        return drafting_of(request, self.speculation, self.acceptance, placeholder=placeholder)


def _prune(sequence: Sequence, mask: bytes | None) -> None:
    if mask is not None:
        prune(sequence, kept_of_mask(mask, len(sequence.request.prompt_token_ids)))


def _progress_of(request: Request) -> PromptRowsProgress | None:
    if not request.needs_prompt_rows:
        return None
    return PromptRowsProgress(num_prompt_tokens=len(request.prompt_token_ids))


def _pool_of(request: Request) -> Pool | None:
    asked = request.pooling
    return None if asked is None else Pool(dimensions=asked.dimensions, normalize=asked.normalize)
