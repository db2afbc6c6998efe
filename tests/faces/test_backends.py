"""A backend is chosen by its name, and a second one takes the same way as the first."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cadenza import EngineConfig, Request, SamplingParams, Token
from cadenza.backends import BACKENDS, Machine, find_backend, resolve_backend
from cadenza.backends.base import Backend
from cadenza.backends.mlx.backend import MlxBackend
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.cli.info import describe
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.engine.process.process_link import ProcessLink, ProcessOptions
from cadenza.errors import ConfigError, DeviceUnavailableError
from cadenza.frontend.loaded_model import load_model
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.loading.build import plan_model
from cadenza.verification.reference import build_reference
from cadenza.verification.run import VerifyOptions, verify
from cadenza.verification.self_test import self_test
from tests.contract.backends import BACKEND_PARAMS
from tests.faces.stub_backend import STUBS, StubBackend, greedy_tokens
from tests.server.harness import RunningServer, running_server

STUB = EngineConfig(backend="stub", max_num_seqs=4, max_model_len=256)
PROMPT = (5, 3, 8, 1)
COMMAND = (sys.executable, str(Path(__file__).with_name("stub_child.py")))
LOAD_S = 120.0


def test_auto_is_the_first_backend_and_a_name_is_itself():
    elsewhere = Machine(is_apple_silicon=False, has_mlx=True)
    assert resolve_backend("auto", BACKENDS, elsewhere) == next(iter(BACKENDS)) == "xla"
    assert resolve_backend("auto", STUBS) == "stub"
    assert resolve_backend("xla", {**STUBS, **BACKENDS}) == "xla"
    assert isinstance(find_backend("auto", STUBS), StubBackend)


@pytest.mark.parametrize("name", ["", "AUTO", "fake", "stub", "cadenza.backends.fake:FakeRunner"])
def test_an_unknown_backend_is_refused_and_the_known_ones_are_named(name: str):
    with pytest.raises(ConfigError) as refusal:
        find_backend(name)
    assert str(refusal.value) == f"--backend {name!r} is not one of auto, xla, mlx, iree"


def test_auto_is_mlx_on_apple_silicon_where_it_is_installed():
    apple = Machine(is_apple_silicon=True, has_mlx=True)
    assert resolve_backend("auto", BACKENDS, apple) == "mlx"
    assert resolve_backend("auto", BACKENDS, replace(apple, has_mlx=False)) == "xla"
    assert resolve_backend("xla", BACKENDS, apple) == "xla"
    assert resolve_backend("auto", STUBS, apple) == "stub"


def test_mlx_that_is_not_installed_is_refused_with_the_command_that_installs_it():
    backend = MlxBackend(find=lambda name: None if name == "mlx_lm" else name)
    with pytest.raises(ConfigError, match=r"mlx needs mlx_lm, .* pip install .*mlx.* mlx-lm,"):
        backend.describe("auto", "auto", open_checkpoint(None))


@pytest.mark.parametrize("value", [None, 1, True, ["auto"], "\ud800"], ids=repr)
def test_what_is_no_name_is_no_option(value: Any):
    with pytest.raises(ConfigError, match=r"--backend .* must be auto, or a backend's name"):
        EngineConfig(backend=value)


@pytest.mark.parametrize("name", BACKEND_PARAMS[1:])
def test_every_backend_describes_itself_by_its_name(name: str):
    backend: Backend = find_backend(name)
    traits = backend.describe("auto", "auto", open_checkpoint(None))
    assert traits.name.startswith(f"{name}:")
    assert set(traits.dtype_for) == {"bfloat16", "float16", "float32"}
    assert set(traits.dtype_for.values()) <= set(traits.dtypes)


def modules_loaded_by(script: str) -> frozenset[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"import sys\n{script}\nprint(*sys.modules)"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return frozenset(run.stdout.split())


def test_a_backend_that_was_not_chosen_is_not_imported(tiny_folder: Path):
    chosen = modules_loaded_by(
        "from cadenza import EngineConfig\n"
        "from cadenza.backends import BACKENDS\n"
        "from cadenza.frontend.loaded_model import load_model\n"
        "from tests.faces.stub_backend import STUBS\n"
        "config = EngineConfig(backend='stub', max_num_seqs=1, max_model_len=16)\n"
        f"load_model({str(tiny_folder)!r}, config, backends=BACKENDS | STUBS).close()"
    )
    assert "cadenza.backends.fake" in chosen
    assert not {"jax", "cadenza.backends.xla"} & chosen
    assert "numpy" not in modules_loaded_by("import cadenza.backends")


def test_a_second_backend_is_described_before_anything_is_loaded(tiny_folder: Path):
    checkpoint = open_checkpoint(tiny_folder)
    plan = plan_model(checkpoint, STUB, STUBS)
    assert plan.dtype == "float32"
    assert plan.available_bytes == 1 << 30
    facts = describe(None, checkpoint, plan, STUB)["engine"]
    assert (facts["backend"], facts["ops"]) == ("stub:cpu", "stored tokens")
    with pytest.raises(DeviceUnavailableError, match="cpu only"):
        plan_model(checkpoint, EngineConfig(backend="stub", device="cuda"), STUBS)


def test_a_second_backend_is_loaded_and_computes(tiny_folder: Path):
    phases: list[str] = []
    loaded = load_model(tiny_folder, STUB, phases.append, backends=STUBS)
    with closing(loaded):
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        loaded.core.submit(Request(prompt_token_ids=PROMPT, params=params))
        tokens: list[int] = []
        while not loaded.core.is_idle:
            tokens += [each.token_id for each in loaded.core.step() if isinstance(each, Token)]
    assert phases == ["load", "compile"]
    assert tuple(tokens) == greedy_tokens(PROMPT, 20, loaded.checkpoint.config.vocab_size)


@contextmanager
def served_in_this_process(folder: Path) -> Iterator[RunningServer]:
    loaded = load_model(folder, STUB, backends=STUBS)
    with running_server(EngineFront(InProcessLink(loaded.core)), loaded.text) as server:
        yield server


@contextmanager
def served_by_an_engine_process(folder: Path) -> Iterator[RunningServer]:
    engine = EngineFront(ProcessLink(folder, STUB, ProcessOptions(command=COMMAND)))
    with running_server(engine, TextFrontend(open_checkpoint(folder))) as server:
        engine.wait_ready(LOAD_S)
        yield server


@pytest.mark.parametrize("served", [served_in_this_process, served_by_an_engine_process])
def test_a_second_backend_is_served_over_http(worded_folder: Path, served: Any):
    with served(worded_folder) as server:
        answer = server.post(
            "/v1/completions",
            {
                "prompt": list(PROMPT),
                "max_tokens": 12,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
    assert answer.status_code == 200, answer.text
    vocab_size = open_checkpoint(worded_folder).config.vocab_size
    (choice,) = answer.json()["choices"]
    assert tuple(choice["token_ids"]) == greedy_tokens(PROMPT, 12, vocab_size)


VERIFIED = VerifyOptions(
    shape="tiny-llama", num_requests=8, reference="solo", config=STUB, backends=STUBS
)


def ignore(_: str) -> None:
    """No progress wanted."""


def test_a_second_backend_is_verified():
    result, plan = verify(VERIFIED, ignore)
    assert result.passed, result.last_line
    assert plan.traits.name == "stub:cpu"


def test_what_a_backend_does_not_have_is_refused_by_name(tiny_folder: Path):
    with pytest.raises(ConfigError, match=r"stub backend has no independent .* --reference solo"):
        build_reference(open_checkpoint(tiny_folder), STUB, max_model_len=64, backends=STUBS)
    with pytest.raises(ConfigError, match=r"stub backend has no known faults .* --self-test"):
        self_test(VERIFIED, ignore)
    assert find_backend("stub", STUBS).open_instruments() is None
