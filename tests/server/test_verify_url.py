"""`cadenza verify --url`: the gate against a server, and servers that it must fail."""

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cadenza.cli import main
from cadenza.config import EngineConfig
from cadenza.engine.core import EngineCore
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.engine.request_check import CheckedRequest, request_of
from cadenza.errors import ConfigError
from cadenza.frontend.loaded_model import load_model
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import Request, SamplingParams
from cadenza.verification.differences import lack_of
from cadenza.verification.option_matrix import (
    JSON_FORMS,
    OPTIONS,
    TEXT_FORMS,
    OptionMatrix,
    all_pairs,
    covering_rows,
)
from cadenza.verification.over_http import (
    SENT_AS,
    UNSEEDED,
    RemotePlayer,
    UrlOptions,
    remote_options,
    verify_url,
)
from cadenza.verification.play import Stream, TokenRecord
from cadenza.verification.remote_server import SENT_OPTIONS, Answer, body_of
from cadenza.verification.workload import LONGEST_PROMPT
from tests.by_day import by_day
from tests.cli.harness import write_model
from tests.server.harness import RunningServer, running_server
from tests.server.scripted_engine import ScriptedEngine

SIZE = {"num_requests": 12, "max_tokens": 12}

NUM_LEVELS = tuple(len(option.levels) for option in remote_options())
ONCE, TWICE = (
    OptionMatrix(options=remote_options(), rows=covering_rows(NUM_LEVELS, times=times))
    for times in (1, 2)
)
"""With each pair at least so often."""


def ignore(_: str) -> None:
    """No progress wanted."""


class CrowdedEngine(ScriptedEngine):
    """Gives requests that are not alone another text."""

    def submit(self, given: Request | CheckedRequest) -> int:
        if self.num_open:
            self.script = (*self.script[1:], self.script[0])
        return super().submit(given)


class ForgetfulInCompany(EngineFront):
    """Ignores an option of requests that come while another is open: alone it is sound."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(InProcessLink(core))
        self.forgets = ""

    def submit(self, given: Request | CheckedRequest) -> int:
        request = request_of(given)
        if self.load().num_open and self.forgets:
            default = getattr(SamplingParams(), self.forgets)
            params = replace(request.params, **{self.forgets: default})
            request = replace(request, params=params)
            if self.forgets == "structured":
                request = replace(request, constraint=None)
            elif self.forgets == "bad_words":
                request = replace(request, bad_word_token_ids=())
        return super().submit(request)


@pytest.fixture(scope="module")
def forgetful(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ForgetfulInCompany, RunningServer]]:
    """An engine with random weights, which hide no error behind margins, and its server."""
    folder = write_model(tmp_path_factory.mktemp("models") / "random")
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=64, max_num_queued_tokens=300, max_model_len=256
    )
    loaded = load_model(folder, config)
    engine = ForgetfulInCompany(loaded.core)
    with running_server(engine, loaded.text) as server:
        yield engine, server


def test_the_bundled_models_server_passes(bundled: RunningServer) -> None:
    result = verify_url(UrlOptions(url=bundled.url, **SIZE), ignore)
    assert result.passed, result.last_line
    assert len(result.modes) == 3
    assert result.longest == LONGEST_PROMPT + 12
    assert result.last_line.endswith(f" longest={result.longest}")
    assert result.counts.admitted_midstream > 0
    assert result.counts.cache_hits > 0
    assert result.left_out == ()


def test_a_server_whose_streams_depend_on_others_fails(
    script: tuple[int, ...], text: TextFrontend, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_server(CrowdedEngine(script, step_s=0.002), text) as server:
        result = verify_url(UrlOptions(url=server.url, **SIZE), ignore)
        of_options = verify_url(UrlOptions(url=server.url, max_tokens=12, matrix=ONCE), ignore)
        capsys.readouterr()
        assert main(["verify", "--url", server.url, "--num-requests", "12", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["mismatch"]["mode"]) == ("MISMATCH", "together, cold")
    for each in (result, of_options):
        assert each.verdict == "MISMATCH"
        assert each.mismatch is not None
        assert each.mismatch.mode == "together, cold"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://x", "'ftp://x' is no URL"),
        (
            "http://127.0.0.1:1",
            "--url http://127.0.0.1:1 does not answer: the connection is refused",
        ),
        ("x", "'x' is no URL"),
    ],
)
def test_a_server_that_is_not_there_is_said(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        verify_url(UrlOptions(url=url, **SIZE), ignore)


@pytest.mark.soak
def test_a_server_passes_with_every_pair_of_options(bundled: RunningServer) -> None:
    result = verify_url(UrlOptions(url=bundled.url, max_tokens=8, matrix=ONCE), ignore)
    assert result.passed, result.last_line
    assert f" options={len(set(ONCE.rows))} pairs={len(all_pairs(NUM_LEVELS))} " in (
        result.last_line
    )
    assert result.left_out == (UNSEEDED,)
    num_samples = sum(mode.num_streams for mode in result.modes)
    assert num_samples > 3 * len(ONCE.rows), "some requests have several samples"


@pytest.mark.soak
def test_a_server_whose_queue_is_full_at_times_passes(
    forgetful: tuple[ForgetfulInCompany, RunningServer],
) -> None:
    engine, server = forgetful
    engine.forgets = ""
    result = verify_url(UrlOptions(url=server.url, max_tokens=24, matrix=ONCE), ignore)
    assert result.passed, result.last_line
    assert result.left_out == (UNSEEDED,)
    assert sum(engine.request_stats().rejections.values()) > 0


@pytest.mark.parametrize(
    "name", by_day(["structured", "bad_words", "logit_bias", "min_tokens"], {"structured"})
)
def test_a_server_that_ignores_an_option_in_company_fails(
    forgetful: tuple[ForgetfulInCompany, RunningServer], name: str
) -> None:
    engine, server = forgetful
    engine.forgets = name
    result = verify_url(UrlOptions(url=server.url, max_tokens=24, matrix=TWICE), ignore)
    assert result.mismatch is not None
    assert result.mismatch.mode == "together, cold"


def test_what_a_server_cannot_be_asked_for_is_left_out(scripted: RunningServer) -> None:
    """The scripted engine follows no forms, and ends no text."""
    result = verify_url(UrlOptions(url=scripted.url, max_tokens=8, matrix=ONCE), ignore)
    assert result.passed, result.last_line
    assert result.left_out[0] == UNSEEDED
    assert any(
        "structured outputs: " in each and "status 400: " in each for each in result.left_out
    )


def test_the_command_asks_a_server(
    scripted: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    flags = ("--url", scripted.url, "--num-requests", "12", "--max-tokens", "8")
    assert main(["verify", *flags]) == 0
    out = capsys.readouterr().out
    assert "REFERENCE-EXACT PASS bitwise requests=12 " in out.splitlines()[-1]


@pytest.mark.soak
def test_the_command_names_what_a_server_cannot_be_asked_for(
    script: tuple[int, ...], text: TextFrontend, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the whole matrix, which by day the tests above play once."""
    with running_server(ScriptedEngine(script), text) as server:
        flags = ("--url", server.url, "--options", "all", "--max-tokens", "8")
        capsys.readouterr()
        assert main(["verify", *flags]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("not compared: ")]
    assert lines[0] == f"not compared: {UNSEEDED}"
    assert any("structured outputs: " in line and "status 400: " in line for line in lines)
    assert "REFERENCE-EXACT PASS bitwise requests=" in out.splitlines()[-1]


def test_every_option_of_the_matrix_can_be_sent() -> None:
    names = {SENT_AS.get(option.name, option.name) for option in OPTIONS}
    assert names <= SENT_OPTIONS


@pytest.mark.parametrize("form", [*JSON_FORMS, *TEXT_FORMS], ids=lambda form: form.kind)
def test_a_body_holds_the_form_and_the_biases(form) -> None:
    params = SamplingParams(structured=form, logit_bias={7: 1.5}, bad_words=("no",), n=2)
    body = body_of(Request(prompt_token_ids=(1, 2), params=params))
    style = {} if form.whitespace is None else {"whitespace": form.whitespace}
    assert body["structured_outputs"] == {form.kind: getattr(form, form.kind), **style}
    assert body["logit_bias"] == {"7": 1.5}
    assert (body["bad_words"], body["n"], body["prompt"]) == (("no",), 2, [1, 2])


def stream_of(
    *records: TokenRecord, prompt: tuple[TokenRecord, ...] = (), finish: str = "length"
) -> Stream:
    return Stream(tokens=[*records], prompt=[*prompt], finish=finish)


PLAIN: TokenRecord = (5, math.nan, 0, (), ())
DESCRIBED: TokenRecord = (5, -1.0, 0, (5, 6), (-1.0, -2.0))


@pytest.mark.parametrize(
    ("params", "stream", "expected"),
    [
        ({}, stream_of(PLAIN), None),
        ({}, stream_of(PLAIN, finish="stop 7"), None),
        ({"logprobs": 1}, stream_of(DESCRIBED), None),
        ({"logprobs": 2}, stream_of(DESCRIBED), None),
        ({"logprobs": 3}, stream_of(DESCRIBED), "3 log probabilities"),
        ({"logprobs": 1}, stream_of(PLAIN), "1 log probabilities"),
        ({}, stream_of(DESCRIBED), "None log probabilities"),
        ({}, stream_of(PLAIN, finish="abort"), "stop or length"),
        ({}, Stream(), "stop or length"),
        ({"prompt_logprobs": 1}, stream_of(PLAIN), "1 log probabilities"),
        ({"prompt_logprobs": 1}, stream_of(PLAIN, prompt=(DESCRIBED,)), None),
        ({"prompt_logprobs": 1}, stream_of(PLAIN, prompt=(PLAIN,)), "1 log probabilities"),
    ],
)
def test_an_answer_that_lacks_what_was_asked_is_an_error_even_alone(
    params: dict[str, Any], stream: Stream, expected: str | None
) -> None:
    request = Request(prompt_token_ids=(1, 2), params=SamplingParams(**params))
    found = lack_of(request, stream, RemotePlayer.has_logprobs)
    assert (None if found is None else found.expected) == expected


def player_of_one_choice(n: int) -> RemotePlayer:
    """On a server that answers with one choice, whatever is asked."""

    class OneChoice:
        def play(self, request: Request, salt: str) -> Answer:
            return Answer(streams=(stream_of(PLAIN),), num_cached_tokens=0, start_s=0, end_s=1)

    requests = [Request(prompt_token_ids=(1,), params=SamplingParams(n=n))]
    server: Any = OneChoice()
    return RemotePlayer(server=server, requests=requests, num_open=1, clock=time.monotonic)


def test_a_sample_that_an_answer_lacks_has_no_tokens() -> None:
    first, second = player_of_one_choice(n=2).play_alone(0)
    assert (first.sample, second.sample, second.finish) == (0, 1, "unfinished")


def test_an_answer_with_more_choices_than_were_asked_for_is_an_error() -> None:
    player = player_of_one_choice(n=1)
    answer = Answer(streams=(stream_of(PLAIN),) * 2, num_cached_tokens=0, start_s=0, end_s=1)
    server: Any = type("Generous", (), {"play": lambda *_: answer})()
    with pytest.raises(ConfigError, match="2 choices for n=1"):
        replace(player, server=server).play_alone(0)
