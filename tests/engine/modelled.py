"""An engine in modelled time: what drafts save or cost against the same requests without them.

A step takes what a `Machine` says, by the number of its tokens; the host takes its own time for
each launch, beside the device's unless the step waits for the newest tokens. Nothing else does.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_cost import StepCost
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import EngineLimits
from cadenza.drafting.drafts import Drafting
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.model_drafter import DraftModel
from cadenza.events import Token
from cadenza.request import Request, SamplingParams
from cadenza.speculative_config import SpeculativeConfig
from tests.engine.simulation import VOCAB_SIZE
from tests.engine.solo import solo_stream

PAGE_SIZE = 64

Accepts = Callable[[int], float]
"""The chance that a draft is right, by the number of tokens generated so far in all streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Milliseconds of a step: `read_ms` up to `num_free` tokens, and `token_ms` for each beyond.

    The host takes `host_ms` for a launch. `noise` is the standard deviation of a step's time, as a
    share; `believed` the multiple at which the costs of drafts are measured at the start.
    """

    read_ms: float = 10.0
    num_free: int = 4
    token_ms: float = 0.5
    host_ms: float = 0.3
    noise: float = 0.0
    believed: float = 1.0

    def step_ms(self, num_tokens: int) -> float:
        return self.read_ms + self.token_ms * max(0, num_tokens - self.num_free)

    def cost(self, num_rows: int) -> StepCost:
        """As measured at the start: of one row, and of all of them."""
        more_ms = (self.step_ms(num_rows) - self.read_ms) / max(1, num_rows - 1)
        more_ms = max(0.01 * self.read_ms, self.believed * more_ms) / 2
        return StepCost(fixed_ms=self.read_ms, token_ms=more_ms, logit_ms=more_ms, key_ms=1e-9)


@dataclass(slots=True)
class Time:
    """Of the host, and when the device will have computed what was launched."""

    now_ms: float = 0.0
    free_ms: float = 0.0
    scale: float = 1.0

    def seconds(self) -> float:
        return self.now_ms / 1000


@dataclass(eq=False)
class Modelled:
    """A runner whose steps take time; `draws` may exchange tokens."""

    runner: FakeRunner
    machine: Machine
    time: Time
    rng: random.Random
    draws: Callable[[ModelInputs, Any], Any] | None = None

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        time, handle = self.time, self.runner.launch(inputs)
        time.now_ms += self.machine.host_ms
        noise = max(0.3, self.rng.gauss(1.0, self.machine.noise)) if self.machine.noise else 1.0
        took_ms = noise * time.scale * self.machine.step_ms(inputs.num_tokens)
        time.free_ms = done_ms = max(time.now_ms, time.free_ms) + took_ms
        output = handle.output if self.draws is None else self.draws(inputs, handle.output)

        def read() -> None:
            time.now_ms = max(time.now_ms, done_ms)

        return FakeStepHandle(output, read)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`num_rows` streams at a time, `num_streams` in all, of about this length: streams that all
    begin and end together would share their steps better without drafts than with."""

    num_rows: int
    num_streams: int
    length: int
    num_prompt: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Some:
    """Of so many streams one, how often its drafts are right, and whether it asks for them."""

    every: int
    accepts: Accepts
    asks: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What drafts, how often it is right, and what it costs.

    Args:
        drafter: of the second model; None: each stream looks its drafts up.
        scale: of all times, by the number of generated tokens.
        some: those streams whose drafts are another matter; None for none.
    """

    seed: int
    phases: tuple[Phase, ...]
    accepts: Accepts
    target: Machine = Machine()
    drafter: Machine | None = None
    most: int = 4
    scale: Callable[[int], float] = lambda _: 1.0
    some: Some | None = None

    def are_some(self, number: int) -> bool:
        return self.some is not None and number % self.some.every == self.some.every - 1

    @property
    def limits(self) -> EngineLimits:
        length = max(2 * phase.length + phase.num_prompt for phase in self.phases) + 1
        rows = max(phase.num_rows for phase in self.phases)
        pages = -(-length // PAGE_SIZE)
        return EngineLimits(
            max_num_seqs=rows,
            max_num_batched_tokens=max(256, 20 * rows),
            max_model_len=pages * PAGE_SIZE,
            page_size=PAGE_SIZE,
            num_pages=rows * pages + 2,
            max_num_queued_reqs=512,
            enable_prefix_caching=False,
        )


@dataclass(eq=False)
class Guesses:
    """Knows the stream, and is right with the chance of the case."""

    sequence: Sequence
    play: "Play"

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        stream = self.play.stream_of(self.sequence)
        at = len(token_ids) - self.sequence.num_prompt_tokens
        guess = self.play.guess
        number = self.sequence.request_id
        return [guess(token_id, number) for token_id in stream[at : at + most]]


class Always(Drafting):
    """Never pauses."""

    def learn(self, num_tokens: int, num_drafts: int, num_accepted: int) -> None:
        pass


@dataclass(eq=False)
class Play:
    """One run of a case; if `is_forced`, with as many drafts as ever possible."""

    case: Case
    has_drafts: bool
    is_forced: bool = False
    time: Time = field(default_factory=Time)
    num_tokens: int = 0
    decode_ms: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    """Behind the first token: of all others, and of all of `some`."""
    _streams: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    _newest_ms: dict[int, float] = field(default_factory=dict[int, float])

    def __post_init__(self) -> None:
        case, limits = self.case, self.case.limits
        self._rng = random.Random(f"guesses {case.seed}")
        rng = random.Random(f"times {case.seed} {self.has_drafts}")
        rows = limits.max_num_seqs
        target = Modelled(_fake(limits), case.target, self.time, rng)
        self._second, drafter = _fake(limits), None
        if case.drafter is not None and self.has_drafts:
            runner = Modelled(self._second, case.drafter, self.time, rng, self._draw)
            cost = None if self.is_forced else case.drafter.cost(rows)
            drafter = DraftModel(runner=runner, limits=limits, shares_kv=False, cost=cost)
        config = SpeculativeConfig(
            method="ngram" if drafter is None else "draft_model",
            model=None if drafter is None else "small",
            num_speculative_tokens=case.most,
        )
        options = CoreOptions(
            clock=self.time.seconds,
            step_cost=None if self.is_forced else case.target.cost(rows),
            speculation=config,
            draft_model=drafter,
            loop="overlap",
        )
        self.engine = EngineCore(target, limits, options)

    def guess(self, token_id: int, number: int) -> int:
        """For the stream of this number."""
        some = self.case.some if self.case.are_some(number) else None
        is_right = self._rng.random() < (some or self.case).accepts(self.num_tokens)
        return token_id if is_right else (token_id + 1) % VOCAB_SIZE

    def stream_of(self, sequence: Sequence) -> list[int]:
        found = self._streams.get(sequence.request_id)
        if found is None:
            solo = solo_stream(sequence.request, sequence.seed, sequence.max_num_tokens)
            found = self._streams[sequence.request_id] = list(solo.token_ids)
        return found

    def _draw(self, inputs: ModelInputs, output: Any) -> Any:
        numbers = {each.row: each.request_id for each in self.engine.scheduler.running}
        rows = inputs.logits.rows[: len(output.token_ids)]
        own = zip(output.token_ids.tolist(), rows.tolist(), strict=True)
        drawn = np.array([self.guess(each, numbers[row]) for each, row in own], np.int32)
        self._second._last_sampled[rows] = drawn
        return replace(output, token_ids=drawn)

    def run(self) -> float:
        """Milliseconds that all phases took."""
        number = 0
        for phase in self.case.phases:
            left = phase.num_streams
            while left or not self.engine.is_idle:
                scheduler = self.engine.scheduler
                num_open = len(scheduler.running) + len(scheduler.waiting)
                for _ in range(min(left, phase.num_rows - num_open)):
                    self._submit(phase, number)
                    number, left = number + 1, left - 1
                self._note([e for e in self.engine.step() if isinstance(e, Token)])
                self.time.scale = self.case.scale(self.num_tokens)
        return self.time.now_ms

    def _note(self, tokens: list[Token]) -> None:
        self.num_tokens += len(tokens)
        for number in {each.request_id for each in tokens}:
            if number in self._newest_ms:
                self.decode_ms[self.case.are_some(number)] += (
                    self.time.now_ms - self._newest_ms[number]
                )
            self._newest_ms[number] = self.time.now_ms

    def _submit(self, phase: Phase, number: int) -> None:
        prompt = tuple(
            (number * 31 + at * 7 + at * at) % VOCAB_SIZE for at in range(phase.num_prompt)
        )
        some = self.case.some
        asks = some is not None and some.asks and self.case.are_some(number)
        params = SamplingParams(
            max_tokens=phase.length * (7 + number * 5 % 7) // 10,
            ignore_eos=True,
            temperature=0.0,
            speculative=(asks or None) if self.has_drafts else False,
        )
        self.engine.submit(Request(prompt_token_ids=prompt, params=params))
        for sequence in self.engine.scheduler.waiting:
            drafting = sequence.drafting
            if drafting is not None and self.is_forced:
                sequence.drafting = drafting = Always(source=drafting.source, most=drafting.most)
            if drafting is not None and drafting.source is not None:
                drafting.source = Guesses(sequence, self)


def _fake(limits: EngineLimits) -> FakeRunner:
    return FakeRunner(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        vocab_size=VOCAB_SIZE,
    )


def best_ratio(case: Case) -> float:
    """The same of whoever knows the best number of drafts, which every stream has in each step."""
    without_ms = Play(case, has_drafts=False).run()
    forced = [Play(replace(case, most=n), True, True).run() for n in range(1, case.most + 1)]
    return max(1.0, without_ms / min(forced))


def stream_ratios(case: Case) -> tuple[float, float]:
    """Of `some` streams and of the others: the rate with drafts, as a multiple of that without."""
    plays = [Play(case, has_drafts=has_drafts) for has_drafts in (False, True)]
    for play in plays:
        play.run()
    off, on = [play.decode_ms for play in plays]
    return off[True] / on[True], off[False] / on[False]


def rate_ratio(case: Case) -> float:
    """The rate with drafts, as a multiple of that without."""
    return Play(case, has_drafts=False).run() / Play(case, has_drafts=True).run()
