"""Whole steps on the kernels for GPUs, over the emulation: beside those for CPUs, proved
at load, and with faults in their kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.kernel_proof import prove_kernels
from cadenza.backends.xla.mutants import cuda_faults
from cadenza.backends.xla.ops.cuda import CudaOps
from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.runner import XlaRunner
from cadenza.config import KVCacheDType
from cadenza.errors import ConfigError
from cadenza.kernel_proof import KernelProof
from cadenza.weights.weight_format import WeightDType
from tests.by_day import by_day
from tests.contract.steps import Draw, Geometry, Stream, run_step
from tests.xla.harness import Lab, Variant

pytestmark = pytest.mark.native

SMALL = {"bucket": 8, "num_rows": 4, "max_model_len": 64, "num_pages": 16}
SUMS_BY_ROWS = 6


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("checkpoints"))


Load = Callable[[Variant], XlaRunner]


@pytest.fixture
def load(lab: Lab, library: CudaLibrary) -> Load:
    def load_runner(variant: Variant) -> XlaRunner:
        weights = lab.weights(variant.shape)
        make_ops = lambda spec: CudaOps(spec, library)  # noqa: E731
        return XlaRunner(variant.config, weights, variant.setup, make_ops)

    return load_runner


def proof_of(runner: XlaRunner) -> KernelProof:
    return prove_kernels(runner._ops, runner._spec, runner._limits, runner.weights)  # type: ignore[arg-type]


TYPES: dict[str, tuple[WeightDType, KVCacheDType]] = {
    "bfloat16": ("bfloat16", "auto"),
    "float32": ("float32", "auto"),
    "float32 over KV in int8": ("float32", "int8"),
}


@pytest.mark.parametrize("types", by_day(TYPES, {"bfloat16", "float32 over KV in int8"}))
def test_the_kernels_have_equal_bits_in_steps_of_every_size(load: Load, types: str) -> None:
    dtype, kv_cache_dtype = TYPES[types]
    proof = proof_of(load(Variant(dtype=dtype, kv_cache_dtype=kv_cache_dtype, **SMALL)))
    assert proof.step_sizes == (1, 2, 4, 8)
    assert proof.num_single == 3
    assert f"gated_linear 112x40 {dtype}" in proof.operations
    assert {each.weight for each in proof.products} >= {
        f"160x40 {dtype}",
        f"112x40 {dtype}, gate and up",
        f"211x40 {dtype}",
    }
    assert all(each.own_rows == (1, 2, 4, 8) for each in proof.products)


@contextmanager
def fault(library: CudaLibrary, value: int) -> Iterator[None]:
    library.handle.cadenza_cuda_inject_fault(value)
    try:
        yield
    finally:
        library.handle.cadenza_cuda_inject_fault(0)


def test_kernels_that_sum_by_the_number_of_rows_fail_the_load_with_the_weights_shape(
    load: Load, library: CudaLibrary
) -> None:
    runner = load(Variant(dtype="float32", **SMALL | {"bucket": 16}))
    with (
        fault(library, SUMS_BY_ROWS),
        pytest.raises(ConfigError, match=r"are not exact: .*\[160, 40\].*; use --ops reference"),
    ):
        proof_of(runner)


def chosen(runner: XlaRunner, variant: Variant) -> list[Any]:
    geometry = Geometry(bucket=8, num_rows=4, page_size=16)
    streams = [Stream(row=2, pages=[5], draw=Draw(num_logprobs=8)), Stream(row=0, pages=[9])]
    prompts = np.random.default_rng(3).integers(3, 200, (2, 9)).tolist()
    found = []
    for start, stop in ((0, 5), (5, 9)):
        chunks = [
            streams[0].chunk(prompts[0][start:stop], samples=stop == 9),
            streams[1].chunk(prompts[1][start : start + 3], samples=False),
        ]
        found.append(run_step(runner, chunks, geometry))
    for _ in range(2):
        found.append(run_step(runner, [streams[0].next_token()], geometry))
    return [(each.token_ids[:1], each.top_ids[:1], each.top_logprobs[:1]) for each in found[1:]]


def test_a_runner_on_the_kernels_chooses_what_those_for_cpus_choose(lab: Lab, load: Load) -> None:
    variant = Variant(dtype="float32", **SMALL)
    ours = load(variant)
    ours.warmup()
    assert ours.proof is not None
    on_cpu = replace(variant.setup, device="cpu")
    theirs = XlaRunner(variant.config, lab.weights(variant.shape), on_cpu, NativeOps)
    theirs.warmup()
    for mine, expected in zip(chosen(ours, variant), chosen(theirs, variant), strict=True):
        np.testing.assert_array_equal(mine[0], expected[0])
        np.testing.assert_array_equal(mine[1], expected[1])
        np.testing.assert_allclose(mine[2], expected[2], atol=2e-5)
    ours.close()
    theirs.close()


def test_the_faults_of_the_kernels_are_loaded_without_a_proof(
    lab: Lab, library: CudaLibrary
) -> None:
    variant = Variant(dtype="float32", **SMALL)
    setup: RunnerSetup = variant.setup
    faults = cuda_faults(lambda: library, variant.config)
    own = [each for each in faults.faults if each.absent is None]
    assert (faults.ops, len(own)) == ("cuda", 6)
    *_, last = own
    assert last.name == "sums in an order that depends on the rows"
    try:
        runner = last.load_runner(variant.config, lab.weights(variant.shape), setup)
        assert isinstance(runner, XlaRunner)
        assert not runner._ops.is_proved_at_load
    finally:
        faults.load_sound(variant.config, lab.weights(variant.shape), setup)
