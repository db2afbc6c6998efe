"""mlx-lm's models are loaded without its package's side effects and without a checkpoint's code."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError
from tests.by_day import by_day
from tests.mlx.tiny_models import KINDS, QUICK_KINDS

GENERATE = """
import resource, sys
before = resource.getrlimit(resource.RLIMIT_NOFILE)
from cadenza import LLM, SamplingParams
llm = LLM(backend="mlx", max_num_seqs=2, max_model_len=64)
params = SamplingParams(temperature=0.0, max_tokens=4)
print(llm.generate(["The capital of France is"], params)[0].outputs[0].text)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
print(*sys.modules)
"""


def test_generating_imports_neither_jax_nor_transformers_nor_mlx_lms_package():
    """The program leaves the model open, and ends without an error all the same."""
    ran = subprocess.run(
        [sys.executable, "-c", GENERATE], capture_output=True, text=True, check=True, timeout=120
    )
    answer, _, names = ran.stdout.rstrip().rpartition("\n")
    loaded = set(names.split())
    assert "Paris" in answer
    assert {"mlx.core", "cadenza.backends.mlx.runner"} <= loaded
    assert not {"jax", "jaxlib", "transformers", "torch", "mlx_lm", "cadenza.backends.xla"} & loaded


def changed_copy(folder: Path, target: Path, **changes: Any) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_model_file_of_the_checkpoint_is_refused_and_never_runs(
    tiny_model: Callable[[str], Path], tmp_path: Path
):
    from cadenza.backends.mlx.zoo import load_zoo_model

    folder = changed_copy(tiny_model("full"), tmp_path / "own", model_file="own.py")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="model_file is set; code from a checkpoint"):
        load_zoo_model(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(
            ({"model_type": name}, "which mlx-lm does not have")
            for name in ("nothing", "../utils", "base.x", "json", "", "__init__", None, 3)
        ),
        ({"model_type": "cache"}, "mlx-lm cannot load the model"),
        ({"num_hidden_layers": 2}, "mlx-lm cannot load the model"),
    ],
    ids=repr,
)
def test_a_model_that_mlx_lm_cannot_load_is_refused(
    tiny_model: Callable[[str], Path], tmp_path: Path, changes: dict[str, object], reason: str
):
    from cadenza.backends.mlx.zoo import load_zoo_model

    folder = changed_copy(tiny_model("full"), tmp_path / "changed", **changes)
    before = set(sys.modules)
    with pytest.raises(CheckpointError, match=reason):
        load_zoo_model(folder)
    assert not {each for each in sys.modules if each.startswith("mlx_lm")} - before


@pytest.mark.parametrize("kind", by_day(KINDS, QUICK_KINDS))
def test_a_model_of_any_family_opens_where_the_backend_has_its_code(
    tiny_model: Callable[[str], Path], kind: str
):
    checkpoint = open_checkpoint(tiny_model(kind), any_family=True)
    assert checkpoint.outline.vocab_size == KINDS[kind].config["vocab_size"]
    assert checkpoint.outline.dtype == "float32"
    if not checkpoint.is_known:
        with pytest.raises(CheckpointError):
            open_checkpoint(tiny_model(kind))
        with pytest.raises(CheckpointError):
            _ = checkpoint.config


@pytest.mark.parametrize("kind", by_day(KINDS, QUICK_KINDS))
def test_the_measured_memory_is_that_of_the_loaded_model(
    tiny_model: Callable[[str], Path], kind: str
):
    import mlx.core as mx

    from cadenza.backends.mlx.probe import measure_model
    from cadenza.backends.mlx.slot_model import SlotModel
    from cadenza.backends.mlx.slots import SlotSizes
    from cadenza.backends.mlx.zoo import load_zoo_model

    folder = tiny_model(kind)
    measured = measure_model(folder, 131, ("float32", "bfloat16"))
    stated = measured.memory
    loaded = load_zoo_model(folder)
    slots = SlotModel(loaded.model, loaded.new_caches(), SlotSizes(num_slots=3, capacity=50), (16,))
    slots.compute(0, 0, mx.array([1, 2, 3]))
    assert measured.depends_on_cuts == (KINDS[kind].slot_unit > 1)
    held = sum(each.nbytes for each in slots.arrays())
    memory = stated["float32"]
    logits = 6 * 131 * 4
    assert 3 * (memory.row_bytes - logits + 34 * memory.kv_bytes_per_token) == held
    assert stated["bfloat16"].weight_bytes < memory.weight_bytes
    assert memory.weight_bytes >= (folder / "model.safetensors").stat().st_size * 0.95 - 8192
