"""The step for a GPU, exported without one, with its custom call; the plain step for others."""

import re
from typing import Any

import jax
import jax.export
import numpy as np
import pytest

from cadenza.backends.xla.device_state import state_function
from cadenza.backends.xla.ops.cuda import CudaOps
from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.runner import XlaRunner
from cadenza.backends.xla.step_program import StepProgram
from cadenza.backends.xla.tables import MakeOps
from cadenza.batch.step_schema import StepLayout
from tests.xla.harness import Lab, Variant

VARIANT = Variant(dtype="bfloat16", bucket=16, num_rows=4, max_model_len=64, num_pages=16)

POOL = "tensor<16x3x2x16x16xui16>"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("checkpoints"))


def exported(
    lab: Lab, make_ops: MakeOps, platforms: tuple[str, ...], targets: tuple[str, ...] = ()
) -> jax.export.Exported:
    """The step over flat leaves (wire, then weights, then state), which may call custom `targets`;
    nothing is allocated."""
    runner = XlaRunner(VARIANT.config, lab.weights(VARIANT.shape), VARIANT.setup, make_ops)
    ops, spec = runner._ops, runner._spec
    layout = StepLayout(VARIANT.bucket, VARIANT.num_rows)
    step = StepProgram(ops=ops, spec=spec, layout=layout).step
    state = jax.eval_shape(state_function(ops, spec, VARIANT.setup))
    leaves, structure = jax.tree.flatten((runner.weights, state))
    num_weights = len(jax.tree.leaves(runner.weights))

    def flat_step(wire: Any, *given: Any) -> list[Any]:
        weights, state = jax.tree.unflatten(structure, given)
        return jax.tree.leaves(step(weights, state, wire))

    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    wire = jax.ShapeDtypeStruct((layout.num_words,), np.int32)
    donated = tuple(range(1 + num_weights, 1 + len(leaves)))
    checks = [jax.export.DisabledSafetyCheck.custom_call(each) for each in targets]
    function = jax.jit(flat_step, donate_argnums=donated)
    return jax.export.export(function, platforms=platforms, disabled_checks=checks)(wire, *shapes)


@pytest.mark.native
def test_the_step_for_a_gpu_is_one_call_of_the_kernels_over_donated_pools(
    lab: Lab, library: CudaLibrary
) -> None:
    make_ops = lambda spec: CudaOps(spec, library)  # noqa: E731
    text = exported(lab, make_ops, ("cuda",), (library.target,)).mlir_module()
    (call,) = [line for line in text.splitlines() if "stablehlo.custom_call" in line]
    assert f"@{library.target}(" in call
    for said in ("row_bound = 16 : i64", "arrays = dense<", "operations = dense<"):
        assert said in call
    (workspace,) = re.findall(r"workspace_bytes = (\d+) : i64", call)
    results = call[call.index(") -> (") :]
    (scratch,) = re.findall(r"tensor<(\d+)xui8>", results)
    assert 0 < int(workspace) <= int(scratch)
    # Both pools are overwritten in place.
    assert results.count(POOL) == 2
    aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d+)", call)
    operands = re.findall(r"tensor<[^>]*>", call[call.index("} : (") : call.index(") -> (")])
    assert [result for result, _ in aliases] == ["2", "3"]
    assert [operands[int(operand)] for _, operand in aliases] == [POOL, POOL]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_plain_step_is_exported_for_other_devices(lab: Lab, platform: str) -> None:
    found = exported(lab, OpTable, (platform,))
    assert found.platforms == (platform,)
    assert "stablehlo.custom_call" not in found.mlir_module()
