"""Random hybrids: any mixture of layers, served anyhow, gives each stream the bits it has alone.

A seed decides the model (mixers, heads, windows, experts), the limits and the requests, which are
served with and without drafts, in a tight pool, and from pages and states on a disk. The first seed
runs every day, 200 in `make soak`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cadenza.backends.xla.runner import XlaRunner
from cadenza.config import EngineLimits
from cadenza.engine.page_folder import PageFolder
from cadenza.models.layer_kind import (
    ConvShape,
    DeltaShape,
    HeadShape,
    LayerKind,
    Recurrence,
    ScanShape,
)
from cadenza.models.model_config import ExpertsConfig, ModelConfig
from cadenza.models.rope_config import RopeConfig
from cadenza.request import Request
from cadenza.weights.weights import open_weights
from tests.by_day import by_day
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.xla.harness import Mode, Served, Stream, Variant, random_requests, serve

NUM_MODELS = 200
BY_DAY = {0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid(Variant):
    """A variant of a model that has no name; `spare` slots are there beside two a row."""

    model: ModelConfig
    spare: int

    @property
    def config(self) -> ModelConfig:
        return self.model

    @property
    def limits(self) -> EngineLimits:
        limits = EngineLimits(
            max_num_seqs=self.num_rows,
            max_num_batched_tokens=self.bucket,
            max_model_len=self.max_model_len,
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_num_queued_reqs=10_000,
        )
        return replace(limits, num_state_slots=2 * self.num_rows + self.spare)


def random_recurrence(rng: np.random.Generator) -> Recurrence:
    sizes = (16, 32, 48)
    groups, heads = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    num_inputs = int(rng.integers(2, 6))
    match rng.integers(4):
        case 0:
            return ConvShape(num_channels=48, num_inputs=num_inputs, has_bias=bool(rng.integers(2)))
        case 1:
            return ScanShape(
                num_heads=groups * heads,
                num_groups=groups,
                key_size=int(rng.choice(sizes)),
                value_size=int(rng.choice(sizes)),
                num_inputs=num_inputs,
                has_conv_bias=bool(rng.integers(2)),
            )
        case _:
            return DeltaShape(
                num_key_heads=groups,
                num_value_heads=groups * heads,
                key_size=int(rng.choice(sizes)),
                value_size=int(rng.choice(sizes)),
                num_inputs=num_inputs,
                is_tiled=bool(rng.integers(2)),
            )


def random_kind(rng: np.random.Generator, recurrence: Recurrence, *, is_first: bool) -> LayerKind:
    has_experts = bool(rng.random() < 0.3)
    if not is_first and rng.random() < 0.6:
        return LayerKind(recurrence=recurrence, has_experts=has_experts)
    kv_heads = int(rng.integers(1, 3))
    heads = HeadShape(
        num_heads=kv_heads * int(rng.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_dim=int(rng.choice([16, 32, 80])),
    )
    return LayerKind(
        window=int(rng.integers(5, 90)) if rng.random() < 0.4 else None,
        has_rope=bool(rng.random() < 0.8),
        has_experts=has_experts,
        heads=heads if rng.random() < 0.5 else None,
    )


def random_model(rng: np.random.Generator) -> ModelConfig:
    recurrence, num_layers = random_recurrence(rng), int(rng.integers(2, 6))
    kinds = [random_kind(rng, recurrence, is_first=place == 0) for place in range(num_layers)]
    if all(kind.recurrence is None for kind in kinds):
        kinds[-1] = LayerKind(recurrence=recurrence)
    experts = ExpertsConfig(
        num_experts=int(rng.integers(2, 7)),
        num_chosen=2,
        intermediate_size=24,
        over_chosen=bool(rng.integers(2)),
        shared_size=int(rng.choice([0, 20])),
    )
    rope = RopeConfig(theta=10_000.0, rotary_dim=16, scaling=None)
    return ModelConfig(
        family="qwen3_5_text",
        vocab_size=int(rng.integers(60, 300)),
        hidden_size=48,
        intermediate_size=56,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=rope,
        layer_pattern=tuple(kinds),
        experts=experts if any(kind.has_experts for kind in kinds) else None,
        qk_norm="head" if rng.random() < 0.5 else None,
        has_post_norms=bool(rng.random() < 0.2) and not any(kind.has_experts for kind in kinds),
        norm_adds_one=bool(rng.integers(2)),
        tie_word_embeddings=bool(rng.integers(2)),
        max_position_embeddings=4096,
        dtype="float32",
        eos_token_ids=(2,),
    )


@dataclass(frozen=True, slots=True)
class Workload:
    runner: XlaRunner
    variant: Hybrid
    requests: list[Request]
    alone: list[Stream]

    @classmethod
    def of(cls, runner: XlaRunner, variant: Hybrid, seed: int) -> "Workload":
        requests, alone = random_requests(seed, 10, variant), list[Stream]()
        for request in requests:
            runner.reset()
            alone += serve(runner, variant, [request], Mode(caching=False, loop="plain")).streams
        again = slice(4)  # the same prompts once more, which hit
        return cls(runner, variant, requests + requests[again], alone + alone[again])

    def check(self, mode: Mode, *, drafts: np.random.Generator | None = None) -> Served:
        """Serves all; with drafts, most of them with a prediction that is wrong in places."""
        self.runner.reset()
        requests = self.requests if drafts is None else self._predicted(drafts)
        served = serve(self.runner, self.variant, requests, mode)
        differing = {
            index: difference
            for index, (stream, alone) in enumerate(zip(served.streams, self.alone, strict=True))
            if (difference := stream.difference(alone))
        }
        assert not differing, f"{self.variant.model}: {differing}"
        return served

    def _predicted(self, rng: np.random.Generator) -> list[Request]:
        def guess(stream: Stream) -> tuple[int, ...]:
            wrong = rng.choice([0, 2, 4, 7])  # the place in each eight tokens
            ids = enumerate(stream.token_ids)
            return tuple(max(3, each - 1) if at % 8 == wrong else each for at, each in ids)

        pairs = zip(self.requests, self.alone, strict=True)
        return [
            replace(request, prediction=guess(stream)) if rng.random() < 0.8 else request
            for request, stream in pairs
        ]


@pytest.mark.native
@pytest.mark.parametrize("seed", by_day(list(range(NUM_MODELS)), BY_DAY))
def test_a_random_hybrid_gives_each_stream_the_bits_that_it_has_alone(tmp_path: Path, seed: int):
    rng = np.random.default_rng([42, seed])
    variant = Hybrid(
        model=random_model(rng),
        dtype="float32" if rng.random() < 0.5 else "bfloat16",
        bucket=int(rng.choice([8, 33, 64])),
        num_pages=int(rng.integers(40, 97)),
        spare=int(rng.integers(0, 12)),
        page_size=int(rng.choice([16, 32])),
    )
    write_random_checkpoint(variant.model, tmp_path / "model", seed=seed, dtype="float32")
    setup = replace(variant.setup, capabilities=frozenset({"page_copies"}))
    runner = XlaRunner(variant.model, open_weights(tmp_path / "model"), setup, variant.ops)
    runner.warmup()
    workload = Workload.of(runner, variant, seed)
    tight = Mode(budget=variant.num_rows, loop="plain", num_pages=variant.num_pages // 2 + 10)
    workload.check(Mode(arrival_seed=seed))
    workload.check(tight)
    drafted = workload.check(Mode(arrival_seed=seed), drafts=rng).engine.draft_counts
    assert drafted.num_draft_tokens > 0
    assert seed not in BY_DAY or 0 < drafted.num_accepted_tokens < drafted.num_draft_tokens
    workload.check(tight, drafts=rng)
    for is_first in (True, False):
        folder = PageFolder(tmp_path / "pages", "one model", 1 << 28)
        stored = workload.check(replace(tight, page_folder=folder)).engine.stored_pages
        assert stored is not None
        assert is_first or stored.counts.num_read > 0
        stored.close()
    runner.close()
