"""Measures what a runner's steps, and its encoding of images, cost, before an engine serves.
Invariant: the steps leave nothing that a later step reads: KV is written before it is read, and the
rows' data are sent again."""

from collections.abc import Callable

from cadenza.backends.base import ImageRunner, Runner
from cadenza.batch.batch import Batch, BatchEntry
from cadenza.batch.image_cost import ImageCost, ImageWork, MeasuredQuanta, fit_image_cost
from cadenza.batch.packing import Packer
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_cost import (
    MeasuredStep,
    StepBound,
    StepCost,
    StepLoad,
    derive_bound_ms,
    fit_step_cost,
    num_keys,
)
from cadenza.batch.step_schema import ImageCall
from cadenza.config import EngineLimits
from cadenza.request import Attachment, Request, SamplingParams

CHUNK = 64  # Prompt tokens of the timed chunks; fewer where the limits do not allow as many.

FAR = 2048  # The position of the far chunk's first token, at most

# Steps of a kind that are timed, and seconds after which no further one is: an engine should start
# in seconds, and what else runs on the machine is a small part of a long step.
MOST_TIMED, ENOUGH_S = 4, 1.0

TIMED_QUANTA = 16  # Quanta of one kind that are timed together, at most


def make_step_bound(cost: StepCost, limits: EngineLimits, max_ms: float | None) -> StepBound:
    """A bound over measured costs; `max_ms` None derives it from them, and keeps it current."""
    if max_ms is not None:
        return StepBound(max_ms=max_ms, cost=cost)

    def derive_ms(cost: StepCost) -> float:
        return derive_bound_ms(cost, limits.max_num_seqs, limits.max_model_len)

    return StepBound(max_ms=derive_ms(cost), cost=cost, derive_ms=derive_ms)


def measure_step_cost(runner: Runner, limits: EngineLimits, clock: Callable[[], float]) -> StepCost:
    """Times a decode of one row and of all rows, and a chunk of a prompt near and far, with a warm
    runner. Keys cost nothing where a page is a slot whose whole capacity every token attends to."""
    timer = _StepTimer(runner, limits, clock)
    chunk = min(CHUNK, limits.max_num_batched_tokens, timer.max_tokens)
    far = min(FAR, timer.max_tokens - chunk)
    num_rows = min(limits.max_num_seqs, limits.num_pages)
    return fit_step_cost(
        one_row=timer.time(num_rows=1, start=0, count=1, has_logits=True),
        all_rows=timer.time(num_rows=num_rows, start=0, count=1, has_logits=True)
        if num_rows > 1
        else None,
        chunk=timer.time(num_rows=1, start=0, count=chunk, has_logits=False),
        far_chunk=timer.time(num_rows=1, start=far, count=chunk, has_logits=False)
        if far > 0 and limits.slot_unit is None
        else None,
    )


def measure_decode_ms(
    runner: Runner, limits: EngineLimits, clock: Callable[[], float], num_rows: int, start: int
) -> float:
    """Of so many rows, each after `start` tokens."""
    timer = _StepTimer(runner, limits, clock)
    return timer.time(num_rows=num_rows, start=start, count=1, has_logits=True).ms


def measure_image_cost(
    runner: Runner, limits: EngineLimits, part: Attachment, clock: Callable[[], float]
) -> ImageCost:
    """Times the encoding of an image part, or as much as `ENOUGH_S` allows, with no image in the
    slots."""
    assert isinstance(runner, ImageRunner), "the runner encodes no images"
    packer, work = Packer(limits, runner.vocab_size), runner.image_work(part)
    measured: list[MeasuredQuanta] = []
    start, spent_s = 0, 0.0
    while start < len(work) and spent_s < ENOUGH_S:
        stop = _end_of_kind(work, start)
        batch = Batch(0)
        batch.image_calls.append(ImageCall.into_first_slots(part, start, stop))
        inputs = packer.pack(batch, runner.token_buckets[0])
        start_s = clock()
        runner.launch(inputs).result()
        took_s = clock() - start_s
        measured.append(MeasuredQuanta(load=work.load(start, stop), ms=1000 * took_s))
        start, spent_s = stop, spent_s + took_s
    return fit_image_cost(measured)


def _end_of_kind(work: ImageWork, start: int) -> int:
    stop = start + 1
    while stop < min(len(work), start + TIMED_QUANTA):
        if bool(work.attention[stop]) != bool(work.attention[start]):
            break
        stop += 1
    return stop


class _StepTimer:
    def __init__(self, runner: Runner, limits: EngineLimits, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._limits = limits
        self._clock = clock
        self._packer = Packer(limits, runner.vocab_size)

    @property
    def max_tokens(self) -> int:
        limits = self._limits
        return min(limits.max_model_len, limits.num_pages * limits.page_size)

    def time(self, *, num_rows: int, start: int, count: int, has_logits: bool) -> MeasuredStep:
        """The least time, since other work on the machine only adds to it."""
        times_s: list[float] = []
        while len(times_s) < MOST_TIMED and sum(times_s) < ENOUGH_S:
            times_s.append(self._time_once(num_rows, start, count, has_logits))
        load = StepLoad(
            num_tokens=num_rows * count,
            num_logits=num_rows * has_logits,
            num_keys=num_rows * num_keys(start, count),
        )
        return MeasuredStep(load=load, ms=1000 * min(times_s))

    def _time_once(self, num_rows: int, start: int, count: int, has_logits: bool) -> float:
        batch = Batch(0)
        for row in range(num_rows):
            self._add_row(batch, row, start, count, has_logits)
        bucket = next(size for size in self._runner.token_buckets if size >= batch.num_tokens)
        inputs = self._packer.pack(batch, bucket)
        start_s = self._clock()
        self._runner.launch(inputs).result()
        return self._clock() - start_s

    def _add_row(self, batch: Batch, row: int, start: int, count: int, has_logits: bool) -> None:
        end, size = start + count, self._limits.page_size
        request = Request(
            prompt_token_ids=(0,) * end, params=SamplingParams(temperature=0.0, max_tokens=1)
        )
        sequence = Sequence(
            request_id=row,
            request=request,
            seed=0,
            max_num_tokens=end + 1,
            stop_token_ids=frozenset(),
            token_ids=[0] * end,
        )
        num_pages = -(-end // size)
        batch.send_pages(row, [row * num_pages + at for at in range(num_pages)], 0)
        batch.add(BatchEntry(sequence, row, start, count, int(has_logits), 0))
