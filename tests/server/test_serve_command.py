"""`cadenza serve` as people run it: the bundled model, two processes, signals, flags."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from cadenza import __version__
from cadenza.cli.interrupts import TERMINATED, terminable
from tests.checkpoint.hub_server import NAME as HUB_NAME
from tests.checkpoint.hub_server import FakeHub
from tests.checkpoint.hub_server import serving as hub_serving
from tests.cli.harness import ENGINE, Ran, run_cadenza, write_model
from tests.ports import kept_port
from tests.server.harness import TIMEOUT_S
from tests.server.serve_process import ServeProcess, is_alive, serve_process

CERTIFICATE = Path(__file__).with_name("localhost.pem")
"""Self-signed, with its key, for tests only."""
FLAGS = ("--max-num-seqs", "4", "--max-model-len", "1024")
LONG = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
WIDE = {**LONG, "n": 5}
"""More than the rows: it is not over when a busy machine comes to the next line of a test."""
ENDLESS = {**LONG, "n": 8, "prompt": ["Once"] * 4}
"""The most that one call may ask for: only something else than its end ends it in a test."""
IGNORING_SIGHUP = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh")
"""As `nohup` does, which would also redirect the output that goes to a terminal."""
SOFTLY_LIMITED = ("sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh")
PLAIN = {"prompt": "the fox", "max_tokens": 2}
PROMPTS = ["The capital of France is", "12 + 30 =", "Once upon a time"]


@pytest.fixture(scope="module")
def serving() -> Iterator[ServeProcess]:
    with serve_process(*FLAGS, before=SOFTLY_LIMITED) as serving:
        serving.wait_ready()
        yield serving


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(serving: ServeProcess) -> None:
    for pid in (serving.process.pid, serving.engine_pid()):
        limits = Path(f"/proc/{pid}/limits").read_text()
        found = re.search(r"^Max open files +(\S+) +(\S+)", limits, re.MULTILINE)
        assert found is not None
        assert found[1] == found[2] != "256"


@pytest.mark.soak
def test_its_token_ids_are_those_of_generate(serving: ServeProcess) -> None:
    ran = run_cadenza(
        ["generate", *FLAGS, *PROMPTS, "--json", "--temperature", "0", "--max-tokens", "12"]
    )
    expected = [line["token_ids"] for line in ran.objects if "token_ids" in line]
    body = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
    alone = [
        serving.post("/v1/completions", {"prompt": prompt, **body}).json()["choices"][0]
        for prompt in PROMPTS
    ]
    together = serving.post("/v1/completions", {"prompt": PROMPTS, **body}).json()["choices"]
    assert len(expected) == len(PROMPTS), ran
    assert [choice["token_ids"] for choice in alone] == expected
    assert [choice["token_ids"] for choice in together] == expected


def test_a_start_at_a_unix_socket_is_logged_from_loading_to_ready_and_its_end_removes_it(
    tmp_path: Path,
) -> None:
    """The socket's mode where none is given is that of `listening`."""
    path = tmp_path / "cadenza.sock"
    flags = ("--uds", str(path), "--uds-mode", "0660", "--log-level", "info", *FLAGS)
    with serve_process(*flags) as serving:
        serving.wait_for(lambda: "ready at" in serving.log or None)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        told = [line["message"] for line in serving.lines]
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://cadenza") as client:
            assert client.get("/ready").status_code == 200
        serving.terminate()
        serving.wait()
        assert not path.exists()
    assert serving.other_lines == []
    phases = [line for line in told if line.startswith("loading: ")]
    start, first, sampling, plan, bound, ready, last = (line for line in told if line not in phases)
    assert start.startswith(f"cadenza {__version__} is starting: ")
    assert first == f"loading bundled with cadenza {__version__} for unix:{path}"
    assert phases == [
        "loading: libraries are imported, and the model's files opened",
        "loading: weights are read",
        "loading: programs are compiled and timed",
    ]
    assert last == f"ready at unix:{path}"
    assert sampling == (
        "sampling of requests that set none: temperature 0 (as the model recommends)"
    )
    assert re.search(
        r"bfloat16 weights, .* KV cache, 4 rows, context of 1024 tokens; .* MiB planned in all, "
        r".* MiB of them resident at the start$",
        plan,
    )
    assert re.search(r"steps .* ms", bound), bound
    assert re.fullmatch(r"engine ready in \d+\.\d s \(.*compile \d+\.\d\); process \d+", ready)


def test_debug_lines_hold_the_resolved_configuration(serving: ServeProcess) -> None:
    (front,) = (line for line in serving.lines if "EngineConfig(" in line["message"])
    (engine,) = (line for line in serving.lines if "EnginePlan(" in line["message"])
    assert {front["level"], engine["level"]} == {"debug"}
    assert "api_key=0" in front["message"]


def test_both_processes_leave_what_they_have_loaded_out_of_collections(
    serving: ServeProcess,
) -> None:
    pattern = re.compile(r"(\d+) objects are left out of garbage collections")

    def frozen() -> list[int] | None:
        found = [pattern.fullmatch(line["message"]) for line in serving.lines]
        counts = [int(each[1]) for each in found if each]
        return counts if len(counts) == 2 else None

    assert min(serving.wait_for(frozen)) > 10_000


def test_each_request_has_one_line_with_its_numbers(serving: ServeProcess) -> None:
    body = {"prompt": "the fox", "max_tokens": 5, "request_id": "numbers-1", "user": "ann"}
    usage = serving.post("/v1/completions", body).json()["usage"]
    (line,) = serving.wait_for(
        lambda: [line for line in serving.requests() if line["request_id"] == "numbers-1"]
    )
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert line[name] == usage[name]
    assert 0 < line["ttft_ms"] <= line["latency_ms"]
    assert (line["user"], line["status"]) == ("ann", 200)
    assert line["finish_reason"] in {"stop", "length"}
    assert "the fox" not in serving.log


@pytest.mark.soak
def test_the_queues_timeout_is_as_its_flag_says_and_a_504_says_so() -> None:
    one_row = ("--max-num-seqs", "1", "--max-model-len", "1024")
    with serve_process(*one_row, "--queue-timeout", "2", CADENZA_QUEUE_TIMEOUT="3600") as serving:
        serving.wait_ready()
        # More than two seconds of work, of which the rest is not waited for.
        with serving.streaming({**LONG, "n": 16}) as lines:
            next(lines)
            refused = serving.post("/v1/completions", {"prompt": "the fox"})
            following = [next(lines) for _ in range(2)]
        assert refused.status_code == 504
        error = refused.json()["error"]
        assert error["code"] == "deadline_exceeded"
        assert "2 seconds in the queue" in error["message"]
        assert "--queue-timeout" in error["message"]
        assert not any('"error"' in line for line in following)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_it_serves_leaves_the_contexts_of_what_it_has_made(
    number: signal.Signals,
) -> None:
    previous = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as left, terminable():
            os.kill(os.getpid(), number)
        assert left.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, previous)


@pytest.mark.soak
def test_under_nohup_sighup_is_ignored_and_a_second_sigterm_ends_it_at_once() -> None:
    """That it takes less than two seconds is shown under load by `tests/e2e`."""
    flags = (*FLAGS, "--shutdown-timeout", "600")
    with serve_process(*flags, before=IGNORING_SIGHUP) as serving:
        serving.wait_ready()
        serving.process.send_signal(signal.SIGHUP)
        for _ in range(3):  # a signal is taken before the next request
            assert serving.post("/v1/completions", PLAIN).status_code == 200
        assert "draining" not in serving.log
        engine = serving.engine_pid()
        lines: list[str] = []
        client = threading.Thread(target=_read_to_end, args=(serving, lines))
        client.start()
        serving.wait_for(lambda: lines)
        serving.terminate()
        serving.wait_for(lambda: serving.status("/ready") == 503)
        serving.terminate()
        assert serving.wait() in {0, TERMINATED}
        client.join(TIMEOUT_S)
        assert "ending at once" in serving.log
        assert not any('"finish_reason":"length"' in line for line in lines[-2:]), "it was drained"
        deadline = time.monotonic() + TIMEOUT_S
        while is_alive(engine) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_alive(engine)


def _read_to_end(serving: ServeProcess, lines: list[str]) -> None:
    with suppress(httpx.TransportError), serving.streaming(ENDLESS) as stream:
        lines.extend(stream)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "my-model")


@pytest.mark.soak
def test_a_folder_is_served_by_its_last_part_and_nobody_is_told_where_it_lies(folder: Path) -> None:
    with serve_process(f"{folder}/", *ENGINE) as serving:
        serving.wait_ready()
        (card,) = serving.get("/v1/models").json()["data"]
        assert (card["id"], card["root"]) == ("my-model", "my-model")
        for name in ("my-model", f"{folder}/", None):
            body = {"prompt": "the fox", "max_tokens": 2, "model": name}
            assert serving.post("/v1/completions", body).status_code == 200
        unknown = serving.post("/v1/completions", {"prompt": "the fox", "model": "models"})
        assert unknown.status_code == 404
        told = [unknown.text, serving.get("/metrics").text, serving.get("/v1/models").text]
        assert not [text for text in told if str(folder.parent) in text]


COMMIT = "a" * 40


@pytest.fixture(scope="module")
def hub(folder: Path) -> FakeHub:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return FakeHub(refs={"v1": COMMIT}, files={COMMIT: files})


@pytest.fixture(scope="module")
def without_template(
    hub: FakeHub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeProcess]:
    """A revision of the hub's under another name, without the chat template that it has."""
    flags = ("--served-model-name", "ours", "--no-chat-template", "--revision", "v1")
    cache = str(tmp_path_factory.mktemp("hub"))
    with hub_serving(hub) as endpoint:
        variables = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": cache, "HF_HUB_OFFLINE": "0"}
        variables |= {"CADENZA_IGNORE_UNKNOWN_FIELDS": "1"}
        with serve_process(HUB_NAME, *flags, *ENGINE, **variables) as serving:
            serving.wait_ready()
            yield serving


def test_a_model_with_another_name_has_no_other(without_template: ServeProcess) -> None:
    cards = without_template.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["ours"]
    for name in (HUB_NAME, HUB_NAME.rpartition("/")[2]):
        body = {"prompt": "the fox", "max_tokens": 2, "model": name}
        assert without_template.post("/v1/completions", body).status_code == 404


def test_both_processes_open_the_one_commit_that_the_revision_was(
    without_template: ServeProcess, hub: FakeHub
) -> None:
    """The branch may have moved when the engine starts; and there is none that is called main."""
    assert without_template.status("/ready") == 200
    looked_up = [line.rpartition("/revision/")[2] for line in hub.requests if "/revision/" in line]
    assert looked_up[0] == "v1"
    assert len(looked_up) > 1
    assert set(looked_up[1:]) == {COMMIT}


def test_ignoring_unknown_fields_is_logged(without_template: ServeProcess) -> None:
    answer = without_template.post("/tokenize", {"prompt": "x", "frob": 1})
    assert answer.status_code == 200, answer.text
    assert "--ignore-unknown-fields" in without_template.log


def test_chat_needs_a_template(without_template: ServeProcess) -> None:
    chat = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 2}
    refused = without_template.post("/v1/chat/completions", chat)
    assert refused.status_code == 400
    assert "no chat template" in refused.json()["error"]["message"]
    assert without_template.post("/v1/completions", PLAIN).status_code == 200


KEYS = ("first-key", "second-key")
METRICS_KEY = "metrics-key"
BARE = {"timeout": TIMEOUT_S, "trust_env": False}


ACCEPTED = ("--quantization", "none", "--batching", "continuous", "--generation-config", "none")
"""Values that ask for what there is."""
DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')


@pytest.fixture(scope="module")
def metrics_port() -> Iterator[int]:
    with kept_port() as port:
        yield port


@pytest.fixture(scope="module")
def keyed(metrics_port: int) -> Iterator[ServeProcess]:
    keys = {"CADENZA_API_KEY": " ".join(KEYS), "CADENZA_METRICS_KEY": METRICS_KEY}
    port = ("--metrics-port", metrics_port)
    with serve_process(*FLAGS, *ACCEPTED, *DRAFTS, *port, **keys) as serving:
        serving.wait_ready()
        yield serving


def with_key(serving: ServeProcess, place: int) -> httpx.Client:
    headers = {"authorization": f"Bearer {KEYS[place]}"}
    return httpx.Client(base_url=serving.url, headers=headers, timeout=TIMEOUT_S, trust_env=False)


def test_keys_come_from_the_environment(keyed: ServeProcess) -> None:
    assert keyed.status("/v1/models") == 401
    for place in range(len(KEYS)):
        with with_key(keyed, place) as client:
            assert client.get("/v1/models").status_code == 200
    assert KEYS[0] not in keyed.log


def test_drafts_are_made_as_the_flag_says(keyed: ServeProcess) -> None:
    """On a busy machine the first trials may all seem to lose; there are others from time to time,
    so requests are repeated until one has drafted."""
    pattern = re.compile(r"^vllm:spec_decode_num_drafts_total\S* [1-9]", re.MULTILINE)
    with with_key(keyed, 0) as client:
        prompt = "The cat sat on the mat. " * 3
        body = {"prompt": prompt, "max_tokens": 300, "temperature": 0, "ignore_eos": True}

        def drafted() -> re.Match[str] | None:
            assert client.post("/v1/completions", json=body).status_code == 200
            return pattern.search(client.get("/metrics").text)

        keyed.wait_for(drafted)


def test_the_metrics_have_a_port_and_a_key_of_their_own(
    keyed: ServeProcess, metrics_port: int
) -> None:
    key = {"authorization": f"Bearer {METRICS_KEY}"}
    url = f"http://127.0.0.1:{metrics_port}/metrics"
    assert httpx.get(url, headers=key, **BARE).status_code == 200
    assert httpx.get(url, **BARE).status_code == 401
    assert httpx.get(f"{keyed.url}/metrics", headers=key, **BARE).status_code == 200
    assert httpx.get(f"{keyed.url}/v1/models", headers=key, **BARE).status_code == 401
    assert METRICS_KEY not in keyed.log


def test_another_tenants_cancel_is_that_of_an_unknown_request(keyed: ServeProcess) -> None:
    path = "/v1/requests/mine-1/cancel"
    body = {**LONG, "request_id": "mine-1"}
    with with_key(keyed, 0) as own, with_key(keyed, 1) as other:
        unknown = other.post("/v1/requests/nobodys/cancel")
        # That its owner can still cancel it shows that the other one came in time, and in vain.
        is_open = False
        deadline = time.monotonic() + TIMEOUT_S
        while not is_open and time.monotonic() < deadline:
            with own.stream("POST", "/v1/completions", json=body) as answer:
                lines = (line for line in answer.iter_lines() if line)
                next(lines)
                refused = other.post(path)
                assert (refused.status_code, refused.json()) == (404, unknown.json())
                is_open = own.post(path).status_code == 200
                rest = list(lines)
        assert is_open
        assert '"finish_reason":"abort"' in rest[-2]
        with own.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            assert other.post(path).status_code == 404
            assert '"finish_reason":"length"' in list(lines)[-2]


REFUSED = [
    (["--quantization", "awq"], 2, "--quantization 'awq' is not one of none, int8, int4"),
    (["--kv-cache-dtype", "fp8"], 2, "less accurate than int8 and slower on a CPU"),
    (["--api-key", "short"], 2, "API key"),
    (["--port", "8123", "--metrics-port", "8123"], 2, "--metrics-port 8123 is --port too"),
    (["--allowed-origins", "https://your.page/"], 2, "--allowed-origins"),
    (["--uds-mode", "rw"], 2, "--uds-mode 'rw' is not three octal digits"),
    (["--ssl-certfile", "nowhere.pem"], 2, "--ssl-keyfile"),
    (["--shutdown-timeout", "-1"], 2, "--shutdown-timeout"),
    (["--queue-timeout", "0"], 2, "--queue-timeout"),
    (["/nowhere/at/all"], 2, "nowhere"),
    (["--frobnicate"], 2, "--frobnicate"),
    (["--no-chat-template", "--chat-template", "{{ 1 }}"], 2, "both given; give one"),
    (["--generation-config", "vllm"], 2, "--generation-config 'vllm' is not one of auto, none"),
]
RUN_EACH = """
import json, os, sys, tempfile
from cadenza.cli import main
main(["serve", "--api-key", "short", "--log-level", "error"])
for arguments in json.load(sys.stdin):
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    child = os.fork()
    if not child:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.exit(main(["serve", "--port", "0", "--log-level", "error", *arguments]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    out.seek(0)
    err.seek(0)
    print(json.dumps([code, out.read(), err.read()]), flush=True)
"""
"""Each in a process of its own. The first call has imported what they need."""


@pytest.mark.soak
def test_what_only_the_engine_process_can_refuse_is_one_line_and_no_other_start(
    folder: Path,
) -> None:
    with serve_process(folder, *ENGINE, "--device", "tpu:7", "--log-level", "info") as serving:
        assert serving.wait() == 2
    assert [line["level"] for line in serving.lines if line["level"] != "info"] == []
    assert "draining" not in serving.log
    (told,) = serving.other_lines
    assert told.startswith("cadenza: error: --device tpu:7: this machine has 0 devices")


@pytest.fixture(scope="module")
def refusals() -> dict[tuple[str, ...], Ran]:
    asked = [arguments for arguments, _, _ in REFUSED]
    ran = subprocess.run(
        [sys.executable, "-c", RUN_EACH],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * 2,
        check=True,
    )
    told = [Ran(*json.loads(line)) for line in ran.stdout.splitlines()]
    return dict(zip(map(tuple, asked), told, strict=True))


@pytest.mark.parametrize(("arguments", "code", "words"), REFUSED)
def test_what_cannot_work_is_said_at_once(
    refusals: dict[tuple[str, ...], Ran], arguments: list[str], code: int, words: str
) -> None:
    ran = refusals[tuple(arguments)]
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
    assert words in ran.err
