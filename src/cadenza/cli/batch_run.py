"""`BatchRun`: prompts go through one engine together, step by step. Times: TTFT is from the start
of the run, waiting for a row included; tokens per second are those after the first one. Invariant:
every submitted stream is cancelled or finished when the run is closed.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from cadenza.cli.report import NOTHING
from cadenza.engine.core import EngineCore
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.output_processor import OutputProcessor, OutputRouter
from cadenza.frontend.prepared_request import PreparedRequest
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.request import Request

Clock = Callable[[], float]
State = Literal["waiting", "reading", "writing", "preempted", "done", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, and how it is shown."""

    shown: str
    prepared: PreparedRequest


@dataclass(slots=True, eq=False, kw_only=True)
class BatchStream:
    """`row`: where it runs or ran last; `num_read`: computed prompt tokens."""

    index: int
    question: Question
    state: State = "waiting"
    row: int | None = None
    num_read: int = 0
    num_tokens: int = 0
    ttft_s: float | None = None
    elapsed_s: float | None = None
    processor: OutputProcessor | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        return self.question.shown

    @property
    def request(self) -> Request:
        return self.question.prepared.request

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output(self) -> RequestOutput | None:
        """None before the request is submitted."""
        return None if self.processor is None else self.processor.output()

    @property
    def num_cached_tokens(self) -> int:
        output = self.output
        return 0 if output is None else output.num_cached_tokens

    @property
    def completions(self) -> tuple[CompletionOutput, ...]:
        output = self.output
        return () if output is None else output.outputs

    @property
    def text(self) -> str:
        """The first sample's; of an answer in parts, its reasoning, then its content."""
        return whole_text(self.completions[0]) if self.completions else ""

    @property
    def answer(self) -> str:
        """The first sample's, without reasoning."""
        if not self.completions:
            return ""
        completion = self.completions[0]
        if completion.parts is None:
            return completion.text
        return "".join(part.text for part in completion.parts if part.kind == "content")

    @property
    def finish_reasons(self) -> str | None:
        reasons = [each.finish_reason for each in self.completions]
        return ", ".join(dict.fromkeys(each or NOTHING for each in reasons)) or None

    @property
    def is_finished(self) -> bool:
        return self.processor is not None and self.processor.is_finished

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first; None with fewer than two."""
        if self.ttft_s is None or self.elapsed_s is None:
            return None
        return rate(self.num_tokens - 1, self.elapsed_s - self.ttft_s)


class BatchRun:
    """Raises InvalidRequestError, before any is started, if one of `questions` cannot be served."""

    def __init__(
        self,
        core: EngineCore,
        text: TextFrontend,
        questions: SequenceOf[Question],
        clock: Clock,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        for question in questions:
            core.check(question.prepared.request)
        self.core = core
        self.num_steps = 0
        self.streams = [
            BatchStream(index=index, question=each) for index, each in enumerate(questions)
        ]
        self._text = text
        self._clock = clock
        self._fingerprint = fingerprint
        self._started_s = clock()
        self._ended_s: float | None = None
        self._unsent = deque(self.streams)
        self._open: dict[int, BatchStream] = {}
        self._router = OutputRouter(core.cancel)

    @property
    def is_done(self) -> bool:
        return not self._unsent and not self._open

    @property
    def elapsed_s(self) -> float:
        """From the start until the last stream ended, or until now."""
        return (self._clock() if self._ended_s is None else self._ended_s) - self._started_s

    @property
    def num_requests(self) -> int:
        return len(self.streams)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(stream.num_prompt_tokens for stream in self.streams)

    @property
    def num_cached_tokens(self) -> int:
        return sum(stream.num_cached_tokens for stream in self.streams)

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def tokens_per_s(self) -> float | None:
        return rate(self.num_tokens, self.elapsed_s)

    def step(self) -> list[BatchStream]:
        """Returns the streams that have something new, in their order."""
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
            prepared = stream.question.prepared
            stream.processor = OutputProcessor(request_id, prepared, self._text, self._fingerprint)
            self._router.add(stream.processor)
            self._open[request_id] = stream

    def _take(self, processor: OutputProcessor, now_s: float) -> BatchStream:
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


def whole_text(completion: CompletionOutput) -> str:
    """A completion's text; parts of different kinds have an empty line between them."""
    if completion.parts is None:
        return completion.text
    kinds = groupby(completion.parts, key=lambda part: part.kind)
    return "\n\n".join("".join(part.text for part in parts) for _, parts in kinds)
