"""Output parsers: text before a marker is reasoning, text behind it content, in whatever pieces."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cadenza import SamplingParams
from cadenza.events import Finished, Token
from cadenza.frontend.output_processor import OutputProcessor
from cadenza.frontend.prepared_request import PreparedRequest
from cadenza.frontend.sample_output import SampleOutput
from cadenza.frontend.sparse_prompts import SparsePrompts
from cadenza.outputs import OutputPart
from cadenza.request import Request
from cadenza.server.calls.endpoint import AnswerHead
from cadenza.server.openai.chat import ChatRequest
from cadenza.text import StopMatcher
from cadenza.text.answers.part_parser import MakeParser

MARKER = "</t>"


def parsed(text: str, marker: str = MARKER) -> dict[str, str]:
    """What a parser of the whole text finds."""
    before, _, behind = text.partition(marker)
    return {"reasoning": before, "content": behind}


class MarkerParser:
    """Holds back what may be the marker's beginning."""

    def __init__(self, marker: str = MARKER) -> None:
        self._marker = marker
        self._held = ""
        self._is_behind = False

    @property
    def is_reasoning(self) -> bool:
        return not self._is_behind

    def push(self, text: str) -> list[OutputPart]:
        if self._is_behind:
            return [OutputPart("content", text)]
        before, marker, behind = (self._held + text).partition(self._marker)
        if marker:
            self._is_behind, self._held = True, ""
            return [OutputPart("reasoning", before), OutputPart("content", behind)]
        num_held = max(
            size for size in range(len(self._marker)) if before.endswith(self._marker[:size])
        )
        end = len(before) - num_held
        self._held = before[end:]
        return [OutputPart("reasoning", before[:end])]

    def flush(self) -> list[OutputPart]:
        held, self._held = self._held, ""
        return [OutputPart("reasoning", held)] if held else []


class PieceText:
    """A text front end whose token `i` stands for the `i`-th piece."""

    sparse = SparsePrompts()

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def drop_incomplete(self) -> None:
        """Every piece has whole characters."""

    def flush(self) -> str:
        return ""

    def unenforced_schema(self, structured: object) -> None:
        """No form is asked for."""

    def sample_output(
        self, params: SamplingParams, sample: int, make_parser: MakeParser | None
    ) -> SampleOutput:
        matcher = StopMatcher(params.stop) if params.stop else None
        detokenizer: Any = self
        parser = None if make_parser is None else make_parser()
        return SampleOutput(sample, detokenizer, matcher, parser=parser)


def processor_of(
    pieces: Sequence[str], make_parser: MakeParser | None = MarkerParser, stop: str | None = None
) -> OutputProcessor:
    params = SamplingParams(max_tokens=len(pieces), stop=() if stop is None else (stop,))
    request = Request(prompt_token_ids=(1,), params=params)
    text: Any = PieceText(pieces)
    prepared = PreparedRequest(text=None, request=request, make_parser=make_parser)
    return OutputProcessor(0, prepared, text)


def finished(num_tokens: int) -> Finished:
    return Finished(
        request_id=0,
        finish_reason="length",
        stop_token_id=None,
        num_prompt_tokens=1,
        num_generated_tokens=num_tokens,
        num_cached_tokens=0,
    )


def encoder() -> Any:
    body = {"messages": [{"role": "user", "content": "x"}]}
    request = ChatRequest.read(json.dumps(body).encode())
    text: Any = None
    return request.encoder(AnswerHead(request_id="1", created=0, model="m", text=text))


def deltas(events: bytes) -> list[dict[str, str]]:
    return [
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
        for line in events.decode().split("\n")
        if line.startswith("data: {")
    ]


def streamed(processor: OutputProcessor, num_tokens: int, reads: Sequence[bool]) -> bytes:
    """The events of a stream that is read after those tokens for which `reads` says so."""
    answer, events = encoder(), b""
    for place in range(num_tokens):
        if processor.push(Token(request_id=0, token_id=place, index=place)) is not None:
            break
        if reads[place] and (outputs := processor.take()):
            events += answer.take(0, processor, outputs)
    if not processor.is_finished:
        processor.push(finished(num_tokens))
    return events + answer.take(0, processor, processor.take())


pieces_of_text = st.lists(
    st.one_of(st.sampled_from(["<", "/", "t", ">", MARKER, "</", "t>", "ab", ""]), st.text()),
    min_size=1,
    max_size=12,
)


@given(pieces_of_text, st.lists(st.booleans(), min_size=12, max_size=12))
def test_streamed_parts_joined_are_those_of_the_whole_text(
    pieces: list[str], reads: list[bool]
) -> None:
    found = {"reasoning": "", "reasoning_content": "", "content": ""}
    for delta in deltas(streamed(processor_of(pieces), len(pieces), reads)):
        for name, text in delta.items():
            found[name] += text
    expected = parsed("".join(pieces))
    assert found == {**expected, "reasoning_content": expected["reasoning"]}


@given(pieces_of_text)
def test_a_whole_message_has_the_parts_of_the_whole_text(pieces: list[str]) -> None:
    processor = processor_of(pieces)
    for place in range(len(pieces)):
        processor.push(Token(request_id=0, token_id=place, index=place))
    processor.push(finished(len(pieces)))
    output = processor.output()
    assert output.outputs[0].text == "".join(pieces)
    message = json.loads(encoder().whole([output]))["choices"][0]["message"]
    assert {name: message.get(name, "") for name in ("reasoning", "content")} == parsed(
        "".join(pieces)
    )


@given(pieces_of_text, st.sampled_from(["t>a", "</t>", "b", "/"]))
def test_a_parser_sees_only_text_before_the_stop_string(pieces: list[str], stop: str) -> None:
    found = {"reasoning": "", "content": ""}
    events = streamed(processor_of(pieces, stop=stop), len(pieces), [True] * len(pieces))
    for delta in deltas(events):
        for name in found:
            found[name] += delta.get(name, "")
    assert found == parsed("".join(pieces).partition(stop)[0])


def test_without_a_parser_a_delta_is_content_and_an_output_has_no_parts() -> None:
    processor = processor_of(["a", MARKER, "b"], make_parser=None)
    assert deltas(streamed(processor, 3, [True] * 3)) == [
        {"content": "a"},
        {"content": MARKER},
        {"content": "b"},
        {},
    ]
    assert processor.output().outputs[0].parts is None
