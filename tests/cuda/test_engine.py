"""Whole steps of the kernels for GPUs under the engine: chunked prompts, preemption, prefix hits.

Each stream has the bits of its request alone, in buckets of other sizes, and the tokens of the
CPU's kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.cuda import CudaOps
from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.config import EngineLimits, Quantization
from cadenza.events import Token
from cadenza.request import Request, SamplingParams
from tests.by_day import by_day
from tests.xla.harness import (
    Lab,
    Mode,
    Served,
    Stream,
    Variant,
    random_requests,
    replay,
    serve,
    shout,
)

pytestmark = [pytest.mark.native, pytest.mark.kernels]

BUCKETS = (4, 24)


@dataclass(frozen=True)
class FewBuckets:
    library: CudaLibrary
    buckets: tuple[int, ...] = BUCKETS

    def __call__(self, spec: DecoderSpec) -> CudaOps:
        table = _FewBuckets(spec, self.library)
        table.buckets = self.buckets
        return table


class _FewBuckets(CudaOps):
    is_proved_at_load = False
    buckets: tuple[int, ...] = BUCKETS

    def token_buckets(self, max_num_batched_tokens: int) -> tuple[int, ...]:
        return tuple(size for size in self.buckets if size <= max_num_batched_tokens)


@dataclass(frozen=True, kw_only=True)
class Small(Variant):
    num_rows: int = 4
    bucket: int = max(BUCKETS)
    max_model_len: int = 64
    num_pages: int = 24
    quantization: Quantization = "none"
    device: str = "auto"

    @property
    def setup(self) -> RunnerSetup:
        return replace(super().setup, quantization=self.quantization, device=self.device)

    @property
    def limits(self) -> EngineLimits:
        limits = super().limits
        if not self.config.recurrent_layers:
            return limits
        return replace(limits, num_state_slots=24, state_snapshot_interval=16)


VARIANTS = {
    "dense": Small(),
    "hybrid": Small(shape="tiny-qwen3.5"),
    "experts": Small(shape="tiny-qwen3-moe"),
    "dense-int8": Small(quantization="int8"),
    "experts-int4": Small(shape="tiny-qwen3-moe", quantization="int4"),
    "dense-int8-kv": Small(dtype="bfloat16", kv_cache_dtype="int8"),
    "windows": Small(shape="tiny-gemma3"),
    "latents": Small(shape="tiny-deepseek-v3"),
    "convolutions": Small(shape="tiny-lfm2"),
    "scans": Small(shape="tiny-granite4"),
    "hybrid-bfloat16": Small(shape="tiny-qwen3.5", dtype="bfloat16"),
}
by_day_variants = pytest.mark.parametrize("name", by_day(VARIANTS, {"dense", "hybrid", "experts"}))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return Lab(folder)


def requests_of(vocab_size: int) -> list[Request]:
    rng = np.random.default_rng(44)
    prompts = [rng.integers(3, vocab_size, length).tolist() for length in (31, 15, 30, 14)]
    prompts.append([*prompts[0], *prompts[1][:4]])
    settings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=3, top_p=0.9),
        SamplingParams(temperature=0.8, seed=4, top_k=20, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, presence_penalty=0.5),
        SamplingParams(temperature=1.0, seed=5),
    ]
    return [
        Request(
            prompt_token_ids=tuple(prompt),
            params=replace(each, max_tokens=4, ignore_eos=True, logprobs=20),
        )
        for prompt, each in zip(prompts, settings, strict=True)
    ]


def alone(lab: Lab, variant: Variant, requests: Sequence[Request]) -> list[Stream]:
    mode = Mode(caching=False, loop="plain")
    return [serve(lab.runner(variant), variant, [each], mode).streams[0] for each in requests]


def assert_same(served: Served, expected: Sequence[Stream]) -> None:
    for index, (stream, own) in enumerate(zip(served.streams, expected, strict=True)):
        assert stream.difference(own) is None, f"request {index}"


def top_logprobs(tokens: Sequence[Token]) -> list[tuple[float, ...]]:
    return [each.logprobs.top_logprobs for each in tokens if each.logprobs is not None]


@by_day_variants
def test_streams_are_bitwise_those_alone_and_have_the_cpus_tokens(
    lab: Lab, library: CudaLibrary, name: str
) -> None:
    variant = replace(VARIANTS[name], ops=FewBuckets(library))
    requests = requests_of(variant.config.vocab_size)
    expected = alone(lab, variant, requests)
    crowded = Mode(num_pages=6, reserved_output=0.0)
    served = serve(lab.runner(variant), variant, requests, crowded)
    assert_same(served, expected)
    assert served.num_preemptions > 0
    ample = serve(lab.runner(variant), variant, requests, Mode(budget=BUCKETS[-1] - 7))
    assert_same(ample, expected)
    assert ample.num_cached_tokens > 0
    on_cpu = alone(lab, replace(variant, ops=NativeOps, device="cpu"), requests)
    # Otherwise other roundings may choose another token.
    is_exact = (variant.dtype, variant.quantization) == ("float32", "none")
    for stream, cpus in zip(expected, on_cpu, strict=True):
        assert not is_exact or stream.token_ids == cpus.token_ids
        ours, theirs = (
            top_logprobs(each.tokens[: None if is_exact else 1]) for each in (stream, cpus)
        )
        np.testing.assert_allclose(ours, theirs, atol=2e-4 if is_exact else 0.1)


@pytest.mark.soak
@pytest.mark.parametrize("name", VARIANTS)
def test_random_streams_are_bitwise_those_alone(lab: Lab, library: CudaLibrary, name: str) -> None:
    replay("seed 9, 24 requests")
    variant = replace(VARIANTS[name], ops=FewBuckets(library))
    requests = [shout(each) for each in random_requests(9, 24, variant, longest_output=12)]
    expected = alone(lab, variant, requests)
    for mode in (Mode(arrival_seed=1), Mode(arrival_seed=2, num_pages=6, reserved_output=0.0)):
        assert_same(serve(lab.runner(variant), variant, requests, mode), expected)
