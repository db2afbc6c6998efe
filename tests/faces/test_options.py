"""The engine's options that are no number of the plan: each reaches the engine or its text side."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from msgspec.structs import replace

from cadenza import LLM, EngineConfig, SamplingParams
from cadenza.errors import (
    CheckpointError,
    ConfigError,
    DeviceUnavailableError,
    InvalidRequestError,
)
from cadenza.frontend.loaded_model import open_text
from cadenza.frontend.prepared_request import ChatPrompt
from cadenza.loading.build import find_checkpoint, find_configured, plan_model
from cadenza.loading.planned_engine import PlannedEngine

DRAWN = SamplingParams(max_tokens=12, ignore_eos=True)
SMALL = {"max_num_seqs": 2, "max_model_len": 64}


def test_the_chosen_backend_device_and_operations_are_planned(tiny_folder: Path) -> None:
    checkpoint = find_checkpoint(tiny_folder)
    for backend in ("auto", "xla"):
        config = EngineConfig(backend=backend, device="cpu", ops="reference")
        traits = plan_model(checkpoint, config).traits
        assert (traits.name, traits.ops) == ("xla:cpu", "reference")
    with pytest.raises(DeviceUnavailableError, match="cuda:9"):
        plan_model(checkpoint, EngineConfig(device="cuda:9"))
    with pytest.raises(ConfigError, match=r"--backend 'tensor' is not one of auto, xla, mlx, iree"):
        LLM(tiny_folder / "absent", backend="tensor")


def test_the_seed_the_scheduler_and_the_recommended_sampling_reach_the_engine(
    tiny_folder: Path, tmp_path: Path, llm: LLM
) -> None:
    folder = copytree(tiny_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25}))
    with LLM(folder, **SMALL) as plain:
        assert plain.default_sampling_params.temperature == 0.25
        assert plain.core.loop._depth == 1
        drawn = plain.generate([1, 2], DRAWN)[0].outputs
    chosen = {"seed": 11, "scheduler": "plain", "generation_config": "none"}
    with LLM(folder, **SMALL, **chosen) as other:
        assert other.default_sampling_params.temperature == 1.0
        assert other.core.loop._depth == 0
        assert other.generate([1, 2], DRAWN)[0].outputs != drawn


SHOUT = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"


@pytest.mark.parametrize("kind", ["file", "path", "text"])
def test_a_given_chat_template_is_used_in_place_of_the_models(
    worded_folder: Path, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "{{shout}}.jinja"
    file.write_text(SHOUT)
    forms: dict[str, Any] = {"file": str(file), "path": file, "text": SHOUT}
    given = EngineConfig(chat_template=forms[kind])
    asked = [{"role": "user", "content": "the fox"}]
    checkpoint = find_configured(worded_folder, given)
    assert open_text(checkpoint, given).render_chat(ChatPrompt(messages=asked))[0] == "THE FOX"
    own = find_configured(worded_folder, EngineConfig())
    assert open_text(own, EngineConfig()).render_chat(ChatPrompt(messages=asked))[0] != "THE FOX"
    plan = plan_model(own, EngineConfig())
    fingerprints = [
        PlannedEngine(checkpoint=each, plan=plan, config=given).identity().fingerprint
        for each in (checkpoint, own)
    ]
    assert fingerprints[0].template != fingerprints[1].template
    assert replace(fingerprints[0], template="") == replace(fingerprints[1], template="")


def test_without_its_chat_template_a_model_takes_plain_prompts_only(worded_folder: Path) -> None:
    config = EngineConfig(chat_template="none")
    checkpoint = find_configured(worded_folder, config)
    text = open_text(checkpoint, config)
    assert text.prompts.template is None
    assert text.encode("the fox")
    with pytest.raises(InvalidRequestError, match="no chat template; give a plain prompt"):
        text.render_chat(ChatPrompt(messages=[{"role": "user", "content": "the fox"}]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("no-such-file.jinja", "there is no such file, and it is not the text of a template"),
        (Path("no-such-file.jinja"), "there is no such file"),
        ("{no}/such-file.jinja", "there is no such file"),
        ('{"a": 1}', r"a template, which has \{\{ or \{%; name a file"),
        ("x" * 5000, "there is no such file"),
        ("{% for %}", "not valid Jinja"),
        ("{{" + "x" * (1 << 20), r"over 1\.0 MiB"),
        ("", "must be a file, or the text"),
        (5, "must be a file, or the text"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_chat_template_that_cannot_be_used_is_refused(
    worded_folder: Path, given: str | Path, said: str
) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=said):
        LLM(worded_folder, chat_template=given)


def test_a_file_without_jinja_is_no_chat_template(worded_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text('{"a": "hello"}')
    config = EngineConfig(chat_template=str(tmp_path / "notes.txt"))
    with pytest.raises(CheckpointError, match=r"notes\.txt writes no message"):
        find_configured(worded_folder, config)
