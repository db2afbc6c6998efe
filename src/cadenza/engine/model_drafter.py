"""`ModelDrafter`: drafts of a second model, drawn with the same keys and rules as the target's
tokens. Owns how far that model has computed each sequence, and its steps. Invariants: its pages
have the ids of the target's, so that none is allocated for it; whatever it computes, the streams
are the same."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import attrgetter

from cadenza.backends.base import Runner, StepHandle
from cadenza.batch.batch import Batch, BatchEntry
from cadenza.batch.packing import Packer
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_cost import StepCost, StepLoad
from cadenza.batch.step_schema import StepOutput
from cadenza.config import EngineLimits
from cadenza.drafting.draft_ledger import DraftGroup
from cadenza.drafting.drafts import Lookahead, SharedAcceptance
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.scheduler.draft_plan import DraftNumbers, SpentMs
from cadenza.scheduler.step_drafts import DraftSlot, DraftStep

logger = logging.getLogger(__name__)

_row_of = attrgetter("row")

REST_STEPS = 16  # without drafts after they were not worth their time for any sequence
# Tokens of a sequence without drafts, after computing what its second model lacks did not pay.
PAUSE_TOKENS = 64
FORESEEN_TOKENS = 256  # for which a stream is expected to go on, at most
LEAST_CATCH_UP = 16
# Tokens of a step of the second model, as a multiple of the most that one was measured with: what
# far more take is known only by a cost that may be wrong, and would be a loss of many steps.
MORE_TOKENS = 2
CORRECTION = 0.1
# After their first measured price, which is taken as it is: each prompt that is computed at a
# wrong one is a loss of many steps.
CORRECTION_OF_PROMPTS = 0.5
MAX_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A second model for drafts, warm.

    Args:
        limits: those of its runner: the target's, but for the context and the token budget.
        shares_kv: it computes on the target's own KV, in which its tokens are written over.
        reads_hidden: it computes a token from the hidden state that the target's runner kept for
            the token before it, and a token that it drew itself from its own output. So it has
            nothing for the first token, and tokens of accepted drafts are computed again.
        cost: of its steps; None to draft whatever they cost.
    """

    runner: Runner
    limits: EngineLimits
    shares_kv: bool
    reads_hidden: bool = False
    cost: StepCost | None = None


@dataclass(slots=True, eq=False)
class _Progress:
    """What the second model has computed of a sequence since its `num_preemptions`-th start: its
    first tokens, of which those from `num_known` on are `drafts`."""

    num_preemptions: int
    num_computed: int = 0
    num_sent_pages: int = 0
    num_known: int = 0
    drafts: list[int] = field(default_factory=list[int])

    def num_right(self, token_ids: list[int]) -> int:
        known = self.num_known
        for token_id in self.drafts:
            if known == len(token_ids) or token_ids[known] != token_id:
                break
            known += 1
        return min(self.num_computed, known, len(token_ids) - 1)


@dataclass(slots=True, eq=False)
class _Row:
    """An entry of the target's step: its next token to compute here, and its drafts so far, of at
    most `count`. `ahead` is what its constraint allows after these, from the first draw on."""

    entry: BatchEntry
    progress: _Progress
    start: int
    count: int
    drafts: list[int] = field(default_factory=list[int])
    ahead: Lookahead | None = None

    @property
    def sequence(self) -> Sequence:
        return self.entry.sequence

    @property
    def row(self) -> int:
        return self.entry.row

    @property
    def group(self) -> DraftGroup:
        assert self.sequence.drafting is not None
        return self.sequence.drafting.group

    @property
    def num_missing(self) -> int:
        return len(self.sequence.token_ids) - self.start

    def take(self, output: StepOutput, index: int, model: DraftModel) -> None:
        token_id = int(output.token_ids[index])
        is_sound = output.is_finite[index] and output.has_choice[index]
        has_ended = bool(self.drafts) and self.drafts[-1] in self.sequence.stop_token_ids
        is_able = 0 <= token_id < model.runner.vocab_size and token_id != model.limits.placeholder
        if not is_sound or has_ended or not is_able:
            self.count = len(self.drafts)
        if len(self.drafts) == self.count:
            return
        if self.ahead is None or self.ahead.take(token_id):
            self.drafts.append(token_id)
            if self.ahead is None or not self.ahead.is_over:
                return
        self.count = len(self.drafts)


class ModelDrafter:
    """A `core.step_drafts.Drafter` over the runner of a second model; `clock` (seconds, monotonic)
    measures its steps, to correct their cost."""

    def __init__(
        self, model: DraftModel, kv_cache: KVCacheManager, clock: Callable[[], float]
    ) -> None:
        # by whether requests ask for drafts
        self.acceptance = {False: SharedAcceptance(), True: SharedAcceptance()}
        self._model = model
        self._kv_cache = kv_cache
        self._clock = clock
        self._packer = Packer(model.limits, model.runner.vocab_size)
        self._progress: dict[int, tuple[Sequence, _Progress]] = {}  # by row
        self._contents: dict[int, bytes] = {}  # the keys of pages whose KV it has computed
        self._scale = 1.0
        self._prompt_scale: float | None = None
        self._most_measured = 0  # tokens of a step
        self._rests_until = 0
        self._num_failures = 0
        # of the tokens that it computes; a hidden state is of the token before
        self._first_position = int(model.reads_hidden)

    def is_due(self, number: int) -> bool:
        return number >= self._rests_until and self._num_failures < MAX_FAILURES

    @property
    def _cost(self) -> StepCost | None:
        cost = self._model.cost
        return None if cost is None else cost.scaled(self._scale)

    @property
    def _prompt_cost(self) -> StepCost | None:
        """Of tokens that it lacks: many in a step are another matter than one of each row."""
        cost = self._model.cost
        return None if cost is None else cost.scaled(self._prompt_scale or self._scale)

    def is_worth(self, sequences: SequenceOf[Sequence], step: DraftStep) -> bool:
        cost = self._cost
        if step.cost is None or cost is None:
            return True
        plan = step.plan([(each, each.drafting.most) for each in sequences if each.drafting], cost)
        if not any(plan.counts):
            self._rests_until = step.number + REST_STEPS
            for sequence in sequences:
                assert sequence.drafting is not None
                sequence.drafting.pause(sequence.num_tokens)
        return any(plan.counts)

    def propose(self, slots: SequenceOf[DraftSlot], step: DraftStep) -> None:
        slots = self._with_pages(slots, step.room)
        if not slots:
            return
        context = self._model.limits.max_model_len
        rows = [self._row_of(slot) for slot in slots if slot.entry.end < context]
        catch_up = self._plan(rows, step)
        rows = [row for row in rows if row.count]
        if not rows:
            self._rests_until = step.number + REST_STEPS
            return
        start_s = self._clock()
        before = self._prompt_cost
        missing_ms = [_catch_up_ms(row, before) for row in rows]
        try:
            self._draft(rows, catch_up)
        except Exception:
            self._num_failures += 1
            logger.exception("a step of the draft model failed; the streams go on without drafts")
            self._reset()
            return
        finally:
            step.spent = _spent(rows, missing_ms, 1000 * (self._clock() - start_s), before)
        for row in rows:
            row.entry.drafts = tuple(row.drafts)
            if row.drafts and row.ahead is not None:
                row.entry.masks = tuple(row.ahead.masks)

    def _with_pages(self, slots: SequenceOf[DraftSlot], room: int) -> list[DraftSlot]:
        """Those of which the second model can compute the newest token, with an equal share of the
        room, and pages for as many drafts."""
        share = max(1, room // len(slots))
        found: list[DraftSlot] = []
        for entry, drafting, most in slots[: max(0, room)]:
            count = min(share, most, drafting.most)
            count = self._kv_cache.grow_behind(entry.sequence, entry.end, count)
            if count > 0 and entry.end > self._first_position:
                found.append(DraftSlot(entry, drafting, count))
        return found

    def _row_of(self, slot: DraftSlot) -> _Row:
        entry, sequence = slot.entry, slot.entry.sequence
        progress, num_tokens = self._progress_of(entry), len(sequence.token_ids)
        progress.num_computed = progress.num_right(sequence.token_ids)
        start = max(progress.num_computed, self._first_position)
        if self._model.shares_kv:
            start = num_tokens - 1
        row = _Row(
            entry, progress, start, min(slot.most, self._model.limits.max_model_len - num_tokens)
        )
        progress.num_known = num_tokens
        progress.drafts = [] if self._model.reads_hidden else row.drafts
        return row

    def _progress_of(self, entry: BatchEntry) -> _Progress:
        row, sequence = entry.row, entry.sequence
        holder, progress = self._progress.get(row, (None, None))
        if holder is sequence and progress and progress.num_preemptions == sequence.num_preemptions:
            return progress
        progress = _Progress(sequence.num_preemptions)
        self._progress[row] = sequence, progress
        self._packer.forget_row(row)
        keys = self._kv_cache.page_keys(sequence)
        for page_id, key in zip(sequence.page_table, keys, strict=False):
            if self._contents.get(page_id) != key:
                break
            progress.num_computed += self._model.limits.page_size
        progress.num_known = progress.num_computed
        return progress

    def _plan(self, rows: list[_Row], step: DraftStep) -> int:
        """Sets how many drafts each row tries; returns how many missing tokens may be computed
        beside one of each."""
        budget = self._model.limits.max_num_batched_tokens - len(rows)
        cost, prompt_cost = self._cost, self._prompt_cost
        if step.cost is None or cost is None or prompt_cost is None:
            return budget
        plan = step.plan([(row.sequence, row.count) for row in rows], cost)
        catch_up_ms: dict[DraftGroup, float] = {}
        for row, count in zip(rows, plan.counts, strict=True):
            row.count = count
            more_ms = catch_up_ms.get(row.group, 0.0) + _catch_up_ms(row, prompt_cost)
            if count and _pays(row, plan, prompt_cost) and _is_affordable(more_ms, row.group, step):
                catch_up_ms[row.group] = more_ms
            elif count:
                row.count = 0
                assert row.sequence.drafting is not None
                row.sequence.drafting.resumes_at = len(row.sequence.token_ids) + PAUSE_TOKENS
        # As long as the step itself: streams wait at most twice as long meanwhile.
        in_time = int(step.cost.base_ms / prompt_cost.token_ms)
        most = min(in_time, MORE_TOKENS * self._most_measured)
        return min(budget, max(LEAST_CATCH_UP, most))

    def _draft(self, rows: list[_Row], catch_up: int) -> None:
        """Computes what rows lack, those that lack least first, then draws. Steps are launched
        before earlier ones are read, unless a row is constrained: what it may draw depends on what
        it drew."""
        start_s, loads = self._clock(), list[StepLoad]()
        batch = Batch(0)
        drawing: list[_Row] = []
        for row in sorted(rows, key=lambda each: each.num_missing):
            missing = row.num_missing
            count = min(missing, catch_up + 1)
            if count <= 0:
                continue
            catch_up -= count - 1
            self._add_to_batch(batch, row, count, samples=count == missing)
            if count == missing:
                drawing.append(row)
        drawn = [(drawing, self._launch(batch, loads))]
        depth = 1
        while True:
            if any(row.ahead is not None for row in drawing):
                self._read(drawn)
            drawing = [row for row in drawing if row.count > depth]
            if not drawing:
                break
            batch = Batch(depth)
            for row in drawing:
                self._add_to_batch(batch, row, 1, samples=True)
            drawn.append((drawing, self._launch(batch, loads)))
            depth += 1
        self._read(drawn)
        self._note_pages(rows)
        self._observe(loads, 1000 * (self._clock() - start_s))

    def _read(self, drawn: list[tuple[list[_Row], StepHandle]]) -> None:
        for rows, handle in drawn:
            output = handle.result()
            for index, row in enumerate(sorted(rows, key=_row_of)):
                row.take(output, index, self._model)
        drawn.clear()

    def _add_to_batch(self, batch: Batch, row: _Row, count: int, *, samples: bool) -> None:
        sequence, start, progress = row.sequence, row.start, row.progress
        entry = BatchEntry(sequence, row.row, start, count, int(samples), sequence.num_preemptions)
        if samples and sequence.constraint is not None:
            row.ahead = row.ahead or Lookahead(sequence.constraint)
            entry.masks = (row.ahead.masks[-1],)
        batch.add(entry)
        size = self._model.limits.page_size
        table = sequence.page_table[: self._model.limits.max_pages_per_seq]
        batch.send_pages(row.row, table, progress.num_sent_pages)
        progress.num_sent_pages = len(table)
        for page_id in table[start // size : (start + count - 1) // size + 1]:
            self._contents.pop(page_id, None)
        row.start = progress.num_computed = start + count

    def _launch(self, batch: Batch, loads: list[StepLoad]) -> StepHandle:
        batch.entries.sort(key=_row_of)
        buckets = self._model.runner.token_buckets
        bucket = next(size for size in buckets if size >= batch.num_tokens)
        inputs = self._packer.pack(batch, bucket)
        inputs.logits.num_logprobs[:] = -1
        loads.append(batch.load)
        return self._model.runner.launch(inputs)

    def _note_pages(self, rows: list[_Row]) -> None:
        if self._model.shares_kv:
            return
        size = self._model.limits.page_size
        for row in rows:
            known = min(row.start, len(row.sequence.token_ids)) // size
            keys = self._kv_cache.page_keys(row.sequence)
            self._contents.update(zip(row.sequence.page_table[:known], keys[:known], strict=False))

    def _observe(self, loads: list[StepLoad], measured_ms: float) -> None:
        cost = self._model.cost
        if cost is None:
            return
        first, known_ms = loads[0], sum([cost.predict_ms(load) for load in loads])
        num_missing = first.num_tokens - first.num_logits
        if num_missing < LEAST_CATCH_UP:
            ratio = min(4.0, max(0.25, measured_ms / known_ms))
            self._scale += CORRECTION * (ratio - self._scale)
        else:
            drawing = StepLoad(num_tokens=first.num_logits, num_logits=first.num_logits)
            missing_ms = cost.predict_ms(first) - cost.predict_ms(drawing)
            ratio = (measured_ms - self._scale * (known_ms - missing_ms)) / missing_ms
            known = ratio if self._prompt_scale is None else self._prompt_scale
            self._prompt_scale = max(0.1, known + CORRECTION_OF_PROMPTS * (ratio - known))
        self._most_measured = max(self._most_measured, *[load.num_tokens for load in loads])

    def _reset(self) -> None:
        self._packer.forget_rows()
        self._progress.clear()
        self._contents.clear()
        try:
            self._model.runner.reset()
        except Exception:
            self._num_failures = MAX_FAILURES
            logger.exception("the draft model cannot be reset; there are no more drafts")


def _pays(row: _Row, plan: DraftNumbers, cost: StepCost) -> bool:
    """Whether drafts are predicted to save more time than computing what the second model lacks."""
    rest = row.sequence.max_num_tokens - len(row.sequence.token_ids)
    return plan.saved_ms * min(rest, FORESEEN_TOKENS) > _catch_up_ms(row, cost)


def _catch_up_ms(row: _Row, cost: StepCost | None) -> float:
    """To compute what the second model lacks but for the newest token; a few are its own drafts."""
    if cost is None or row.num_missing <= LEAST_CATCH_UP:
        return 0.0
    load = StepLoad().plus(row.start, row.num_missing - 1, 0)
    return cost.predict_ms(load) - cost.fixed_ms


def _is_affordable(catch_up_ms: float, group: DraftGroup, step: DraftStep) -> bool:
    """Whether drafts have saved as much, or may cost as much on trial."""
    account = step.accounts.get(group)
    if account is None or step.cost is None or not catch_up_ms:
        return True
    return account.may_invest(catch_up_ms / step.cost.base_ms)


def _spent(
    rows: list[_Row], missing_ms: list[float], spent_ms: float, cost: StepCost | None
) -> dict[DraftGroup, SpentMs]:
    """By group: the computed part of each row's `missing_ms`, and a share of the rest by the number
    of drafts."""
    caught_up: dict[DraftGroup, float] = {}
    weights: dict[DraftGroup, int] = {}
    for row, before_ms in zip(rows, missing_ms, strict=True):
        done_ms = max(0.0, before_ms - _catch_up_ms(row, cost))
        caught_up[row.group] = caught_up.get(row.group, 0.0) + done_ms
        weights[row.group] = weights.get(row.group, 0) + max(1, len(row.drafts))
    all_ms = sum(caught_up.values())
    scale = min(1.0, spent_ms / all_ms) if all_ms else 0.0
    each_ms = (spent_ms - scale * all_ms) / sum(weights.values())
    return {
        group: SpentMs(scale * ms + each_ms * weights[group], scale * ms)
        for group, ms in caught_up.items()
    }
