"""Structured outputs as grammars: what is accepted, what is refused by name, what is bounded."""

import errno
import os
import resource
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest

from cadenza.checkpoint import open_checkpoint
from cadenza.errors import FormNotCheckedError, InvalidRequestError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import SamplingParams
from cadenza.structured import MAX_STRUCTURED_BYTES, StructuredOutput
from cadenza.text import grammar_worker
from cadenza.text.grammar import grammar_of, read_form
from cadenza.text.grammar_check import check_grammar
from cadenza.text.grammar_worker import CheckResult, GrammarWorker

NESTED = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}


def problem(**members: object) -> str | None:
    try:
        grammar = grammar_of(StructuredOutput(**members))  # type: ignore[arg-type]
    except InvalidRequestError as error:
        return str(error)
    return check_grammar(grammar)


@pytest.mark.parametrize(
    "members",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"json": '{"type": "string", "description": "any"}'},
        {"json": True},
        {"json": NESTED},
        {"json_object": True},
        {"regex": r"^\d{3}-[a-z]+$"},
        {"choice": ["yes", 'n"o', "é\n"]},
        {"grammar": 'start: "a" x\nx: /[0-9]+/'},
        {"grammar": 'root ::= "a" [0-9]+ ws\nws ::= [ \\t]*'},
    ],
    ids=lambda members: next(iter(members)),
)
def test_every_notation_becomes_a_grammar(members: dict[str, object]):
    assert problem(**members) is None


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {}, "then": {}}, "if, then"),
        ({"contains": {}}, "contains"),
        ({"propertyNames": {"minLength": 2}, "properties": {"ab": {}}}, "propertyNames"),
        ({"allOf": [{"unevaluatedProperties": False}, {"minLength": 1}]}, "unevaluatedProperties"),
        ({"properties": {"a": {"not": {}}}}, "not"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, "minProperties"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"$ref": "#/nowhere"}, "/nowhere"),
        ({"type": "text"}, "text"),
    ],
    ids=str,
)
def test_a_keyword_that_cannot_be_enforced_is_named(schema: object, named: str):
    found = problem(json=schema, strict=True)
    assert found is not None
    assert named in found


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"not": {"type": "string"}}, ("not",)),
        ({"if": {}, "then": {}}, ("if", "then")),
        ({"type": "array", "uniqueItems": True}, ("uniqueItems",)),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"not": {}}}}, ("not",)),
        ({"type": "array", "uniqueItems": False}, ()),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ()),
        ({"propertyNames": {"type": "string"}}, ()),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, ()),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ()),
    ],
    ids=str,
)
def test_without_strict_a_keyword_that_cannot_be_enforced_is_left_to_the_end(
    schema: dict[str, object], names: tuple[str, ...]
):
    form = read_form(StructuredOutput(json=schema))
    assert form.unenforced == names
    assert check_grammar(form.text) is None


def test_a_format_that_is_not_known_is_an_annotation():
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "path"}}}
    form = read_form(StructuredOutput(json=schema, strict=True))
    assert form.annotations == ("path",)
    assert check_grammar(form.text) is None


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": r"\bx\b"}, "lookarounds"),
        ({"grammar": "start: (a"}, "Expected token"),
        ({"grammar": "start: b"}, "b"),
        ({"grammar": 'start: <|tool|> "a"'}, "special tokens"),
        ({"grammar": 'start: <[12]> "a"'}, "special tokens"),
    ],
    ids=str,
)
def test_an_expression_that_cannot_be_followed_is_explained(members: dict[str, object], named: str):
    found = problem(**members)
    assert found is not None
    assert named in found
    assert len(found) <= 300


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "neither an object"),
        ({"json": False}, "neither an object"),
        ({"json": "[" * 40_000}, "nested too deep"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
        ({"grammar": "root ::= ("}, "GBNF"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_schema_and_no_grammar_is_refused(members: dict[str, object], named: str):
    with pytest.raises(InvalidRequestError, match=named) as refused:
        grammar_of(StructuredOutput(**members))  # type: ignore[arg-type]
    assert refused.value.param == "structured"


def test_a_structured_output_asks_for_exactly_one_thing():
    for members in ({}, {"regex": "a", "json": {}}, {"json_object": False}):
        with pytest.raises(InvalidRequestError, match="give one of"):
            StructuredOutput(**members)
    odd = ({"json": 5}, {"json": {"a": {1}}}, {"regex": 5}, {"choice": "ab"}, {"choice": [""]})
    for members in (*odd, {"choice": []}, {"json_object": "yes"}, {"regex": "\ud800"}):
        with pytest.raises(InvalidRequestError) as refused:
            StructuredOutput(**members)  # type: ignore[arg-type]
        assert refused.value.param == "structured"


def test_the_size_of_a_structured_output_is_bounded():
    room = MAX_STRUCTURED_BYTES
    assert StructuredOutput(regex="a" * room).kind == "regex"
    for members in (
        {"regex": "a" * (room + 1)},
        {"choice": ["é" * room]},
        {"json": "x" * 2 * room},
    ):
        with pytest.raises(InvalidRequestError, match="bytes"):
            StructuredOutput(**members)
    with pytest.raises(InvalidRequestError, match="5000 choices"):
        StructuredOutput(choice=["a"] * 5000)


def test_a_grammar_that_takes_too_long_costs_its_process_and_nothing_else():
    worker = GrammarWorker(timeout_s=0.0)
    try:
        since = time.monotonic()
        found = worker.check(grammar_of(StructuredOutput(regex="a")))
        assert found == "it takes longer than 0 seconds to compile; simplify it"
        assert time.monotonic() - since < 30
        later = GrammarWorker()
        assert later.check(grammar_of(StructuredOutput(regex="a"))) is None
        later.close()
    finally:
        worker.close()


def test_a_worker_that_died_is_replaced_and_the_grammar_is_not_blamed():
    worker = GrammarWorker(timeout_s=60.0)
    good = grammar_of(StructuredOutput(regex="a"))
    try:
        assert worker.check(good) is None
        process = worker._process
        assert process is not None
        process.kill()
        process.wait()
        assert worker.check(grammar_of(StructuredOutput(regex="b"))) is None
        assert worker.check(good) is None
    finally:
        worker.close()


def test_a_known_grammar_does_not_wait_for_the_check_of_another(monkeypatch: pytest.MonkeyPatch):
    worker = GrammarWorker()
    has_begun, may_end = Event(), Event()

    def ask(grammar: str, seconds: float) -> CheckResult:
        if grammar == "slow":
            has_begun.set()
            may_end.wait()
        return CheckResult(f"not {grammar}", 0.0)

    monkeypatch.setattr(worker, "_ask", ask)
    assert worker.check("known") == "not known"
    with ThreadPoolExecutor() as threads:
        try:
            slow = threads.submit(worker.check, "slow")
            assert has_begun.wait(timeout=60)
            assert threads.submit(worker.check, "known").result(timeout=60) == "not known"
            assert not slow.done()
        finally:
            may_end.set()
        assert slow.result(timeout=60) == "not slow"


def test_what_another_thread_has_asked_meanwhile_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
):
    worker = GrammarWorker()
    asked: list[str] = []
    monkeypatch.setattr(worker, "_ask", lambda grammar, seconds: asked.append(grammar))

    @contextmanager
    def held_by_another():
        worker._keep("same", "known by now")
        yield

    monkeypatch.setattr(worker, "_asking", held_by_another())
    assert worker.check("same") == "known by now"
    assert asked == []


def test_the_grammar_used_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch):
    worker = GrammarWorker()
    asked: list[str] = []

    def ask(grammar: str, seconds: float) -> CheckResult:
        asked.append(grammar)
        return CheckResult(None, 0.0)

    monkeypatch.setattr(worker, "_ask", ask)
    monkeypatch.setattr("cadenza.text.grammar_worker.MAX_CACHED", 2)
    for grammar in ("a", "b", "a", "c", "a", "b"):
        assert worker.check(grammar) is None
    assert asked == ["a", "b", "c", "b"]


def test_the_grammars_of_a_request_have_their_time_together(monkeypatch: pytest.MonkeyPatch):
    worker = GrammarWorker(timeout_s=3.0)
    allowed_s: list[float] = []

    def ask(grammar: str, seconds: float) -> CheckResult:
        allowed_s.append(seconds)
        return CheckResult(None, 1.25)

    monkeypatch.setattr(worker, "_ask", ask)
    check = worker.start_checks()
    assert [check(name) for name in ("a", "b", "a", "c")] == [None] * 4
    assert allowed_s == [3.0, 1.75, 0.5]
    together = "with the request's other forms it takes longer than 3 seconds"
    assert together in (check("d") or "")
    assert len(allowed_s) == 3
    assert check("a") is None, "what is known takes no time"
    assert worker.start_checks()("d") is None, "another request has time of its own"
    assert allowed_s[3:] == [3.0]


def test_what_had_less_than_the_whole_time_is_checked_again_for_another_request():
    worker = GrammarWorker(timeout_s=60.0)
    good = grammar_of(StructuredOutput(regex="a"))
    try:
        answer = worker._ask(good, 0.0)
        assert "with the request's other forms" in (answer.problem or "")
        assert not answer.is_final
        assert worker.check(good) is None
    finally:
        worker.close()


@contextmanager
def many_descriptors(count: int):
    """Has `count` descriptors open, as a server with many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + 256:
        pytest.skip(f"at most {hard} descriptors may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 256), hard))
    opened: list[int] = []
    try:
        opened += [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_grammars_are_checked_beside_more_than_a_thousand_connections():
    worker = GrammarWorker(timeout_s=60.0)
    with many_descriptors(1100):
        try:
            assert worker.check(grammar_of(StructuredOutput(regex="a"))) is None
            assert worker._process is not None
            assert worker._process.stdout is not None
            assert worker._process.stdout.fileno() >= 1024
        finally:
            worker.close()


def test_a_process_is_ended_where_its_start_is_interrupted(monkeypatch: pytest.MonkeyPatch):
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def kept(*args: Any, **options: Any) -> "subprocess.Popen[bytes]":
        started.append(popen(*args, **options))
        return started[-1]

    def interrupted(descriptor: int, until_s: float) -> bytes | None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", kept)
    monkeypatch.setattr(grammar_worker, "_read_frame", interrupted)
    with pytest.raises(KeyboardInterrupt):
        GrammarWorker().check("a")
    (process,) = started
    try:
        assert process.returncode is not None
    finally:
        process.kill()
        process.communicate()


def test_a_grammar_is_not_blamed_where_no_process_can_start(monkeypatch: pytest.MonkeyPatch):
    worker = GrammarWorker(timeout_s=60.0)
    good = grammar_of(StructuredOutput(regex="a"))

    def refused(*args: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    def late(descriptor: int, until_s: float) -> bytes | None:
        return None

    try:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refused)
            with pytest.raises(FormNotCheckedError, match="try again soon"):
                worker.check(good)
        with monkeypatch.context() as patch:
            patch.setattr(grammar_worker, "_read_frame", late)
            with pytest.raises(FormNotCheckedError, match="try again soon"):
                worker.check(good)
        assert worker.check(good) is None
    finally:
        worker.close()


def test_a_grammar_is_refused_for_good_where_a_process_of_its_own_died(
    monkeypatch: pytest.MonkeyPatch,
):
    worker = GrammarWorker(timeout_s=60.0)
    hostile, asked = grammar_of(StructuredOutput(regex="b")), list[int]()
    answer_of = grammar_worker._answer_of

    def dying(process: "subprocess.Popen[bytes]", grammar: str, until_s: float) -> bytes | None:
        if grammar == hostile:
            asked.append(process.pid)
            process.kill()
            process.wait()
        return answer_of(process, grammar, until_s)

    monkeypatch.setattr(grammar_worker, "_answer_of", dying)
    try:
        assert worker.check(grammar_of(StructuredOutput(regex="a"))) is None
        for _ in range(2):
            assert worker.check(hostile) == "it takes too much memory; simplify it"
        assert len(asked) == len({*asked}) == 2, "once in the process that ran, once in its own"
    finally:
        worker.close()


def test_a_form_of_many_prompts_is_checked_once_and_refused_each_time():
    text = TextFrontend(open_checkpoint(None))
    odd = {"$ref": "#/nowhere"}
    for name, found in (("good", None), ("odd", "nowhere")):
        schema = {"const": f"of many prompts, {name}", **(odd if found else {})}
        params = SamplingParams(structured=StructuredOutput(json=schema))
        before = check_grammar.cache_info().misses
        for _ in range(8):
            if found is None:
                text.prepare("x", params)
                continue
            with pytest.raises(InvalidRequestError, match=found):
                text.prepare("x", params)
        assert check_grammar.cache_info().misses == before + 1, name
