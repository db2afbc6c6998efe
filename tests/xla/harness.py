"""What the XLA suites share: shapes, compiled runners, and engines run over lists of requests.

Owns the hostile shape (grouped heads, odd vocabulary, three layers, rope beyond its threshold) and
the reading of a runner's pages. A runner is compiled once a session for each `Variant` and reset
between tests; `BASE` runs on the op table that serves here, which compiles in a fifth of the time
of the reference table (`REFERENCE`). Replays: every workload is a function of its seed, which its
test's name shows.
"""

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from cadenza.backends.base import Runner, RunnerSetup
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.native_library import has_native_library
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import KVPool
from cadenza.backends.xla.reference_model import ReferenceModel
from cadenza.backends.xla.runner import XlaRunner
from cadenza.backends.xla.tables import MakeOps
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineLimits, KVCacheDType, SchedulerLoop
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.page_folder import PageFolder
from cadenza.events import Finished, Token
from cadenza.models.model_config import ModelConfig
from cadenza.models.rope_config import Llama3RopeScaling, RopeConfig
from cadenza.request import Request, SamplingParams
from cadenza.verification.reference import ReferenceEngine
from cadenza.weights.weight_format import WeightDType
from cadenza.weights.weights import Weights
from tests.checkpoint.config_writer import write_random_checkpoint

HOSTILE = ModelConfig(
    family="llama",
    vocab_size=211,
    hidden_size=40,
    intermediate_size=56,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(
        theta=10_000.0,
        rotary_dim=16,
        scaling=Llama3RopeScaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    has_qkv_bias=True,
    has_attention_out_bias=True,
    has_mlp_bias=True,
    max_position_embeddings=4096,
    dtype="float32",
    eos_token_ids=(2,),
)
NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One compiled runner. `bucket` is T; budgets below it are the scheduler's to choose."""

    shape: str = "hostile"
    dtype: WeightDType = "float32"
    kv_cache_dtype: KVCacheDType = "auto"
    num_rows: int = 8
    bucket: int = 64
    max_model_len: int = 320
    page_size: int = 16
    num_pages: int = 96
    fill: float = NAN
    ops: MakeOps = NativeOps if has_native_library() else OpTable

    @property
    def config(self) -> ModelConfig:
        return config_of(self.shape)

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(
            max_num_seqs=self.num_rows,
            max_num_batched_tokens=self.bucket,
            max_model_len=self.max_model_len,
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_num_queued_reqs=10_000,
        )

    @property
    def setup(self) -> RunnerSetup:
        return RunnerSetup(
            limits=self.limits, dtype=self.dtype, kv_cache_dtype=self.kv_cache_dtype, fill=self.fill
        )


def config_of(shape: str) -> ModelConfig:
    for count, words in enumerate(("one layer of ", "two layers of "), 1):
        if shape.startswith(words):
            return replace(config_of(shape.removeprefix(words)), num_layers=count)
    return HOSTILE if shape == "hostile" else named_shape(shape)


BASE = Variant()
REFERENCE = Variant(shape="one layer of hostile", ops=OpTable)


class Lab:
    """Checkpoints and runners of one test session, made on demand and kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runners: dict[str, XlaRunner] = {}
        self._references: dict[tuple[str, int], ReferenceModel] = {}
        self.solo_streams: dict[tuple[str, Request], Stream] = {}

    def weights(self, shape: str) -> Weights:
        folder = self._folder / shape
        if not folder.exists():
            write_random_checkpoint(config_of(shape), folder, seed=0, dtype="float32")
        return open_checkpoint(folder).weights

    def runner(self, variant: Variant = BASE) -> XlaRunner:
        """A warm runner with fresh pages."""
        runner = self._runners.get(repr(variant))
        if runner is None:
            runner = XlaRunner(
                variant.config, self.weights(variant.shape), variant.setup, variant.ops
            )
            runner.warmup()
            self._runners[repr(variant)] = runner
        runner.reset()
        return runner

    def runner_with(
        self, weights: Weights, model: ModelConfig = HOSTILE, variant: Variant = BASE
    ) -> XlaRunner:
        runner = XlaRunner(model, weights, variant.setup, variant.ops)
        runner._programs = self.runner(variant).programs
        runner.reset()
        return runner

    def reference_model(self, variant: Variant = BASE) -> ReferenceModel:
        key = (variant.shape, variant.max_model_len)
        if key not in self._references:
            self._references[key] = ReferenceModel(
                variant.config, self.weights(variant.shape), variant.max_model_len
            )
        return self._references[key]

    def reference(self, variant: Variant = BASE) -> ReferenceEngine:
        return ReferenceEngine(
            self.reference_model(variant),
            max_model_len=variant.max_model_len,
            eos_token_ids=variant.config.eos_token_ids,
        )


@dataclass(slots=True, eq=False)
class Stream:
    tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)

    @property
    def finish_reason(self) -> str | None:
        return self.finished.finish_reason if self.finished else None

    def difference(self, other: "Stream") -> str | None:
        for index, (ours, theirs) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if (ours.token_id, ours.logprobs) != (theirs.token_id, theirs.logprobs):
                return f"token {index}: {ours} against {theirs}"
        ends = [(stream.finish_reason, len(stream.tokens)) for stream in (self, other)]
        return None if ends[0] == ends[1] else f"ended {ends[0]} against {ends[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How a workload is served. `budget` and `num_pages` below the runner's are its own choice."""

    budget: int | None = None
    num_pages: int | None = None
    loop: SchedulerLoop = "overlap"
    caching: bool = True
    reserved_output: float = 0.5
    arrival_seed: int | None = None
    page_folder: PageFolder | None = None

    def limits(self, limits: EngineLimits) -> EngineLimits:
        return replace(
            limits,
            max_num_batched_tokens=self.budget or limits.max_num_batched_tokens,
            num_pages=self.num_pages or limits.num_pages,
            enable_prefix_caching=self.caching,
        )

    def arrivals(self, count: int) -> list[int]:
        """The step before which each request comes: all at once, or one by one at random."""
        if self.arrival_seed is None:
            return [0] * count
        gaps = np.random.default_rng(self.arrival_seed).integers(0, 6, count)
        return np.cumsum(gaps).tolist()


@dataclass(slots=True, eq=False)
class Served:
    streams: list[Stream]
    engine: EngineCore
    num_steps: int = 0
    num_admitted_midstream: int = 0

    @property
    def num_preemptions(self) -> int:
        return self.engine.scheduler.num_preemptions

    @property
    def num_cached_tokens(self) -> int:
        return sum(s.finished.num_cached_tokens for s in self.streams if s.finished)


def serve(
    runner: Runner, variant: Variant, requests: Sequence[Request], mode: Mode | None = None
) -> Served:
    """Serves a workload to its end; the engine's books must balance after every step."""
    mode = mode or Mode()
    engine = new_engine(runner, variant, mode)
    served = Served([Stream() for _ in requests], engine)
    coming = sorted(zip(mode.arrivals(len(requests)), range(len(requests)), strict=True))
    index_of: dict[int, int] = {}
    while coming or not engine.is_idle:
        while coming and (coming[0][0] <= served.num_steps or engine.is_idle):
            _, index = coming.pop(0)
            index_of[engine.submit(requests[index])] = index
        decoding = {s.request_id for s in engine.scheduler.running if s.num_generated_tokens}
        known = {s.request_id for s in engine.scheduler.running}
        take_events(engine, served, index_of)
        admitted = {s.request_id for s in engine.scheduler.running} - known
        served.num_admitted_midstream += len(admitted) if decoding else 0
        engine.check_invariants()
        served.num_steps += 1
        assert served.num_steps < 100_000, "the workload does not end"
    return served


def new_engine(runner: Runner, variant: Variant, mode: Mode) -> EngineCore:
    options = CoreOptions(
        eos_token_ids=frozenset(variant.config.eos_token_ids),
        loop=mode.loop,
        reserved_output=mode.reserved_output,
        secret=b"test",
        page_folder=mode.page_folder,
    )
    return EngineCore(runner, mode.limits(variant.limits), options)


def take_events(engine: EngineCore, served: Served, index_of: dict[int, int]) -> None:
    for event in engine.step():
        stream = served.streams[index_of[event.request_id]]
        assert stream.finished is None, f"{event} came after {stream.finished}"
        if isinstance(event, Finished):
            stream.finished = event
        elif isinstance(event, Token):
            assert event.index == len(stream.tokens), f"{event} is out of order"
            stream.tokens.append(event)


def serve_alone(lab: Lab, variant: Variant, request: Request) -> Stream:
    """The request's stream with nobody else in the engine; remembered."""
    key = (repr(variant), request)
    if key not in lab.solo_streams:
        mode = Mode(caching=False, loop="plain")
        lab.solo_streams[key] = serve(lab.runner(variant), variant, [request], mode).streams[0]
    return lab.solo_streams[key]


def random_requests(
    seed: int, count: int, variant: Variant, *, longest_output: int = 24
) -> list[Request]:
    rng = np.random.default_rng(seed)
    vocab_size = variant.config.vocab_size
    longest = variant.max_model_len - longest_output
    heads = [rng.integers(3, vocab_size, longest).tolist() for _ in range(3)]
    requests: list[Request] = []
    for _ in range(count):
        request = _random_request(rng, heads, longest, vocab_size)
        max_tokens = int(rng.integers(1, longest_output + 1))
        requests.append(replace(request, params=replace(request.params, max_tokens=max_tokens)))
    return requests


def _random_request(
    rng: np.random.Generator, heads: list[list[int]], longest: int, vocab_size: int
) -> Request:
    length = int(rng.integers(1, rng.choice([8, min(40, longest), longest + 1])))
    shared = int(rng.integers(0, length)) if rng.random() < 0.5 else 0
    prompt = heads[rng.integers(3)][:shared]
    prompt += rng.integers(3, vocab_size, length - shared).tolist()
    sampled = rng.random() < 0.6
    params = SamplingParams(
        temperature=float(rng.choice([0.3, 0.7, 1.0, 1.8])) if sampled else 0.0,
        top_k=int(rng.choice([0, 0, 1, 5, 40, 5000])),
        top_p=float(rng.choice([1.0, 1.0, 0.95, 0.5, 0.01])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 0.5])),
        top_n_sigma=(0.0, 0.0, 0.5, 1.5)[length % 4],
        seed=int(rng.integers(0, 1 << 62)),
        ignore_eos=bool(rng.random() < 0.7),
        logprobs=[None, 0, 3, 20][rng.integers(4)],
    )
    return Request(prompt_token_ids=tuple(prompt), params=params)


def shout(request: Request) -> Request:
    return replace(request, params=replace(request.params, logprobs=20))


@cache
def places_of_slots(shape: tuple[int, ...], itemsize: int, *, are_keys: bool) -> np.ndarray:
    """Where the elements of each slot lie in a flat side of a pool of floats: [slots, elements].

    The native table has [pages, layers, Hkv, page_size, D], in which each block of 16 tokens has
    keys as [D/step][16][step] and values as [16/step][D][step]; the reference table has slots in
    front.
    """
    places = np.arange(np.prod(shape))
    if len(shape) == 4:
        return places.reshape(shape[0], -1)
    *outer, page_size, width = shape
    step, num_blocks = 4 // itemsize, page_size // 16
    if are_keys:
        by_block = places.reshape(*outer, num_blocks, width // step, 16, step)
        by_slot = by_block.transpose(0, 3, 5, 1, 2, 4, 6)
    else:
        by_block = places.reshape(*outer, num_blocks, 16 // step, width, step)
        by_slot = by_block.transpose(0, 3, 4, 6, 1, 2, 5)
    return by_slot.reshape(shape[0] * page_size, -1)


def slots_of_pool(runner: XlaRunner) -> list[np.ndarray]:
    assert runner._state is not None
    return [
        np.asarray(side).ravel()[places_of_slots(side.shape, side.itemsize, are_keys=index == 0)]
        for index, side in enumerate(runner._state.pools.kv[0])
    ]


def page_bytes(runner: XlaRunner) -> np.ndarray:
    return np.concatenate([side.view(np.uint8) for side in slots_of_pool(runner)], axis=1)


def slots_of(pages: Iterable[int], num_tokens: int, page_size: int) -> np.ndarray:
    positions = np.arange(num_tokens)
    return np.array(list(pages))[positions // page_size] * page_size + positions % page_size


def poison(runner: XlaRunner, owned: np.ndarray, value: float) -> None:
    """Overwrites every slot that is not owned, in every layer, between two steps."""
    assert runner._state is not None
    state = runner._state

    def spoil(index: int, side: jax.Array) -> jax.Array:
        places = places_of_slots(side.shape, side.itemsize, are_keys=index == 0)[owned]
        content = np.asarray(side).ravel()
        is_bits = side.dtype == np.uint16  # of bfloat16, in the native table
        bits = np.array(value, ml_dtypes.bfloat16).view(np.uint16) if is_bits else value
        spoilt = np.full(side.size, bits, side.dtype)
        spoilt[places] = content[places]
        return jax.device_put(spoilt.reshape(side.shape), side.sharding)

    (pool,) = state.pools.kv
    spoilt = state.pools.with_kv(0, KVPool(*map(spoil, range(2), pool)))
    runner._state = state._replace(pools=spoilt)


_RESULT = re.compile(r"= (\w+)\[([\d,]*)\]\S* ([\w-]+)\(")
_MOVES_NOTHING = {"parameter", "get-tuple-element", "bitcast", "custom-call", "tuple"}


def own_operations(program_text: str, num_elements: int) -> list[str]:
    """XLA's operations in a compiled program with results of at least so many elements."""
    entry = program_text[program_text.index("\nENTRY") :]
    return [
        f"{operation} {kind}[{sizes}]"
        for kind, sizes, operation in _RESULT.findall(entry)
        if math.prod(int(size) for size in sizes.split(",") if size) >= num_elements
        and operation not in _MOVES_NOTHING
    ]


def replay(workload: str) -> None:
    """Prints, where pytest shows it for a failed test, what was run and how to run it again."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    print(f"{workload}; replay: python -m pytest -m '' '{test}'")
