"""`ScoringQueue`: which prompts are scored for a sparse prefill, and how much of each in a step.
The scorer reads a prompt in chunks, then draws `LOOK_AHEAD_TOKENS`; equal prompts are scored once.
Invariants: a scoring has all its pages, ids of the target's, from the start and gives them up for
what runs; scores follow from tokens."""

import heapq
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import attrgetter

from cadenza.batch.batch import Batch, BatchEntry
from cadenza.batch.sequence import Sequence, SequenceStatus, WaitReason
from cadenza.batch.step_cost import StepCost, StepLoad
from cadenza.batch.step_schema import StepOutput
from cadenza.config import EngineLimits
from cadenza.events import Preparing, WholePromptReason
from cadenza.figures import Figure
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.scheduler.fair_share import FairShare
from cadenza.scheduler.scoring import (
    ScoreMemo,
    Scoring,
    compute_whole,
    kept_unscored,
    prompt_digest,
    prune,
    scored_sequence,
    select_kept,
)
from cadenza.scheduler.step_budget import PromptBudget, PromptPart, PromptShares
from cadenza.scheduler.step_work import StepDuration, StepPlan, StepWork
from cadenza.sparse_prefill import (
    LOOK_AHEAD,
    LOOK_AHEAD_TOKENS,
    KeptTokens,
    chunk_scores,
)
from cadenza.tenant import Tenant

MAX_SCORINGS = 4  # Prompts that are scored at the same time: the rows of the scorer

_row_of = attrgetter("row")

# Mean score of each prompt token, from the row, the tokens and the number of queries; None if
# unreadable.
ReadScores = Callable[[int, int, int], Iterable[float] | None]

# After so many preemptions a scoring begins only if nothing that runs can preempt it.
WHOLE_AFTER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOptions:
    """Limits of the scorer's runner; `cost`: None if not known."""

    limits: EngineLimits
    cost: StepCost | None = None


@dataclass(slots=True, kw_only=True)
class ScoringCounts:
    """Never decrease. `num_remembered`: samples whose prompt had been scored before.
    `num_preempted`: scorings that lost their pages. `scoring_ms`: by predictions as corrected."""

    num_scored: int = 0
    num_remembered: int = 0
    num_failed: int = 0
    num_preempted: int = 0
    num_tokens: int = 0
    scoring_ms: float = 0.0


SCORING_FIGURES: tuple[Figure["ScoringQueue"], ...] = (
    Figure(
        "spec_prefill_scoring",
        "Prompts that are being scored.",
        lambda scoring: len(scoring.holders),
        type="gauge",
    ),
    Figure("spec_prefill_scored", "Prompts scored.", lambda scoring: scoring.counts.num_scored),
    Figure(
        "spec_prefill_scored_before",
        "Samples whose prompt had been scored before.",
        lambda scoring: scoring.counts.num_remembered,
    ),
    Figure(
        "spec_prefill_scorings_failed",
        "Prompts that were computed whole because their scoring failed.",
        lambda scoring: scoring.counts.num_failed,
    ),
    Figure(
        "spec_prefill_scorings_preempted",
        "Scorings that began again because what ran needed their pages.",
        lambda scoring: scoring.counts.num_preempted,
    ),
    Figure(
        "spec_prefill_scored_tokens",
        "Tokens that the draft model computed to score prompts.",
        lambda scoring: scoring.counts.num_tokens,
    ),
    Figure(
        "spec_prefill_scoring_seconds",
        "Seconds of steps for scoring prompts.",
        lambda scoring: scoring.counts.scoring_ms / 1000,
    ),
)


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """No output if it failed."""

    output: StepOutput | None
    read_scores: ReadScores


class ScoringQueue(StepWork):
    """The prompts of one scheduler's sequences that are to be scored."""

    def __init__(
        self, options: ScoringOptions, kv_cache: KVCacheManager, fair_share: FairShare
    ) -> None:
        self.cost = options.cost
        self.counts = ScoringCounts()
        self._limits = options.limits
        self._kv_cache = kv_cache
        self._fair_share = fair_share
        self._memo = ScoreMemo()
        self._scorings: dict[bytes, Scoring] = {}
        # Of waiting sequences, and of the scorer's own
        self._scoring_of: dict[Sequence, Scoring] = {}
        self._begun: list[Scoring] = []  # In the order in which they began
        self._free_rows = list(range(options.limits.max_num_seqs))
        self._lacking: Sequence | None = None
        self._full: set[Sequence] = set()
        self._unannounced: list[Preparing] = []  # Of those that have begun and are in no step yet

    @property
    def figures(self) -> tuple["ScoringQueue", tuple[Figure["ScoringQueue"], ...]]:
        return self, SCORING_FIGURES

    @property
    def holders(self) -> list[Sequence]:
        return [each.sequence for each in self._begun]

    def has_work(self, plan: StepPlan) -> bool:  # noqa: ARG002 (whatever else is planned)
        return bool(self._ready())

    def add(self, sequence: Sequence) -> None:
        """It awaits its scores only if nothing else says what is kept."""
        if not sequence.awaits_kept:
            return
        if self._is_cached(sequence):
            compute_whole(sequence, "cached")
            return
        digest = prompt_digest(sequence)
        kept = kept_unscored(sequence) or self._kept_before(sequence, digest)
        if kept is not None:
            prune(sequence, kept)
            return
        scoring = self._scorings.get(digest)
        if scoring is None:
            num_tokens = len(sequence.token_ids)
            scoring = Scoring(digest, scored_sequence(sequence), num_tokens)
            self._scorings[digest] = self._scoring_of[scoring.sequence] = scoring
        scoring.waiters[sequence] = None
        self._scoring_of[sequence] = scoring

    def remove(self, sequence: Sequence) -> None:
        scoring = self._scoring_of.pop(sequence, None)
        if scoring is not None:
            del scoring.waiters[sequence]
            if not scoring.waiters:
                self._drop(scoring)

    def begin(self, plan: StepPlan) -> None:
        self._begin_scorings(plan)
        if self.has_work(plan):
            plan.keep_share()

    def _begin_scorings(self, plan: StepPlan) -> None:
        """In start order. The first that is ready to start, or lacks pages for its scoring, keeps
        its pages."""
        self._lacking = None
        self._full.clear()
        if not self._free_rows or len(self._begun) == len(self._scorings):
            return
        plan.reservations.forget()
        ready: Sequence | None = None
        for sequence in plan.turns.startable():
            scoring = self._scoring_of.get(sequence)
            if scoring is None:
                ready = ready or sequence
                continue
            if scoring.is_begun or self._leaves_whole(scoring):
                continue
            if not self._free_rows:
                break
            num_tokens = scoring.num_tokens + LOOK_AHEAD_TOKENS
            if self._kv_cache.exceeds_quota(scoring.sequence, num_tokens):
                self._full.add(sequence)
                continue
            may_take = plan.reservations.leave(
                self._kv_cache.num_pages_for(num_tokens),
                ready,
                available=self._kv_cache.pool.num_available,
                whole=scoring.sequence.num_preemptions >= WHOLE_AFTER,
            )
            if not may_take or not self._try_begin(scoring):
                self._lacking = sequence
                break

    def wait_reason(self, sequence: Sequence) -> WaitReason | None:
        if sequence is self._lacking:
            return WaitReason.PAGES
        if sequence in self._full:
            return WaitReason.QUOTA
        return WaitReason.SCORES if sequence.awaits_kept else None

    def give_up_pages(self, tenant: Tenant | None = None) -> bool:
        """Of the newest scoring."""
        for scoring in reversed(self._begun):
            if tenant is None or scoring.sequence.tenant.name == tenant.name:
                self._rewind(scoring)
                self.counts.num_preempted += 1
                return True
        return False

    def fill(self, plan: StepPlan, batch: Batch) -> None:
        """What there is time for, or the fewest tokens that a prompt gets."""
        ready = self._ready()
        if not ready:
            return
        drawing = [each for each in ready if each.num_queries]
        reading = [each for each in ready if not each.num_queries]
        num_tokens = self._limits.max_num_batched_tokens - len(drawing)
        budget, left_ms = PromptBudget(num_tokens=num_tokens), plan.left_ms(batch)
        is_bounded = left_ms is not None
        if left_ms is not None and self.cost is not None:
            load = StepLoad()
            for each in drawing:
                load = load.plus(each.sequence.num_computed_tokens, 1, 1)
            budget.left_ms, budget.cost = left_ms - self.cost.predict_ms(load), self.cost
        parts = [
            PromptPart(start=each.sequence.num_computed_tokens, num_left=each.num_left)
            for each in reading
        ]
        shares = PromptShares(budget, parts)
        if plan.bound is not None and shares.left_ms < 0:
            plan.bound.num_granted += 1
        scored = Batch(batch.step_id)
        for each in drawing:
            self._add_entry(scored, each, 1, is_bounded=is_bounded)
        for each, count in zip(reading, shares.counts, strict=True):
            if count:
                self._add_entry(scored, each, count, is_bounded=is_bounded)
        assert scored.entries, "a step of the scorer computes nothing"
        scored.entries.sort(key=_row_of)
        batch.preparing += self._unannounced
        self._unannounced = []
        self.counts.num_tokens += scored.num_tokens
        batch.scored = scored

    def apply(self, scored: Batch, step: ScoredStep) -> None:
        if step.output is None:
            self._fail(scored)
            return
        token_ids = step.output.token_ids.tolist()
        is_finite = step.output.is_finite.tolist()
        index = 0
        for entry in scored.entries:
            first, index = index, index + entry.num_choices
            scoring = self._current(entry)
            if scoring is None or not entry.num_scored:
                continue
            is_over = not entry.num_choices
            if entry.num_choices and not is_finite[first]:
                self._give_up(scoring)
                continue
            if entry.num_choices:
                is_over = scoring.sequence.append(token_ids[first]) == "stop"
            if is_over:
                scores = step.read_scores(entry.row, scoring.num_tokens, scoring.num_queries)
                self._finish(scoring, scores)

    def observe(self, batch: Batch, duration: StepDuration) -> None:
        scored, others_ms = batch.scored, duration.others_ms
        if scored is None or others_ms is None or self.cost is None:
            return
        scoring_ms = self.cost.predict_ms(scored.load)
        own_ms = duration.measured_ms * scoring_ms / (scoring_ms + others_ms)
        self.counts.scoring_ms += own_ms
        self.cost = self.cost.corrected(scored.load, own_ms)

    def predict_ms(self, batch: Batch) -> float:
        scored = batch.scored
        return 0.0 if scored is None or self.cost is None else self.cost.predict_ms(scored.load)

    def restart(self) -> None:
        for scoring in list(self._begun):
            self._rewind(scoring)

    def check_invariants(self, sequences: SequenceOf[Sequence]) -> None:
        awaiting = {each for each in sequences if each.awaits_kept}
        waiters = {each for scoring in self._scorings.values() for each in scoring.waiters}
        assert awaiting == waiters, "sequences await scores of no prompt, or have ended"
        own = {scoring.sequence for scoring in self._scorings.values()}
        assert set(self._scoring_of) == waiters | own, "scorings of sequences that have ended"
        assert {each.digest for each in self._begun} <= set(self._scorings), "scored for nobody"
        rows = [each.sequence.row for each in self._begun if each.sequence.row is not None]
        most = self._limits.max_num_seqs
        assert sorted([*rows, *self._free_rows]) == list(range(most)), "rows are lost or shared"

    def _is_cached(self, sequence: Sequence) -> bool:
        sparse = sequence.request.sparse_prefill
        if sparse is None or sparse.when != "cold":
            return False
        return self._kv_cache.find_prefix(sequence).num_tokens > sparse.cold_from

    def _leaves_whole(self, scoring: Scoring) -> bool:
        """Settles waiters of a prompt that is now largely cached; True if none is left."""
        for sequence in [each for each in scoring.waiters if self._is_cached(each)]:
            compute_whole(sequence, "cached")
            self.remove(sequence)
        return not scoring.waiters

    def _kept_before(self, sequence: Sequence, digest: bytes) -> KeptTokens | None:
        scores = self._memo.find(digest)
        if scores is None:
            return None
        self.counts.num_remembered += 1
        return select_kept(sequence, scores)

    def _try_begin(self, scoring: Scoring) -> bool:
        sequence = scoring.sequence
        if not self._kv_cache.try_grow(sequence, scoring.num_tokens + LOOK_AHEAD_TOKENS):
            return False
        sequence.row = heapq.heappop(self._free_rows)
        sequence.status = SequenceStatus.RUNNING
        self._begun.append(scoring)
        ids = dict.fromkeys(each.request_id for each in scoring.waiters)
        self._unannounced += [Preparing(request_id=each) for each in ids]
        return True

    def _ready(self) -> list[Scoring]:
        ready = [each for each in self._begun if each.can_go_on]
        retried = [each for each in self._begun if each.is_retried][:1]
        return [each for each in retried if each.can_go_on] if retried else ready

    def _add_entry(self, scored: Batch, scoring: Scoring, count: int, *, is_bounded: bool) -> None:
        sequence, start = scoring.sequence, scoring.sequence.num_computed_tokens
        end = start + count
        is_query = end >= scoring.num_tokens
        scoring.num_queries += is_query
        assert sequence.row is not None
        entry = BatchEntry(
            sequence=sequence,
            row=sequence.row,
            start=start,
            num_new_tokens=count,
            num_choices=int(is_query and scoring.num_queries < LOOK_AHEAD),
            num_preemptions=sequence.num_preemptions,
            num_scored=scoring.num_tokens if is_query else 0,
        )
        sequence.num_pending_tokens += entry.num_choices
        sequence.num_computed_tokens = end
        scored.add(entry)
        scored.send_pages(entry.row, sequence.page_table, sequence.num_sent_pages)
        sequence.num_sent_pages = len(sequence.page_table)
        self._charge(scoring, start, count, is_bounded=is_bounded)

    def _charge(self, scoring: Scoring, start: int, count: int, *, is_bounded: bool) -> None:
        payer = next(iter(scoring.waiters))
        if self.cost is None or not is_bounded:
            self._fair_share.charge_tokens(payer, count)
        else:
            load = StepLoad().plus(start, count, 0)
            self._fair_share.charge_ms(payer, self.cost.predict_ms(load) - self.cost.fixed_ms)

    def _current(self, entry: BatchEntry) -> Scoring | None:
        scoring = self._scoring_of.get(entry.sequence)
        is_current = entry.num_preemptions == entry.sequence.num_preemptions
        return scoring if is_current else None

    def _finish(self, scoring: Scoring, scores: Iterable[float] | None) -> None:
        try:
            found = None if scores is None else chunk_scores(scores, scoring.num_tokens)
        except ValueError:
            found = None
        if found is None:
            self._give_up(scoring)
            return
        self.counts.num_scored += 1
        self._memo.add(scoring.digest, found)
        for sequence in scoring.waiters:
            prune(sequence, select_kept(sequence, found))
        self._settle(scoring)

    def _give_up(self, scoring: Scoring, reason: WholePromptReason = "scoring_failed") -> None:
        self.counts.num_failed += 1
        for sequence in scoring.waiters:
            compute_whole(sequence, reason)
        self._settle(scoring)

    def _settle(self, scoring: Scoring) -> None:
        for sequence in scoring.waiters:
            del self._scoring_of[sequence]
        scoring.waiters.clear()
        self._drop(scoring)

    def _drop(self, scoring: Scoring) -> None:
        del self._scorings[scoring.digest], self._scoring_of[scoring.sequence]
        if scoring.is_begun:
            self._rewind(scoring)

    def _fail(self, scored: Batch) -> None:
        """Each prompt is retried once in steps of its own, then given up."""
        failed = [each for each in map(self._current, scored.entries) if each is not None]
        for scoring in failed:
            if scoring.is_retried:
                self._give_up(scoring)
            scoring.is_retried = True
        self.restart()

    def _rewind(self, scoring: Scoring) -> None:
        sequence = scoring.sequence
        assert sequence.row is not None
        heapq.heappush(self._free_rows, sequence.row)
        self._begun.remove(scoring)
        self._kv_cache.release(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        del sequence.token_ids[scoring.num_tokens :]
        sequence.num_pending_tokens = 0
        scoring.num_queries = 0
