"""A text side that breaks on one request: the one whose prompt is `VICTIM`."""

from typing import Any, Literal

from cadenza import SamplingParams
from cadenza.frontend.sample_output import SampleOutput
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.text import IncrementalDetokenizer, StopMatcher
from cadenza.text.answers.part_parser import MakeParser

Fault = Literal["detokenizer", "flush", "stop strings", "log probabilities"]

SECRET = "what a user wrote"
FAULTY_STOP = "never said"
"""The mark of a victim: what breaks breaks for requests with this stop string."""
NUM_GOOD_TOKENS = 2


def break_down() -> Any:
    raise RuntimeError(SECRET)


class _Detokenizer:
    def __init__(self, whole: IncrementalDetokenizer, fault: Fault) -> None:
        self._whole = whole
        self._fault = fault
        self._num_tokens = 0

    def push(self, token_id: int) -> str:
        self._num_tokens += 1
        if self._fault == "detokenizer" and self._num_tokens > NUM_GOOD_TOKENS:
            break_down()
        return self._whole.push(token_id)

    def drop_incomplete(self) -> None:
        self._whole.drop_incomplete()

    def flush(self) -> str:
        return break_down() if self._fault in {"flush", "detokenizer"} else self._whole.flush()


class _Matcher(StopMatcher):
    """Breaks on its third text."""

    num_texts = 0

    def push(self, text: str) -> str:
        self.num_texts += 1
        return break_down() if self.num_texts > NUM_GOOD_TOKENS else super().push(text)


class _Untakeable(SampleOutput):
    """Nobody can take what it has to tell; slots are its parent's."""

    __slots__ = ()

    def take(self) -> Any:
        return break_down()


class FaultyOutput:
    """The real text side, but of the requests the one that comes as number `victim` (from 0) has
    outputs that cannot be made."""

    def __init__(self, text: TextFrontend, victim: int) -> None:
        self._text = text
        self._victim = victim
        self._num_requests = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)

    def sample_output(
        self, params: SamplingParams, sample: int, make_parser: MakeParser | None = None
    ) -> SampleOutput:
        self._num_requests += 1
        if self._num_requests - 1 != self._victim:
            return self._text.sample_output(params, sample, make_parser)
        return _Untakeable(sample, None)


class FaultyText:
    """Everything is the real text side's but what `fault` names.

    A fault in the log probabilities' texts is everybody's who asks for them.
    """

    def __init__(self, text: TextFrontend, fault: Fault) -> None:
        self._text = text
        self._fault: Fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)

    def sample_output(
        self, params: SamplingParams, sample: int, make_parser: MakeParser | None = None
    ) -> SampleOutput:
        tokenizer = self._text.tokenizer
        assert tokenizer is not None
        if FAULTY_STOP not in params.stop:
            return self._text.sample_output(params, sample, make_parser)
        detokenizer: Any = _Detokenizer(IncrementalDetokenizer(tokenizer), self._fault)
        is_matcher = self._fault == "stop strings"
        return SampleOutput(sample, detokenizer, _Matcher(params.stop) if is_matcher else None)

    def text_of(self, token_id: int) -> str | None:
        return break_down() if self._fault == "log probabilities" else self._text.text_of(token_id)
