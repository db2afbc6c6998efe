"""Events become outputs: `OutputRouter.push` gives an event to its request's `OutputProcessor`, and
that to a `SampleOutput`; readers call `take` for what is new, or `output`. Invariants: outputs only
grow, and joined deltas are the cumulative output; a failure to make text ends its own request
only."""

import logging
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import get_args

from cadenza.errors import must_be
from cadenza.events import (
    CacheMiss,
    ErrorKind,
    Event,
    Finished,
    PromptLogprobs,
    Started,
    Token,
    TokenLogprobs,
)
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.prepared_request import PreparedRequest
from cadenza.frontend.receipts import AnsweredRequest, make_receipt
from cadenza.frontend.sample_output import SampleOutput
from cadenza.frontend.sparse_prompts import started_use
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import CompletionOutput, Logprob, OutputKind, RequestOutput
from cadenza.text.tokens.decoder_stages import REPLACEMENT

logger = logging.getLogger(__name__)

CancelSample = Callable[[int, int | None], object]

TEXT_FAILED = "the answer's text could not be made; the log has the cause"


def check_kind(kind: object) -> None:
    if not isinstance(kind, str) or kind not in get_args(OutputKind):
        raise must_be("kind", kind, f"one of {', '.join(get_args(OutputKind))}")


class OutputProcessor:
    """Collects the events of `request_id`, under which `prepared` was submitted. `fingerprint`: of
    the engine's answers, where it is known; receipts need it."""

    __slots__ = (
        "_fingerprint",
        "_placeholders",
        "_prepared",
        "_prompt_logprobs",
        "_running",
        "_samples",
        "_text",
        "answer_schema",
        "cache_miss",
        "kept",
        "num_cached_tokens",
        "prompt_use",
        "request_id",
    )

    def __init__(
        self,
        request_id: int,
        prepared: PreparedRequest,
        text: TextFrontend,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        self.request_id = request_id
        self._prepared = prepared
        self._fingerprint = fingerprint
        self._text = text
        # Tokens of images, which have no probabilities: no model can generate them.
        ids, parts = prepared.request.prompt_token_ids, prepared.request.attachments
        self._placeholders = {ids[part.start] for part in parts}
        params, make_parser = prepared.request.params, prepared.make_parser
        self.answer_schema = text.unenforced_schema(params.structured)
        self._samples = [
            text.sample_output(params, sample, make_parser) for sample in range(params.n)
        ]
        self._running = dict(enumerate(self._samples))
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self.num_cached_tokens = 0
        self.cache_miss: CacheMiss | None = None
        self.prompt_use = prepared.prompt_use
        self.kept: bytes | None = None

    @property
    def fingerprint(self) -> Fingerprint | None:
        """None until the engine's is known, and until it is known whether the prompt is pruned:
        when the request starts."""
        request, use, own = self._prepared.request, self.prompt_use, self._fingerprint
        is_whole = request.sparse_prefill is None or (use is not None and use.whole_because)
        if own is None or is_whole:
            return own
        return None if self.kept is None else self._text.sparse.fingerprint_of(request, own)

    @property
    def prompt(self) -> str | None:
        return self._prepared.text

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self._prepared.request.prompt_token_ids

    @property
    def prompt_logprobs(self) -> tuple[dict[int, Logprob] | None, ...] | None:
        is_asked = self._prepared.request.params.prompt_logprobs is not None
        return tuple(self._prompt_logprobs) if is_asked else None

    @property
    def is_finished(self) -> bool:
        return not self._running

    @property
    def num_tokens(self) -> int:
        return sum(each.num_shown_tokens for each in self._samples)

    def push(self, event: Token | PromptLogprobs | Finished) -> int | None:
        """Returns the sample that a stop string ended, if one was. Detokenising errors come
        through: then call `fail`."""
        if isinstance(event, PromptLogprobs):
            self._push_prompt_logprobs(event)
            return None
        output = self._running.get(event.sample)
        if output is None:
            return None
        if event.sample == 0 and event.num_cached_tokens is not None:
            self.num_cached_tokens = event.num_cached_tokens  # all samples share one prompt
            self.cache_miss = event.cache_miss or self.cache_miss
        if isinstance(event, Finished):
            output.finish(event)
            del self._running[event.sample]
            return None
        found = event.logprobs
        if event.is_draft or event.num_rejected_drafts:
            output.count_drafts(is_accepted=event.is_draft, num_rejected=event.num_rejected_drafts)
        has_ended = output.push(
            event.token_id, None if found is None else self._describe(event.token_id, found)
        )
        if not has_ended:
            return None
        del self._running[event.sample]
        return event.sample

    def start(self, event: Started) -> None:
        if self._prepared.request.sparse_prefill is not None:
            self.kept = event.kept
            self.prompt_use = started_use(self._prepared.request, event)

    def abort(self) -> None:
        try:
            while self._running:
                next(iter(self._running.values())).abort()
                del self._running[next(iter(self._running))]
        except Exception as error:  # noqa: BLE001  logged without the text
            self.fail_text(error)

    def fail(self, kind: ErrorKind, error: str) -> None:
        for each in self._running.values():
            each.fail(kind, error)
        self._running.clear()

    def fail_text(self, error: Exception) -> None:
        logger.error("no text of request %d: %s", self.request_id, describe_fault(error))
        self.fail("text_failed", TEXT_FAILED)

    def output(self) -> RequestOutput:
        return self._make_output([self._complete(each, each.output()) for each in self._samples])

    def take(self) -> list[CompletionOutput]:
        """What is new of each sample since the last call."""
        return [
            self._complete(each, new) for each in self._samples if (new := each.take()) is not None
        ]

    def make_output(self, kind: OutputKind) -> RequestOutput | None:
        """For a reader of this kind; None when there is none yet. A delta is what is new since the
        last."""
        if kind == "delta":
            taken = self.take()
            return self._make_output(taken) if taken else None
        return None if kind == "final" and not self.is_finished else self.output()

    def _make_output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        fingerprint = self.fingerprint
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            cache_miss=self.cache_miss,
            prompt_use=self.prompt_use,
            outputs=tuple(outputs),
            finished=not self._running,
            system_fingerprint=None if fingerprint is None else fingerprint.digest,
        )

    def _complete(self, sample: SampleOutput, output: CompletionOutput) -> CompletionOutput:
        if self.answer_schema is not None and self._text.checks.is_inline:
            output = self.checked(output)
        request, seal = self._prepared.request, self._prepared.seal
        if seal is None or not sample.is_finished:
            return output
        fingerprint = self.fingerprint
        if fingerprint is None:
            return output
        answered = AnsweredRequest(
            request=request,
            request_id=self.request_id,
            fingerprint=fingerprint,
            kept=self.kept,
        )
        receipt = make_receipt(answered, sample.output())
        return output if receipt is None else replace(output, receipt=seal(receipt))

    def checked(self, output: CompletionOutput) -> CompletionOutput:
        """At its end, whether the answer fits its schema. Slow for long answers."""
        content = self._samples[output.index].content
        if self.answer_schema is None or output.finish_reason not in ("stop", "length"):
            return output
        if content is None:
            return output
        is_valid = self._text.checks.is_valid(content, self.answer_schema)
        return replace(output, is_schema_valid=is_valid)

    def _push_prompt_logprobs(self, event: PromptLogprobs) -> None:
        token_ids = self._prepared.request.prompt_token_ids[event.start :]
        for token_id, found in zip(token_ids, event.entries, strict=False):
            is_shown = token_id not in self._placeholders
            self._prompt_logprobs.append(self._describe(token_id, found) if is_shown else None)

    def _describe(self, token_id: int, found: TokenLogprobs) -> dict[int, Logprob]:
        described = {token_id: self._logprob(token_id, found.logprob, found.rank)}
        for rank, (top_id, logprob) in enumerate(
            zip(found.top_ids, found.top_logprobs, strict=True), start=1
        ):
            described.setdefault(top_id, self._logprob(top_id, logprob, rank))
        return described

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text = self._text.text_of(token_id)
        is_part = text is not None and REPLACEMENT in text
        own = self._text.bytes_of(token_id) if is_part else None
        return Logprob(logprob=logprob, rank=rank, decoded_token=text, token_bytes=own)


class OutputRouter:
    """Passes each event to the processor of its request. `cancel`: ends in the engine a sample that
    has ended here, at a stop string or by a failure."""

    def __init__(self, cancel: CancelSample) -> None:
        self._cancel = cancel
        self._open: dict[int, OutputProcessor] = {}

    def add(self, processor: OutputProcessor) -> None:
        self._open[processor.request_id] = processor

    def remove(self, request_id: int) -> bool:
        """False when the request had finished or was not there."""
        return self._open.pop(request_id, None) is not None

    def push(self, events: Iterable[Event]) -> list[OutputProcessor]:
        """The processors that received events, each once. Finished requests are removed; events of
        unknown ones dropped."""
        news: dict[int, OutputProcessor] = {}
        for event in events:
            processor = self._open.get(event.request_id)
            if processor is None:
                continue
            if isinstance(event, Started):
                processor.start(event)
                continue
            news[event.request_id] = processor
            stopped = None
            try:
                stopped = processor.push(event)
            except Exception as error:  # noqa: BLE001  the other requests' events are passed on
                processor.fail_text(error)
                self._cancel(event.request_id, None)
            if stopped is not None:
                self._cancel(event.request_id, stopped)
            if processor.is_finished:
                del self._open[event.request_id]
        return list(news.values())

    def fail_all(self, error: str) -> list[OutputProcessor]:
        failed = list(self._open.values())
        self._open.clear()
        for processor in failed:
            processor.fail("engine_lost", error)
        return failed


def describe_fault(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    shown = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} in {shown}"
