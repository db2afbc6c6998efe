"""What `cadenza export` writes; where IREE's compiler is installed."""

from pathlib import Path

import numpy as np
import pytest

from cadenza.backends.exporting import ExportOptions, check_exported
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.cli import WRONG_USE, main
from cadenza.errors import CheckpointError
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.iree.test_product import needs_compiler
from tests.xla.harness import HOSTILE


@needs_compiler
@pytest.mark.soak
def test_the_bundled_models_modules_are_what_is_compiled_now():
    from tools.iree_modules import main as compile_modules

    assert compile_modules(["--check"]) == 0


@needs_compiler
@pytest.mark.soak
def test_an_exported_model_of_random_weights_is_exact(tmp_path: Path):
    """With grouped heads and an odd vocabulary, in a folder that `cadenza export` wrote."""
    write_random_checkpoint(HOSTILE, tmp_path / "model", seed=0, dtype="float32")
    sizes = ("--max-num-seqs", "2", "--max-model-len", "320")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out"), *sizes]) == 0
    gate = ("--backend", "iree", "--max-num-seqs", "2", "--max-tokens", "8", "--reference", "solo")
    assert main(["verify", str(tmp_path / "out"), *gate]) == 0


@pytest.mark.parametrize("rows", ["0", "4,", "eight", "4,65"])
def test_rows_that_cannot_be_compiled_are_refused(rows: str, tmp_path: Path):
    bundled = str(open_checkpoint(None).folder)
    assert main(["export", bundled, str(tmp_path / "out"), "--max-num-seqs", rows]) == WRONG_USE
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("tiny-lfm2", "the model has recurrent states; such a model is not exported"),
        ("tiny-gemma3-vl", "the model takes images; such a model is not exported"),
    ],
)
def test_a_model_that_is_not_exported_is_refused_with_its_cause(
    shape: str, said: str, tmp_path: Path
):
    write_random_checkpoint(named_shape(shape), tmp_path, seed=0, dtype="float32")
    with pytest.raises(CheckpointError, match=f"^{said}$"):
        check_exported(open_checkpoint(tmp_path), ExportOptions())


def test_parameters_are_found_by_what_they_contain():
    from cadenza.backends.exporting import find_parameters

    checkpoint = open_checkpoint(None)
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"]
    arrays = [checkpoint.weights.array(name).astype(np.float32) for name in names]
    exported = {"w0": np.concatenate(arrays), "w1": arrays[1] + 1, "w2": arrays[1]}
    found = find_parameters(checkpoint.config, checkpoint.weights, names, exported, 64)
    assert [each.tensors for each in found] == [tuple(names), (), (names[1],)]
