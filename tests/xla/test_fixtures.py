"""Checkpoints that transformers wrote, against the float32 logits that transformers gives for them.

The step tells the twenty best log probabilities, over both op tables; `ReferenceModel` tells every
logit. All must lie within 1e-4 of the logits' range, at every position, in chunks and one token at
a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from cadenza.backends.base import RunnerSetup
from cadenza.backends.token_choice import NUM_TOP
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.reference_model import ReferenceModel
from cadenza.backends.xla.runner import XlaRunner
from cadenza.backends.xla.tables import MakeOps
from cadenza.batch.step_schema import StepOutput
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineLimits
from cadenza.engine.core import EngineCore
from cadenza.events import Token
from cadenza.models.declaration import declare_final_norm
from cadenza.models.families import FAMILIES
from cadenza.models.layer_kind import LatentShape
from cadenza.models.model_config import ModelConfig
from cadenza.request import Request, SamplingParams
from cadenza.weights.stored_tensor import AnyArray
from cadenza.weights.weights import Weights
from tests.by_day import by_day
from tests.contract.steps import Draw, Geometry, Stream, run_step
from tests.xla.harness import NAN, own_operations

FIXTURES = Path(__file__).parent.parent / "fixtures"
FOLDERS = sorted(path.parent for path in FIXTURES.glob("*/expected.npz"))
TOLERANCE = 1e-4
LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=112,
    page_size=16,
    num_pages=30,
    max_num_queued_reqs=4,
)
# Compiling the reference table for a fixture takes seconds. These have what other layers have; the
# factors of other ropes come from the same place for the native table.
REFERENCE_BY_DAY = {"gemma2-tied", "qwen3-moe-tied-bias"}

# Compiling `ReferenceModel` takes seconds too; these have every trait that any fixture has.
MODEL_BY_DAY = REFERENCE_BY_DAY | {
    "deepseek-v3-untied-yarn",
    "glm4-moe-lite-tied-bias",
    "phi3-tied-partial",
    "gemma3-tied",
    "granite-tied-bias",
    "granite4-moe-untied",
    "lfm2-moe-untied",
    "lfm2-tied",
    "llama-untied-bias-llama3",
    "llama-untied-yarn",
    "gpt-oss-untied-bias",
    "mixtral-untied",
    "olmo2-untied",
    "olmoe-untied",
    "qwen3.5-tied-bias",
    "qwen3.5-moe-untied",
    "smollm3-tied",
    "gemma4-tied",
    "gemma4-moe-tied",
}


def cases() -> Iterator[Any]:
    for folder in FOLDERS:
        yield pytest.param(
            (folder, NativeOps), id=f"{folder.name}-native", marks=pytest.mark.native
        )
        marks = () if folder.name in REFERENCE_BY_DAY else pytest.mark.soak
        yield pytest.param((folder, OpTable), id=f"{folder.name}-reference", marks=marks)


GEOMETRY = Geometry(bucket=32, num_rows=4, page_size=16)


@dataclass(frozen=True, slots=True)
class Fixture:
    """`logits` row i predicts token i + 1 of `token_ids`; from the prompt on, greedily."""

    config: ModelConfig
    weights: Weights
    token_ids: list[int]
    logits: np.ndarray
    num_prompt_tokens: int

    @property
    def tolerance(self) -> float:
        return TOLERANCE * float(np.ptp(self.logits))

    def runner(self, weights: Mapping[str, AnyArray] | Weights, make_ops: MakeOps) -> XlaRunner:
        setup = RunnerSetup(limits=self.limits, fill=NAN)
        return XlaRunner(self.config, weights, setup, make_ops)

    @property
    def limits(self) -> EngineLimits:
        return replace(LIMITS, num_state_slots=12 * self.has_states)

    @property
    def has_states(self) -> bool:
        return self.config.recurrence is not None


def open_fixture(folder: Path) -> Fixture:
    with np.load(folder / "expected.npz", allow_pickle=False) as expected:
        return Fixture(
            named_shape(str(folder)),
            open_checkpoint(folder).weights,
            expected["token_ids"].tolist(),
            expected["logits"],
            int(expected["num_prompt_tokens"]),
        )


@pytest.fixture(scope="module", params=cases())
def case(request: pytest.FixtureRequest) -> tuple[Path, MakeOps]:
    return request.param


@pytest.fixture(scope="module")
def fixture(case: tuple[Path, MakeOps]) -> Fixture:
    return open_fixture(case[0])


@pytest.fixture(scope="module")
def make_ops(case: tuple[Path, MakeOps]) -> MakeOps:
    return case[1]


@pytest.fixture(scope="module")
def warm_runner(fixture: Fixture, make_ops: MakeOps) -> XlaRunner:
    runner = fixture.runner(fixture.weights, make_ops)
    runner.warmup()
    return runner


@pytest.fixture
def runner(warm_runner: XlaRunner) -> XlaRunner:
    warm_runner.reset()
    return warm_runner


# transformers 5.24 does not have the type; its layers are those of `gemma4_text`.
WITHOUT_FIXTURE = {"gemma4_unified_text"}


def test_there_are_fixtures_for_every_family():
    families = {named_shape(str(folder)).family for folder in FOLDERS}
    assert families == FAMILIES.keys() - WITHOUT_FIXTURE


SIZES_AND_NAMES = {
    *("family", "dtype", "eos_token_ids", "vocab_size", "max_position_embeddings"),
    *("num_layers", "hidden_size", "intermediate_size"),
    *("num_heads", "num_kv_heads", "head_dim"),
    *("num_mtp_layers", "mtp_layout"),
}


def traits_of(config: ModelConfig) -> set[tuple[str, object]]:
    traits: set[tuple[str, object]] = {
        ("rope", type(rope.scaling)) for rope in config.ropes if rope
    }
    traits.add(("turns a part", config.rope.rotary_dim < config.head_dim))
    for kind in config.layer_kinds:
        traits.add(("layer", (kind.window is None, kind.has_rope, kind.has_experts)))
        traits.add(("recurrence", type(kind.recurrence)))
        traits.add(("latents", latent_traits(kind.latent)))
    if config.experts is not None:
        traits.add(("experts", (config.experts.over_chosen, config.experts.names)))
        traits.add(("choice", type(config.experts.sigmoid_choice)))
        traits.add(("shared", (config.experts.shared_size > 0, config.experts.has_shared_gate)))
    handled = SIZES_AND_NAMES | {"rope", "window_rope", "layer_pattern", "experts"}
    for each in fields(config):
        if each.name not in handled:
            value = getattr(config, each.name)
            is_set = value != each.default if isinstance(value, float) else value
            traits.add((each.name, is_set))
    return traits


def latent_traits(shape: LatentShape | None) -> tuple[bool, bool] | None:
    return None if shape is None else (shape.query_rank is None, shape.pairs_neighbours)


def all_traits(names: set[str]) -> set[tuple[str, object]]:
    return set().union(*(traits_of(named_shape(str(FIXTURES / name))) for name in names))


def test_the_fixtures_of_every_day_have_the_traits_of_all():
    everything = all_traits({folder.name for folder in FOLDERS})
    assert all_traits(MODEL_BY_DAY) == everything
    assert all_traits(MODEL_BY_DAY - {"smollm3-tied"}) != everything


def error_of(output: StepOutput, logits: np.ndarray) -> float:
    exact = log_softmax(logits.astype(np.float64))
    top_ids, top = output.top_ids[0], output.top_logprobs[0]
    falling = np.sort(exact)[::-1][:NUM_TOP]
    return float(
        max(
            np.abs(top - exact[top_ids]).max(),
            np.abs(top - falling).max(),
            abs(output.logprobs[0] - exact[output.token_ids[0]]),
        )
    )


def step_errors(runner: XlaRunner, fixture: Fixture, chunk: int) -> list[float]:
    stream = Stream(
        row=2,
        pages=[9, 3, 4, 8, 1, 20, 21],
        draw=Draw(num_logprobs=NUM_TOP),
        state_slots=(1, 0) if fixture.has_states else (),
    )
    errors: list[float] = []
    for start in range(0, len(fixture.logits), chunk):
        tokens = fixture.token_ids[start : start + chunk][: len(fixture.logits) - start]
        output = run_step(runner, [stream.chunk(tokens, samples=True)], GEOMETRY)
        errors.append(error_of(output, fixture.logits[start + len(tokens) - 1]))
    return errors


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_the_steps_log_probabilities_are_transformers(
    runner: XlaRunner, fixture: Fixture, chunk: int
):
    assert max(step_errors(runner, fixture, chunk)) <= fixture.tolerance


def test_greedy_streams_are_transformers(runner: XlaRunner, fixture: Fixture):
    count = fixture.num_prompt_tokens
    num_new = len(fixture.token_ids) - count
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    engine = EngineCore(runner, fixture.limits)
    prompts = [fixture.token_ids[:count], fixture.token_ids[5:30], fixture.token_ids[:count]]
    ids = [
        engine.submit(Request(prompt_token_ids=tuple(prompt), params=params)) for prompt in prompts
    ]
    streams: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while not engine.is_idle:
        for event in engine.step():
            if isinstance(event, Token):
                streams[event.request_id].append(event.token_id)
    assert streams[ids[0]] == fixture.token_ids[count:]
    assert streams[ids[2]] == fixture.token_ids[count:]


@pytest.mark.parametrize("name", by_day([folder.name for folder in FOLDERS], MODEL_BY_DAY))
def test_the_reference_models_logits_are_transformers(name: str):
    """One by one, and behind a prompt at once, which is another program."""
    fixture = open_fixture(FIXTURES / name)
    model = ReferenceModel(fixture.config, fixture.weights, LIMITS.max_model_len)
    count = fixture.num_prompt_tokens
    for num_first in {1, count} if name in REFERENCE_BY_DAY else {1}:
        model.start()
        rows = [model.append(fixture.token_ids[:num_first])]
        rows += [
            model.append([each]) for each in fixture.token_ids[num_first : len(fixture.logits)]
        ]
        error = np.abs(np.array(rows) - fixture.logits[num_first - 1 :]).max()
        assert error <= fixture.tolerance


def test_a_native_step_leaves_nothing_heavy_to_xla(
    runner: XlaRunner, fixture: Fixture, make_ops: MakeOps
):
    """An operation of its own on an array as large as the residual stream would be one that no
    kernel computes; the reference table consists of them."""
    text = runner.programs.step[LIMITS.max_num_batched_tokens].as_text()
    found = own_operations(text, LIMITS.max_num_batched_tokens * fixture.config.hidden_size)
    assert bool(found) == (make_ops is OpTable), found


class SpoiltWeights(Mapping[str, AnyArray]):
    def __init__(self, fixture: Fixture) -> None:
        self._weights = fixture.weights
        self._spoilt = declare_final_norm(fixture.config).name

    def __getitem__(self, name: str) -> AnyArray:
        tensor = np.array(self._weights[name])
        if name == self._spoilt:
            tensor[0] += 0.02 * np.abs(tensor).max()
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def test_a_slightly_wrong_weight_is_beyond_the_tolerance(
    runner: XlaRunner, fixture: Fixture, make_ops: MakeOps
):
    spoilt = fixture.runner(SpoiltWeights(fixture), make_ops)
    spoilt._programs = runner.programs
    spoilt.reset()
    assert max(step_errors(spoilt, fixture, 7)) > fixture.tolerance
