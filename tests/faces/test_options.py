"""The engine's options that are no number of the plan: each reaches the engine or its text side."""

import json
from pathlib import Path
from shutil import copytree

import pytest

from cadenza import LLM, EngineConfig, SamplingParams
from cadenza.errors import ConfigError, DeviceUnavailableError
from cadenza.loading.build import find_checkpoint, plan_model

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
    with pytest.raises(ConfigError, match=r"--backend 'tensor' is not one of auto, xla, mlx"):
        LLM(tiny_folder / "absent", backend="tensor")


def test_the_seed_the_scheduler_and_the_recommended_sampling_reach_the_engine(
    tiny_folder: Path, tmp_path: Path, llm: LLM
) -> None:
    folder = copytree(tiny_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25}))
    with LLM(folder, **SMALL) as plain:
        assert plain.default_sampling_params.temperature == 0.25
        assert plain.core._loop._depth == 1
        drawn = plain.generate([1, 2], DRAWN)[0].outputs
    chosen = {"seed": 11, "scheduler": "plain", "generation_config": "none"}
    with LLM(folder, **SMALL, **chosen) as other:
        assert other.default_sampling_params.temperature == 1.0
        assert other.core._loop._depth == 0
        assert other.generate([1, 2], DRAWN)[0].outputs != drawn
