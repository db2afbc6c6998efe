"""`SampleOutput`: one sample's text from its tokens: detokenised, cut at stop strings, split into
parts by a parser. Invariants: shown text never changes; the final text is all tokens decoded at
once, cut at the earliest stop string: in content only, where there are parts (`ContentStops`)."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cadenza.events import ErrorKind, Finished, FinishReason
from cadenza.outputs import CompletionOutput, Logprob, OutputPart
from cadenza.text import IncrementalDetokenizer
from cadenza.text.answers.part_parser import OutputParser, PlacedParser
from cadenza.text.tokens.stop import StopMatch, StopMatcher


class ShownText(NamedTuple):
    """What has become certain."""

    text: str
    parts: list[OutputPart]


class ContentStops:
    """Of one sample, with a fresh parser; `make_matcher`: of one stretch of content."""

    __slots__ = (
        "_base",
        "_first",
        "_held",
        "_make_matcher",
        "_matcher",
        "_num_pushed",
        "_num_shown",
        "_parser",
        "_stops",
        "match",
    )

    match: StopMatch | None  # its `end` counts all characters of the answer

    def __init__(
        self,
        parser: PlacedParser,
        stops: Sequence[str],
        make_matcher: Callable[[], StopMatcher],
    ) -> None:
        self._parser = parser
        self._stops = stops
        self._make_matcher = make_matcher
        self._matcher: StopMatcher | None = None  # of the stretch of content that goes on
        self._base = 0  # where its first searched character is
        self._first = 0  # what is in front of this character is not searched
        self._held = ""  # pushed and not shown
        self._num_pushed = 0
        self._num_shown = 0
        self.match = None

    @property
    def is_reasoning(self) -> bool:
        return self._parser.is_reasoning

    @property
    def least_end(self) -> int | None:
        """A lower bound of `match.end`; None if no stop string is complete yet."""
        if self.match is not None:
            return self.match.end
        found = [(self._held.find(stop), len(stop)) for stop in self._stops]
        ends = [self._num_shown + position + size for position, size in found if position >= 0]
        return min(ends, default=None)

    def push(self, text: str, *, is_searched: bool = True) -> ShownText:
        """Takes more text; that of `min_tokens` is not searched."""
        if self.match is not None:
            return ShownText("", [])
        self._held += text
        self._num_pushed += len(text)
        if not is_searched:
            self._first = self._num_pushed
        return self._show(self._parser.push_placed(text))

    def flush(self) -> ShownText:
        if self.match is not None:
            return ShownText("", [])
        shown = self._show(self._parser.flush_placed())
        if self.match is not None:
            return shown
        parts = [*shown.parts, *self._end_stretch()]
        return ShownText(shown.text + self._release(self._end_of_shown(self._num_pushed)), parts)

    def _show(self, placed: Sequence[tuple[int, OutputPart]]) -> ShownText:
        parts: list[OutputPart] = []
        for position, part in placed:
            parts += self._search(position, part) if part.kind == "content" else self._end_stretch()
            if self.match is not None:
                break
            if part.kind != "content":
                parts.append(part)
        num_held = 0 if self._matcher is None else self._matcher.num_held
        end = self._end_of_shown(self._parser.num_read - num_held)
        return ShownText(self._release(end), [part for part in parts if _is_something(part)])

    def _search(self, position: int, part: OutputPart) -> list[OutputPart]:
        num_free = max(0, min(len(part.text), self._first - position))
        free, text = part.text[:num_free], part.text[num_free:]
        if text and self._matcher is None:
            self._matcher, self._base = self._make_matcher(), position + num_free
        if text and self._matcher is not None:
            text = self._matcher.push(text)
            self._take_match(self._matcher)
        return [OutputPart("content", free + text)]

    def _end_stretch(self) -> list[OutputPart]:
        if self._matcher is None:
            return []
        part = OutputPart("content", self._matcher.flush())
        self._take_match(self._matcher)
        if self.match is None:
            self._matcher = None
        return [part]

    def _take_match(self, matcher: StopMatcher) -> None:
        if matcher.match is not None:
            self.match = StopMatch(stop=matcher.match.stop, end=self._base + matcher.match.end)

    def _end_of_shown(self, otherwise: int) -> int:
        if self.match is None or self._matcher is None:
            return otherwise
        return self._base + self._matcher.num_given

    def _release(self, end: int) -> str:
        count = max(0, end - self._num_shown)
        text, self._held = self._held[:count], self._held[count:]
        self._num_shown += len(text)
        return text


def _is_something(part: OutputPart) -> bool:
    return bool(part.text) or part.name is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a sample ended."""

    finish_reason: FinishReason
    stop_reason: int | str | None
    num_generated_tokens: int  # for usage
    error: str | None = None
    error_kind: ErrorKind | None = None
    error_fields: tuple[str, ...] = ()
    embedding: bytes | None = None


class SampleOutput:
    """Sample `index` of a request. Without a `detokenizer` it shows token ids only; text of the
    first `num_unsearched` tokens is not searched for stop strings (`min_tokens`); a `parser` splits
    the text into parts, and where it searches it for stop strings there is no `matcher`."""

    __slots__ = (
        "_accepted",
        "_detokenizer",
        "_ending",
        "_ends",
        "_logprobs",
        "_matcher",
        "_num_reasoning",
        "_num_rejected",
        "_num_searched",
        "_num_unsearched",
        "_parser",
        "_parts",
        "_stops",
        "_sums",
        "_taken",
        "_texts",
        "_token_ids",
        "index",
    )

    def __init__(
        self,
        index: int,
        detokenizer: IncrementalDetokenizer | None,
        matcher: StopMatcher | None = None,
        num_unsearched: int = 0,
        parser: OutputParser | ContentStops | None = None,
    ) -> None:
        self.index = index
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._num_unsearched = num_unsearched
        self._stops = parser if isinstance(parser, ContentStops) else None
        self._parser = None if isinstance(parser, ContentStops) else parser
        self._num_reasoning = 0
        self._texts: list[str] = []
        self._parts: list[OutputPart] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._sums: list[float] = []
        self._ending: Ending | None = None
        # Characters given to the matcher up to the end of each token, where there is a matcher.
        self._ends: list[int] = []
        self._accepted: list[int] = []  # indices of the tokens that were drafted
        self._num_rejected = 0
        self._num_searched = 0
        # What `take` has returned: numbers of tokens and texts, the end, and the number of parts.
        self._taken = (0, 0, False, 0)

    @property
    def is_finished(self) -> bool:
        return self._ending is not None

    @property
    def content(self) -> str | None:
        """The text of the answer itself so far; None where it calls tools."""
        if not self._has_parts:
            return "".join(self._texts)
        if any(part.kind == "tool_call" for part in self._parts):
            return None
        return "".join(part.text for part in self._parts if part.kind == "content")

    @property
    def _has_parts(self) -> bool:
        return self._parser is not None or self._stops is not None

    @property
    def num_shown_tokens(self) -> int:
        """Without tokens that lie, or may turn out to lie, past a stop string."""
        count = len(self._token_ids)
        stops = self._stops or self._matcher
        end = None if stops is None else stops.least_end
        return count if end is None else min(count, bisect_left(self._ends, end) + 1)

    def count_drafts(self, *, is_accepted: bool, num_rejected: int) -> None:
        """To be called before the token that tells of drafts is pushed."""
        if is_accepted:
            self._accepted.append(len(self._token_ids))
        self._num_rejected += num_rejected

    def push(self, token_id: int, logprobs: dict[int, Logprob] | None) -> bool:
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
            before = self._sums[-1] if self._sums else 0.0
            self._sums.append(before + logprobs[token_id].logprob)
        text = "" if self._detokenizer is None else self._detokenizer.push(token_id)
        if self._matcher is None and self._stops is None:
            if text:
                self._show(text)
            self._count_reasoning()
            return False
        self._add_text(text)
        self._count_reasoning()
        self._ends.append(self._num_searched)
        self._end_if_matched()
        return self._ending is not None

    def finish(self, event: Finished) -> None:
        """Text that was held back is shown; so with `abort`, but `fail` drops it."""
        self._end(
            Ending(
                finish_reason=event.finish_reason,
                stop_reason=event.stop_token_id,
                num_generated_tokens=event.num_generated_tokens,
                error=event.error,
                error_kind=event.error_kind,
                error_fields=event.error_fields,
                embedding=event.embedding,
            )
        )

    def abort(self) -> None:
        self._end(
            Ending(
                finish_reason="abort",
                stop_reason=None,
                num_generated_tokens=len(self._token_ids),
            )
        )

    def fail(self, kind: ErrorKind, error: str) -> None:
        self._ending = Ending(
            finish_reason="error",
            stop_reason=None,
            num_generated_tokens=len(self._token_ids),
            error=error,
            error_kind=kind,
        )

    def output(self) -> CompletionOutput:
        return self._describe(0, 0, 0, self.num_shown_tokens)

    def take(self) -> CompletionOutput | None:
        now = (self.num_shown_tokens, len(self._texts), self.is_finished, len(self._parts))
        if now[:3] == self._taken[:3]:
            return None
        (first_token, first_text, _, first_part), self._taken = self._taken, now
        return self._describe(first_token, first_text, first_part, now[0])

    def _end(self, ending: Ending) -> None:
        if self._detokenizer is not None:
            if ending.finish_reason in ("length", "abort"):
                self._detokenizer.drop_incomplete()
            self._add_text(self._detokenizer.flush())
        if self._matcher is not None:
            self._show(self._matcher.flush())
            self._end_if_matched()
        if self._stops is not None:
            self._take(self._stops.flush())
            self._end_if_matched()
        if self._ending is None:
            self._flush_parser()
            self._ending = ending

    def _add_text(self, text: str) -> None:
        if self._stops is not None:
            self._num_searched += len(text)
            is_searched = len(self._token_ids) > self._num_unsearched
            self._take(self._stops.push(text, is_searched=is_searched))
            return
        if self._matcher is None or len(self._token_ids) <= self._num_unsearched:
            self._show(text)
            return
        self._num_searched += len(text)
        self._show(self._matcher.push(text))

    def _show(self, text: str) -> None:
        if text:
            self._texts.append(text)
            if self._parser is not None:
                self._parts += self._parser.push(text)

    def _take(self, shown: ShownText) -> None:
        if shown.text:
            self._texts.append(shown.text)
        self._parts += shown.parts

    def _count_reasoning(self) -> None:
        parser = self._stops or self._parser
        if parser is not None and parser.is_reasoning:
            self._num_reasoning += 1

    def _flush_parser(self) -> None:
        if self._parser is not None:
            self._parts += self._parser.flush()

    def _end_if_matched(self) -> None:
        stops = self._stops or self._matcher
        match = None if stops is None else stops.match
        if match is not None and self._ending is None:
            self._flush_parser()
            self._ending = Ending(
                finish_reason="stop",
                stop_reason=match.stop,
                num_generated_tokens=self.num_shown_tokens,
            )

    def _describe(
        self, first_token: int, first_text: int, first_part: int, count: int
    ) -> CompletionOutput:
        ending = self._ending
        num_generated = count if ending is None else ending.num_generated_tokens
        return CompletionOutput(
            index=self.index,
            text="".join(self._texts[first_text:]),
            token_ids=tuple(self._token_ids[first_token:count]),
            logprobs=tuple(self._logprobs[first_token:count]) if self._logprobs else None,
            cumulative_logprob=self._sums[count - 1] if self._sums else None,
            finish_reason=None if ending is None else ending.finish_reason,
            stop_reason=None if ending is None else ending.stop_reason,
            num_generated_tokens=num_generated,
            num_reasoning_tokens=min(self._num_reasoning, num_generated),
            num_accepted_drafts=bisect_left(self._accepted, count),
            num_rejected_drafts=self._num_rejected,
            error=None if ending is None else ending.error,
            error_kind=None if ending is None else ending.error_kind,
            error_fields=() if ending is None else ending.error_fields,
            parts=tuple(self._parts[first_part:]) if self._has_parts else None,
            embedding=None if ending is None else ending.embedding,
        )
