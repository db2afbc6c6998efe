"""`BatchRun`: prompts go through one engine together, step by step, with their times taken.

Owns who was sent when and what has come back; no word of it reaches a screen here. Knows the
engine through `EngineCore`, text through `TextFrontend`, time through the clock it is given.
Invariant: every stream that was sent is cancelled or finished when the run is closed.

Times: a stream's TTFT is from the start of the run (all prompts are sent at once; those that wait
for a row wait) to its first token; its tokens per second are those after the first one.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cadenza.engine.core import EngineCore
from cadenza.frontend.output_processor import OutputProcessor, OutputRouter
from cadenza.frontend.text_frontend import PreparedRequest, TextFrontend
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.request import Request

if TYPE_CHECKING:
    from collections.abc import Generator

    from cadenza.config import EngineConfig
    from cadenza.frontend.loaded_model import LoadedModel

Clock = Callable[[], float]
State = Literal["waiting", "reading", "writing", "preempted", "done", "failed"]


@contextmanager
def opened_model(model: str | None, config: "EngineConfig") -> "Generator[LoadedModel, None, None]":
    """A warm engine, closed at the end. Raises as `load_model`."""
    from cadenza.frontend.loaded_model import load_model

    loaded = load_model(model, config)
    with closing(loaded):
        yield loaded


@dataclass(slots=True, eq=False, kw_only=True)
class Stream:
    """One prompt and its answer so far; `sent_text` is what the model reads, `shown` what the user
    wrote. `row` is where it runs or ran last; `num_read` of its tokens have been computed."""

    index: int
    shown: str
    sent_text: str | None
    request: Request
    state: State = "waiting"
    row: int | None = None
    num_read: int = 0
    num_tokens: int = 0
    ttft_s: float | None = None
    elapsed_s: float | None = None
    processor: OutputProcessor | None = field(default=None, repr=False)

    @property
    def output(self) -> RequestOutput | None:
        """What has come back; None before it was sent."""
        return None if self.processor is None else self.processor.output()

    @property
    def completions(self) -> tuple[CompletionOutput, ...]:
        """Its samples; none before it was sent."""
        output = self.output
        return () if output is None else output.outputs

    @property
    def text(self) -> str:
        """The first sample's."""
        return self.completions[0].text if self.completions else ""

    @property
    def is_finished(self) -> bool:
        return self.processor is not None and self.processor.is_finished

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first; None with less than two."""
        if self.ttft_s is None or self.elapsed_s is None:
            return None
        return rate(self.num_tokens - 1, self.elapsed_s - self.ttft_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt on its way to the engine."""

    shown: str
    sent_text: str | None
    request: Request


class BatchRun:
    """Runs `questions` in one batch.

    Raises:
        InvalidRequestError: one of them cannot be served; none was started.
    """

    def __init__(
        self,
        core: EngineCore,
        text: TextFrontend,
        questions: SequenceOf[Question],
        clock: Clock,
    ) -> None:
        for question in questions:
            core.check(question.request)
        self.core = core
        self.num_steps = 0
        self.streams = [
            Stream(index=index, shown=each.shown, sent_text=each.sent_text, request=each.request)
            for index, each in enumerate(questions)
        ]
        self._text = text
        self._clock = clock
        self._started_s = clock()
        self._ended_s: float | None = None
        self._unsent = deque(self.streams)
        self._open: dict[int, Stream] = {}
        self._router = OutputRouter(core.cancel)

    @property
    def is_done(self) -> bool:
        return not self._unsent and not self._open

    @property
    def elapsed_s(self) -> float:
        """Since the start, until the last stream ended."""
        return (self._clock() if self._ended_s is None else self._ended_s) - self._started_s

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def tokens_per_s(self) -> float | None:
        """Of all tokens, over all of the time."""
        return rate(self.num_tokens, self.elapsed_s)

    def step(self) -> list[Stream]:
        """Advances the batch once; the streams that have something new, in their order."""
        self._send()
        processors = self._router.push(self.core.step())
        self.num_steps += 1
        now_s = self._clock() - self._started_s
        news = [self._take(processor, now_s) for processor in processors]
        self._observe()
        if self.is_done:
            self._ended_s = self._started_s + now_s
        return sorted(news, key=lambda stream: stream.index)

    def close(self) -> None:
        """Cancels what still runs; what has come back stays."""
        for request_id, stream in self._open.items():
            self.core.cancel(request_id)
            self._router.remove(request_id)
            if stream.processor is not None:
                stream.processor.abort()
        self._open.clear()
        self._unsent.clear()

    def _send(self) -> None:
        while self._unsent and self.core.num_queue_slots:
            stream = self._unsent.popleft()
            request_id = self.core.submit(stream.request)
            prepared = PreparedRequest(text=stream.sent_text, request=stream.request)
            stream.processor = OutputProcessor(request_id, prepared, self._text)
            self._router.add(stream.processor)
            self._open[request_id] = stream

    def _take(self, processor: OutputProcessor, now_s: float) -> Stream:
        stream = self._open[processor.request_id]
        stream.elapsed_s = now_s
        stream.num_tokens = processor.num_tokens
        if stream.num_tokens and stream.ttft_s is None:
            stream.ttft_s = now_s
        if processor.is_finished:
            has_failed = any(each.finish_reason == "error" for each in stream.completions)
            stream.state = "failed" if has_failed else "done"
            del self._open[processor.request_id]
        return stream

    def _observe(self) -> None:
        """Takes rows and progress over from the scheduler, for those who watch."""
        scheduler = self.core.scheduler
        for sequence in scheduler.waiting:
            stream = self._open.get(sequence.request_id)
            if stream is not None:
                stream.state = "preempted" if sequence.num_preemptions else "waiting"
        for sequence in scheduler.running:
            stream = self._open.get(sequence.request_id)
            if stream is not None:
                stream.row = sequence.row
                stream.num_read = sequence.num_computed_tokens
                stream.state = "writing" if stream.num_tokens else "reading"


def rate(count: int, seconds: float) -> float | None:
    """`count` per second; None for nothing, and when no time has passed."""
    return count / seconds if count > 0 and seconds > 0 else None
