"""The gate on an accelerator: batched equals alone bitwise, and the reference's tokens.

Runs where JAX sees a GPU and says why where it does not. Nothing above the kernels is CPU-only, so
this is the whole of what a GPU has to show.
"""

from pathlib import Path
from typing import Any

import jax
import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.runner import XlaRunner
from tests.xla.harness import NAN, Lab, Mode, Variant, random_requests, replay, serve, shout

VARIANTS = {
    "hostile": Variant(),
    "tiny_qwen3": Variant(shape="tiny-qwen3", bucket=32, num_rows=5),
    "bfloat16": Variant(dtype="bfloat16"),
}
MODES = {
    "overlapped": Mode(arrival_seed=1),
    "plain_small_chunks": Mode(arrival_seed=2, loop="plain", budget=9),
    "preempting": Mode(arrival_seed=3, num_pages=22, reserved_output=0.0),
}


def gpus() -> list[Any]:
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


@pytest.fixture(scope="module")
def gpu_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    if not gpus():
        platforms = ", ".join(sorted({device.platform for device in jax.devices()}))
        pytest.skip(f"no GPU: JAX sees {platforms} only")
    folder: Path = tmp_path_factory.mktemp("gpu")
    return Lab(folder)


def gpu_runner(lab: Lab, variant: Variant) -> XlaRunner:
    setup = RunnerSetup(limits=variant.limits, device="cuda", dtype=variant.dtype, fill=NAN)
    runner = XlaRunner(variant.config, lab.weights(variant.shape), setup)
    runner.warmup()
    return runner


@pytest.mark.parametrize("name", VARIANTS)
def test_on_a_gpu_streams_served_together_are_those_served_alone(gpu_lab: Lab, name: str):
    replay("seed 5, 24 requests")
    variant = VARIANTS[name]
    runner = gpu_runner(gpu_lab, variant)
    requests = [shout(r) for r in random_requests(5, 24, variant)]
    alone = []
    for request in requests:
        runner.reset()
        alone += serve(runner, variant, [request], Mode(loop="plain", caching=False)).streams
    for mode_name, mode in MODES.items():
        runner.reset()
        together = serve(runner, variant, requests, mode).streams
        for index, (stream, expected) in enumerate(zip(together, alone, strict=True)):
            assert stream.difference(expected) is None, f"request {index}, {mode_name}"


def test_on_a_gpu_float32_tokens_are_the_reference_engines(gpu_lab: Lab):
    replay("seed 6, 16 requests")
    variant = VARIANTS["hostile"]
    requests = random_requests(6, 16, variant)
    served = serve(gpu_runner(gpu_lab, variant), variant, requests, Mode(arrival_seed=1))
    reference = gpu_lab.reference(variant)
    for index, request in enumerate(requests):
        assert served.streams[index].token_ids == reference.run(request).token_ids, f"{index}"
