"""What `cadenza export` compiles, and the order of sums in a compiled product, which `exactness =
"bitwise"` rests on: one ascending chain over the reduction, whatever the number of rows. No
document of IREE promises it: a module that another version compiles may have another order."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from cadenza.backends.exporting import ExportOptions, check_exported
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.cli import WRONG_USE, main
from cadenza.errors import CheckpointError
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.xla.harness import HOSTILE

DATA = Path(__file__).with_name("data")
# Of `product.mlir`, compiled with the flags of the bundled model's modules.
MODULE = DATA / "product.vmfb"

needs_compiler = pytest.mark.skipif(
    find_spec("iree") is None or find_spec("iree.compiler") is None,
    reason="IREE's compiler is not installed: pip install '.[iree-export]'",
)


def run(module: bytes, x: np.ndarray, w: np.ndarray, driver: str = "local-task") -> np.ndarray:
    from cadenza.backends.iree.runner import IreeDevice, LoadedProgram

    device = IreeDevice(driver)
    program = LoadedProgram(device, "product", module, None)
    (made,) = program.call([device.upload(x), device.upload(w)])
    result = device.read(made)
    del made, program  # before the device
    return result


def chain(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The sums in ascending order, of products and sums that are each rounded to float32: generic
    x86-64 has no fused multiply-add."""
    total = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        total = total + np.multiply.outer(x[:, k], w[:, k])
    return total


def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return (rng.standard_normal((8, 576), np.float32), rng.standard_normal((96, 576), np.float32))


@pytest.mark.parametrize("driver", ["local-sync", "local-task"])
def test_a_compiled_product_is_one_ascending_chain(driver: str):
    x, w = operands()
    found = run(MODULE.read_bytes(), x, w, driver)
    assert np.array_equal(found.view(np.int32), chain(x, w).view(np.int32))
    backwards = chain(x[:, ::-1], w[:, ::-1])
    assert (found != backwards).mean() > 0.5, "another order has other bits"


def test_a_row_has_the_same_bits_beside_others_that_are_not_finite():
    x, w = operands()
    expected = run(MODULE.read_bytes(), x, w)
    spoilt = x.copy()
    spoilt[1:] = np.nan
    found = run(MODULE.read_bytes(), spoilt, w)
    assert np.array_equal(found[0].view(np.int32), expected[0].view(np.int32))


@needs_compiler
def test_the_installed_compiler_makes_the_same_product():
    from cadenza.backends.exporting import compile_module, compiler_flags

    text = (DATA / "product.mlir").read_text(encoding="utf-8")
    x, w = operands()
    made = compile_module(text, compiler_flags("llvm-cpu", "generic"))
    expected = run(MODULE.read_bytes(), x, w)
    assert np.array_equal(run(made, x, w).view(np.int32), expected.view(np.int32))


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
