"""Every step program leaves JAX and comes back: static, plain StableHLO for any runtime."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.export
import numpy as np
import pytest

from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.runner import XlaRunner
from cadenza.backends.xla.step_program import StepProgram
from cadenza.batch.step_schema import StepLayout
from tests.by_day import by_day
from tests.contract.steps import Draw, Geometry, Stream, build_inputs
from tests.xla.harness import REFERENCE, Lab, Variant

VARIANTS = {
    "llama": REFERENCE,
    "qwen3": replace(REFERENCE, shape="tiny-qwen3", bucket=32, num_rows=5),
    "qwen3_moe": replace(REFERENCE, shape="tiny-qwen3-moe", bucket=32, num_rows=5),
}
FORBIDDEN = ("custom_call", "callback", "tensor<?", "dynamic_")
ALLOWED = ("dynamic_slice", "dynamic_update_slice")


class CustomCallOps(OpTable):
    """Takes a square root by a decomposition that is a call into a library."""

    def next_tokens(self, x: Any, head: Any, step: Any) -> Any:
        spd = jax.numpy.eye(3) * 2.0 + x[0, 0] * 0.0
        return super().next_tokens(x * jax.numpy.linalg.cholesky(spd)[0, 0], head, step)


def export_step(runner: XlaRunner, variant: Variant) -> jax.export.Exported:
    layout = StepLayout(variant.bucket, variant.num_rows)
    step = StepProgram(ops=runner._ops, spec=runner._spec, layout=layout).step
    structure = jax.tree.structure((runner._weights, runner._state))

    def flat_step(wire: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        weights, state = jax.tree.unflatten(structure, leaves)
        return jax.tree.leaves(step(weights, state, wire))

    wire = jax.ShapeDtypeStruct((layout.num_words,), np.int32)
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for leaf in jax.tree.leaves((runner._weights, runner._state))
    ]
    return jax.export.export(jax.jit(flat_step))(wire, *shapes)


def forbidden_words(program_text: str) -> set[str]:
    words = set(re.findall(r"stablehlo\.(\w+)", program_text))
    found = {w for w in words if any(bad in w for bad in FORBIDDEN) and w not in ALLOWED}
    return found | {bad for bad in ("callback", "tensor<?") if bad in program_text}


def first_steps(variant: Variant) -> list[np.ndarray]:
    geometry = Geometry(
        bucket=variant.bucket, num_rows=variant.num_rows, page_size=variant.page_size
    )
    draws = [Draw(num_logprobs=20), Draw(temperature=1.0, top_p=0.9, top_k=50, seed=3)]
    streams = [Stream(row=row, pages=[0, 1, 2], draw=draw) for row, draw in enumerate(draws)]
    streams[1].pages = [3, 4, 5]
    prompts = np.random.default_rng(51).integers(3, 200, (2, 14)).tolist()
    chunks = [s.chunk(p, samples=True) for s, p in zip(streams, prompts, strict=True)]
    wires = [build_inputs(chunks, geometry).words]
    for _ in range(2):
        wires.append(build_inputs([s.next_token() for s in streams], geometry).words)
    return wires


@pytest.mark.parametrize("name", by_day(VARIANTS, {"llama"}))
def test_the_step_program_is_static_and_calls_nothing_outside(lab: Lab, name: str):
    exported = export_step(lab.runner(VARIANTS[name]), VARIANTS[name])
    assert forbidden_words(exported.mlir_module()) == set()
    assert all(isinstance(size, int) for aval in exported.in_avals for size in aval.shape)


def test_a_library_call_in_the_step_program_is_seen(lab: Lab):
    runner = lab.runner(REFERENCE)
    spoilt = XlaRunner(
        REFERENCE.config, lab.weights(REFERENCE.shape), REFERENCE.setup, CustomCallOps
    )
    spoilt._state = runner._state
    assert "custom_call" in forbidden_words(export_step(spoilt, REFERENCE).mlir_module())


def test_an_exported_step_that_came_back_gives_the_same_bits(lab: Lab):
    variant = REFERENCE
    runner = lab.runner(variant)
    data = export_step(runner, variant).serialize()
    returned = jax.jit(jax.export.deserialize(data).call)
    table = np.zeros((variant.num_rows, variant.limits.max_pages_per_seq), np.int32)
    table[0, :3], table[1, :3] = [0, 1, 2], [3, 4, 5]
    state = runner._take_state()
    rows = state.rows._replace(page_table=jax.device_put(table))
    state = state._replace(rows=rows)
    weights, structure = jax.tree.leaves(runner._weights), jax.tree.structure(state)
    twin = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf).copy()), state)
    for wire in first_steps(variant):
        *leaves, theirs, their_states = returned(wire, *weights, *jax.tree.leaves(twin))
        twin = jax.tree.unflatten(structure, leaves)
        step = runner.programs.step[variant.bucket]
        state, ours, our_states = step(runner._weights, state, wire)
        assert np.array_equal(np.asarray(ours)[:2], np.asarray(theirs)[:2])
        assert np.array_equal(np.asarray(our_states)[:2], np.asarray(their_states)[:2])
