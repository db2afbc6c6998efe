"""The proof at load finds a kernel whose bits depend on the step, and names it.

On the kernels for CPUs with the buckets of a GPU; `tests/cuda` has those for GPUs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.kernel_proof import ProofTokens, num_first, prove_kernels
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.table import DecoderSpec, Linear
from cadenza.backends.xla.runner import XlaRunner
from cadenza.engine.core import EngineCore
from cadenza.errors import ConfigError
from tests.by_day import by_day
from tests.xla.harness import Lab, Variant

pytestmark = pytest.mark.native


class ManySizes(NativeOps):
    is_proved_at_load = True

    def token_buckets(self, max_num_batched_tokens: int) -> tuple[int, ...]:
        return (1, 4, max_num_batched_tokens)


class SplitProducts(ManySizes):
    """Products of four rows have a last bit of their own, as those of a split reduction have."""

    def linear(self, x: jax.Array, weight: Linear, count: jax.Array, residual: Any = None) -> Any:
        if len(x) == 4 and residual is None:
            return self._product(x, weight, count, (self._spec.dtype, 1.0 + 2.0**-20))
        return super().linear(x, weight, count, residual)


class RowNoise(ManySizes):
    def next_tokens(self, x: jax.Array, head: Linear, step: Any) -> jax.Array:
        if len(step.tokens.ids) == 4:
            rows = jnp.arange(len(step.logits.keys), dtype=jnp.uint32)
            keys = jnp.asarray(step.logits.keys).at[:, 0].set(rows + 7)
            step = step._replace(logits=replace(step.logits, keys=keys))
        return super().next_tokens(x, head, step)


# A step of the most tokens has those of two rows.
VARIANT = Variant(bucket=24, num_rows=8, max_model_len=20, ops=ManySizes)


def loaded(lab: Lab, make_ops: Callable[..., Any], variant: Variant = VARIANT) -> XlaRunner:
    weights = lab.weights(variant.shape)
    return XlaRunner(variant.config, weights, variant.setup, make_ops)


def prove(runner: XlaRunner) -> Any:
    return prove_kernels(runner._ops, runner._spec, runner._limits, runner.weights)


def test_exact_kernels_are_proved_in_steps_of_every_size(lab: Lab) -> None:
    proof = prove(loaded(lab, ManySizes))
    assert proof.step_sizes == (1, 4, 24)
    assert proof.num_single == 2
    names = {each.split()[0] for each in proof.operations}
    assert {"embed", "rms_norm", "linear", "gated_linear", "rope_append_attend"} <= names
    assert "linear 5x40x32x1 float32" in proof.operations
    assert proof.elapsed_s > 0


@pytest.mark.parametrize(
    ("faulty", "said"),
    [
        (SplitProducts, "linear 5x40x32x1 float32 has other bits in a step of 4 tokens"),
        (RowNoise, "next_token has other bits in a step of 4 tokens"),
    ],
)
def test_a_kernel_whose_bits_depend_on_the_step_is_named(
    lab: Lab, faulty: Callable[..., Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"are not exact: {said}.*; use --ops reference"):
        prove(loaded(lab, faulty))


FAMILIES = (
    *("tiny-qwen3.5-moe", "tiny-gemma2", "tiny-deepseek-v3", "tiny-lfm2", "tiny-granite4"),
    *("tiny-gemma4", "tiny-qwen3-moe"),
)


@pytest.mark.parametrize("shape", by_day(dict.fromkeys(FAMILIES, None), {"tiny-qwen3.5-moe"}))
def test_layers_of_every_kind_are_proved(lab: Lab, shape: str) -> None:
    variant = Variant(shape=shape, bucket=24, num_rows=8, ops=ManySizes)
    runner = loaded(lab, ManySizes, variant)
    proof = prove(runner)
    has_states = variant.config.recurrence is not None
    assert proof.num_single == (0 if has_states else 2)
    count = num_first(runner._spec, runner.weights)
    assert {*variant.config.layer_kinds[:count]} == {*variant.config.layer_kinds}


def test_a_runner_is_proved_when_it_is_warmed_up_and_its_engine_tells(lab: Lab) -> None:
    runner = loaded(lab, ManySizes, replace(VARIANT, bucket=8))
    assert runner.proof is None
    runner.warmup()
    assert runner.proof is not None
    assert runner.proof.step_sizes == (1, 4, 8)
    assert EngineCore(runner, replace(VARIANT, bucket=8).limits).kernel_proof == runner.proof
    assert " operations have equal bits in steps of 1 to 8 tokens" in runner.proof.summary
    runner.close()


def test_a_runner_that_is_not_exact_is_not_warm(lab: Lab) -> None:
    runner = loaded(lab, SplitProducts, replace(VARIANT, bucket=8))
    with pytest.raises(ConfigError, match="are not exact"):
        runner.warmup()
    runner.close()


def test_rows_that_are_compared_include_the_first_and_spread_over_the_step() -> None:
    variant = Variant(bucket=2048, num_rows=64, max_model_len=4096)
    spec = DecoderSpec(model=variant.config, dtype=np.float32, page_size=16)
    tokens = ProofTokens(spec, variant.limits)
    compared = tokens.compared.tolist()
    assert compared[:4] == [0, 1, 2, 3]
    assert compared[-1] > 1024
    assert len(compared) == len({*compared}) < 64
    assert tokens.num_pages == 3 * 44
    step = tokens.prompts(2048).arrays
    assert step.rows.query_starts[:5].tolist() == [0, 700, 1400, 2048, 2048]
    assert step.rows.kv_lens[:4].tolist() == [700, 700, 648, 0]
