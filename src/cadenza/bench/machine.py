"""This machine: what it is, the rates it reaches, each the best of its runs, and the bounds that
follow for a model (`ModelCost`). Invariant: the description holds neither the machine's name nor
its user's."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, Self

import numpy as np

import cadenza
from cadenza.backends.base import Instruments, ProductDType
from cadenza.checkpoint.tensor_formats import StoredFormat, stored_bytes
from cadenza.config import KVCacheDType, Quantization
from cadenza.models.declaration import declare
from cadenza.models.model_config import ModelConfig
from cadenza.models.operations import expert_tensors, head_tensor, mixtures_of, pair_operations
from cadenza.weights.tensor_spec import TensorSpec, tensors_of
from cadenza.weights.weight_format import WeightDType

Limit = Literal["read", "multiply"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The machine's highest rates, and how they were measured (`native` or `numpy`)."""

    read_gb_s: float
    gflop_s: float
    dtype: str
    method: str

    @classmethod
    def median_of(cls, found: Sequence["Roofline"]) -> Self:
        return cls(
            read_gb_s=statistics.median(each.read_gb_s for each in found),
            gflop_s=statistics.median(each.gflop_s for each in found),
            dtype=found[0].dtype,
            method=found[0].method,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes that have to be read, and operations."""

    read_bytes: float
    operations: float

    def bound_s(self, roofline: Roofline) -> float:
        return max(self._read_s(roofline), self._multiply_s(roofline))

    def limit(self, roofline: Roofline) -> Limit:
        return "read" if self._read_s(roofline) >= self._multiply_s(roofline) else "multiply"

    def _read_s(self, roofline: Roofline) -> float:
        return self.read_bytes / (roofline.read_gb_s * 1e9)

    def _multiply_s(self, roofline: Roofline) -> float:
        return self.operations / (roofline.gflop_s * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts of one length, computed in steps of a token budget."""

    count: int
    length: int
    token_budget: int

    @property
    def num_tokens(self) -> int:
        return self.count * self.length

    @property
    def step_sizes(self) -> list[int]:
        whole, rest = divmod(self.num_tokens, self.token_budget)
        return [self.token_budget] * whole + [rest] * (rest > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsCost:
    """The experts' part of a model's cost; sizes are of one expert in all its layers."""

    parameters: int
    num_bytes: int
    num_experts: int
    num_chosen: int

    @property
    def token_parameters(self) -> int:
        return self.num_chosen * self.parameters

    def read_by(self, num_tokens: int) -> float:
        """Bytes of weights that a step reads on average: of X experts of a layer where a token
        chooses A evenly, X (1 - (1 - A / X)^T). Where tokens choose alike a step reads less, and a
        share of the bound can exceed 100 %."""
        unchosen = (1 - self.num_chosen / self.num_experts) ** num_tokens
        return self.num_experts * (1 - unchosen) * self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """A model's part of the bound: the matrix products' weights once a step, the KV of the rows'
    contexts, recurrent states, and the operations of products and attention (a multiplication
    and its sum are two). Norms, biases, activations, recurrences and embedding rows, below one
    per cent together, are not counted. In a mixture a step reads each distinct expert that its
    tokens choose once: those that a run touched, where the kernels counted them, else as
    `read_by` says."""

    layer_parameters: int  # of all layers' matrix products, without the experts'
    head_parameters: int  # of the vocabulary head, or of the embedding that is tied to it
    pair_operations: int  # attention of one query and one token of its context, in all layers
    layer_bytes: int  # layer_bytes, head_bytes: of their weights as they are held in memory
    head_bytes: int
    kv_bytes_per_token: int  # one token's keys and values in all layers
    state_bytes: int = 0  # the recurrent state of a sequence
    experts: ExpertsCost | None = None
    # The part of the layers' that the kernels count with the experts: MLPs for all tokens that
    # have a gate.
    gated_bytes: int = 0

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: WeightDType,
        quantization: Quantization = "none",
        stored_format: StoredFormat = lambda _: None,
        *,
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> Self:
        """With quantised weights and KV, or a checkpoint's stored formats."""
        size = partial(
            stored_bytes, dtype=dtype, quantization=quantization, stored_format=stored_format
        )
        experts, head = expert_tensors(config), head_tensor(config)
        apart = {spec.name for expert in experts for spec in expert}
        layers = [
            spec
            for spec in declare(config)
            if spec.kind in ("linear", "router") and spec.name not in apart
        ]
        return cls(
            layer_parameters=sum(spec.num_elements for spec in layers),
            layer_bytes=size(layers),
            experts=_experts_cost(config, experts, size),
            head_parameters=head.num_elements,
            head_bytes=size([head]),
            pair_operations=pair_operations(config),
            kv_bytes_per_token=config.kv_bytes_per_token(dtype, kv_cache_dtype),
            state_bytes=config.state_bytes(dtype),
            gated_bytes=size(_gated_tensors(config)),
        )

    def weight_bytes(self, num_tokens: int, touched_bytes: float | None = None) -> float:
        """`touched_bytes`: of the experts that a step touched, if they were counted."""
        if touched_bytes is None:
            touched_bytes = self.experts.read_by(num_tokens) if self.experts else 0
        else:
            touched_bytes -= self.gated_bytes
        return self.layer_bytes + touched_bytes + self.head_bytes

    @property
    def token_parameters(self) -> int:
        return self.layer_parameters + (self.experts.token_parameters if self.experts else 0)

    def decode_step(self, rows: int, context: float, touched_bytes: float | None = None) -> Cost:
        """One token for each row; `context`: average KV length with its own."""
        parameters = self.token_parameters + self.head_parameters
        return Cost(
            read_bytes=self.weight_bytes(rows, touched_bytes)
            + rows * (context * self.kv_bytes_per_token + self.state_bytes),
            operations=rows * (2 * parameters + context * self.pair_operations),
        )

    def prefill(self, prompts: Prompts) -> Cost:
        """All steps together; the head is applied once a prompt and read once a step."""
        pairs = prompts.count * prompts.length * (prompts.length + 1) // 2
        return Cost(
            read_bytes=sum(map(self.weight_bytes, prompts.step_sizes))
            + prompts.num_tokens * self.kv_bytes_per_token
            + prompts.count * self.state_bytes,
            operations=2 * self.token_parameters * prompts.num_tokens
            + 2 * self.head_parameters * prompts.count
            + pairs * self.pair_operations,
        )


def _gated_tensors(config: ModelConfig) -> list[TensorSpec]:
    """Of the MLPs for all tokens that have a gate."""
    return [
        spec
        for mlp in mixtures_of(config)
        if mlp.shared is not None and mlp.shared_gate is not None
        for spec in tensors_of(mlp.shared)
    ]


def _experts_cost(
    config: ModelConfig, experts: list[list[TensorSpec]], size: Callable[[list[TensorSpec]], int]
) -> ExpertsCost | None:
    if config.experts is None or not experts:
        return None
    return ExpertsCost(
        parameters=sum(spec.num_elements for spec in experts[0]),
        num_bytes=size(experts[0]),
        num_experts=config.experts.num_experts,
        num_chosen=config.experts.num_chosen,
    )


REPEATS = 15  # runs of a measurement by `cadenza bench roofline`

MIN_BUFFER_BYTES = 256 << 20
CACHES = 8  # the buffer is at least this many times the largest cache

_BLOCK_BYTES = 1 << 20
_MAX_BUFFER_BYTES = 4 << 30
_CACHE_SIZES = "devices/system/cpu/cpu0/cache"
_CPU_INFO = Path("/proc/cpuinfo")
_MATRIX = 1024


def describe_machine(instruments: Instruments | None) -> dict[str, object]:
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": num_usable_cores(),
        "threads": None if instruments is None else instruments.num_threads,
        "isa": None if instruments is None else instruments.cpu_isa,
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": _version("jax"),
        "cadenza": cadenza.__version__,
    }


def cpu_name(cpu_info: Path = _CPU_INFO) -> str:
    try:
        lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()


def num_usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class RooflineProbe:
    """Measures with all threads; keeps its buffer, so that repeats are short."""

    def __init__(self, instruments: Instruments | None, dtype: ProductDType) -> None:
        self._instruments = instruments
        self._dtype: ProductDType = dtype
        self._buffer = None if instruments is None else instruments.new_buffer(buffer_bytes())

    def measure(self, repeats: int = REPEATS) -> Roofline:
        """With numpy where there are no native kernels."""
        if self._instruments is None or self._buffer is None:
            return _measure_in_numpy(repeats)
        read = self._instruments.read_bytes_per_s(self._buffer, repeats=repeats)
        multiply = self._instruments.operations_per_s(self._dtype, repeats=repeats)
        return Roofline(
            read_gb_s=read / 1e9, gflop_s=multiply / 1e9, dtype=self._dtype, method="native"
        )


def buffer_bytes() -> int:
    """Well beyond the last-level cache, a multiple of the kernels' block."""
    wanted = max(MIN_BUFFER_BYTES, CACHES * largest_cache_bytes())
    return min(wanted, _MAX_BUFFER_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES


def largest_cache_bytes(system: Path = Path("/sys")) -> int:
    """Of the first core; 0 where the system does not list caches."""
    sizes = [0]
    for path in (system / _CACHE_SIZES).glob("index*/size"):
        text = path.read_text().strip()
        number, unit = text.rstrip("KMG"), text[-1:]
        if number.isdecimal():
            sizes.append(int(number) << {"K": 10, "M": 20, "G": 30}.get(unit, 0))
    return max(sizes)


def _measure_in_numpy(repeats: int) -> Roofline:
    """A lower estimate: reductions in threads, and numpy's own float32 product."""
    threads = num_usable_cores()
    data = np.ones(buffer_bytes() // 8, np.int64)
    parts = np.array_split(data, threads)
    left, right = (np.ones((_MATRIX, _MATRIX), np.float32) for _ in range(2))
    with ThreadPoolExecutor(threads) as pool:
        read_s = _best_s(lambda: list(pool.map(np.bitwise_xor.reduce, parts)), repeats)
    multiply_s = _best_s(lambda: left @ right, repeats)
    return Roofline(
        read_gb_s=data.nbytes / read_s / 1e9,
        gflop_s=2 * _MATRIX**3 / multiply_s / 1e9,
        dtype="float32",
        method="numpy",
    )


def _best_s(action: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best
