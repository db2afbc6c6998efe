"""`SampleOutput`: one sample of a request as it grows, out of its tokens.

Owns the text of one stream: detokenising, stop strings, and which tokens lie past one. Knows no
engine. Invariants: what was shown stays; the text is at the end what decoding all tokens at once
and cutting at the earliest stop string would give; tokens past a stop string are never shown.
"""

from bisect import bisect_left
from dataclasses import dataclass

from cadenza.outputs import CompletionOutput, Logprob
from cadenza.request import ErrorKind, Finished, FinishReason
from cadenza.text import IncrementalDetokenizer, StopMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a continuation ended; `num_generated_tokens` is what usage counts."""

    finish_reason: FinishReason
    stop_reason: int | str | None
    num_generated_tokens: int
    error: str | None = None
    error_kind: ErrorKind | None = None


class SampleOutput:
    """Sample `index` of a request.

    Args:
        detokenizer: a fresh one; None shows token ids only.
        matcher: of the request's stop strings; None when it has none.
        num_unsearched: so many first tokens' text is not searched for stop strings (`min_tokens`).
    """

    __slots__ = (
        "_detokenizer",
        "_ending",
        "_ends",
        "_is_ending_taken",
        "_logprobs",
        "_matcher",
        "_num_searched",
        "_num_taken_parts",
        "_num_taken_tokens",
        "_num_unsearched",
        "_parts",
        "_sums",
        "_token_ids",
        "index",
    )

    def __init__(
        self,
        index: int,
        detokenizer: IncrementalDetokenizer | None,
        matcher: StopMatcher | None = None,
        num_unsearched: int = 0,
    ) -> None:
        self.index = index
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._num_unsearched = num_unsearched
        self._parts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._sums: list[float] = []
        self._ending: Ending | None = None
        # Characters given to the matcher up to the end of each token, where there is a matcher.
        self._ends: list[int] = []
        self._num_searched = 0
        self._num_taken_parts = 0
        self._num_taken_tokens = 0
        self._is_ending_taken = False

    @property
    def is_finished(self) -> bool:
        return self._ending is not None

    @property
    def num_shown_tokens(self) -> int:
        """Without tokens that lie, or may turn out to lie, past a stop string."""
        count = len(self._token_ids)
        end = None if self._matcher is None else self._matcher.least_end
        return count if end is None else min(count, bisect_left(self._ends, end) + 1)

    def push(self, token_id: int, logprobs: dict[int, Logprob] | None) -> bool:
        """Takes the next token; whether a stop string has ended the continuation with it.

        What the text side raises comes through; the continuation can then only `fail`.
        """
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
            before = self._sums[-1] if self._sums else 0.0
            self._sums.append(before + logprobs[token_id].logprob)
        text = "" if self._detokenizer is None else self._detokenizer.push(token_id)
        if self._matcher is None:
            if text:
                self._parts.append(text)
            return False
        self._add_text(text)
        self._ends.append(self._num_searched)
        self._end_if_matched()
        return self._ending is not None

    def finish(self, event: Finished) -> None:
        """The engine ended it; text that was kept back comes out."""
        self._end(
            Ending(
                finish_reason=event.finish_reason,
                stop_reason=event.stop_token_id,
                num_generated_tokens=event.num_generated_tokens,
                error=event.error,
                error_kind=event.error_kind,
            )
        )

    def abort(self) -> None:
        """Its reader gave up; text that was kept back comes out."""
        self._end(
            Ending(
                finish_reason="abort",
                stop_reason=None,
                num_generated_tokens=len(self._token_ids),
            )
        )

    def fail(self, kind: ErrorKind, error: str) -> None:
        """It ends without a word from the engine, and no more text is made."""
        self._ending = Ending(
            finish_reason="error",
            stop_reason=None,
            num_generated_tokens=len(self._token_ids),
            error=error,
            error_kind=kind,
        )

    def output(self) -> CompletionOutput:
        """All so far."""
        return self._describe(0, 0, self.num_shown_tokens)

    def take(self) -> CompletionOutput | None:
        """What is new since the last call; None when nothing is."""
        num_tokens, num_parts = self.num_shown_tokens, len(self._parts)
        has_ended = self._ending is not None
        first_token, first_part = self._num_taken_tokens, self._num_taken_parts
        if (num_tokens, num_parts, has_ended) == (first_token, first_part, self._is_ending_taken):
            return None
        self._num_taken_tokens, self._num_taken_parts = num_tokens, num_parts
        self._is_ending_taken = has_ended
        return self._describe(first_token, first_part, num_tokens)

    def _end(self, ending: Ending) -> None:
        if self._detokenizer is not None:
            self._add_text(self._detokenizer.flush())
        if self._matcher is not None:
            self._show(self._matcher.flush())
            self._end_if_matched()
        if self._ending is None:
            self._ending = ending

    def _add_text(self, text: str) -> None:
        if self._matcher is None or len(self._token_ids) <= self._num_unsearched:
            self._show(text)
            return
        self._num_searched += len(text)
        self._show(self._matcher.push(text))

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _end_if_matched(self) -> None:
        match = None if self._matcher is None else self._matcher.match
        if match is not None:
            self._ending = Ending(
                finish_reason="stop",
                stop_reason=match.stop,
                num_generated_tokens=self.num_shown_tokens,
            )

    def _describe(self, first_token: int, first_part: int, count: int) -> CompletionOutput:
        """From these on, up to the `count`-th token."""
        ending = self._ending
        return CompletionOutput(
            index=self.index,
            text="".join(self._parts[first_part:]),
            token_ids=tuple(self._token_ids[first_token:count]),
            logprobs=tuple(self._logprobs[first_token:count]) if self._logprobs else None,
            cumulative_logprob=self._sums[count - 1] if self._sums else None,
            finish_reason=None if ending is None else ending.finish_reason,
            stop_reason=None if ending is None else ending.stop_reason,
            num_generated_tokens=count if ending is None else ending.num_generated_tokens,
            error=None if ending is None else ending.error,
            error_kind=None if ending is None else ending.error_kind,
        )
