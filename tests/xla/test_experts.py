"""Mixtures of experts: a row does not know who else chose its experts, whoever they are.

The routers are as drawn, or send every token to the same experts, or nearly to one alone that
differs from token to token; or a neighbour's numbers are not finite. Legend as in `ops.table`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.token_choice import COLUMN_STATE, STATE_CHOSEN
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, ExpertChoice, Linear
from cadenza.backends.xla.runner import XlaRunner
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.models.declaration import EMBEDDING
from cadenza.weights.stored_tensor import AnyArray
from cadenza.weights.weights import Weights
from tests.by_day import by_day
from tests.contract.steps import Chunk, Draw, Geometry, Stream, build_inputs, run_step
from tests.xla.harness import BASE, Lab, Variant

SHAPE = "tiny-olmoe"
CONFIG = named_shape(SHAPE)
VARIANT = replace(BASE, shape=SHAPE, max_model_len=96, num_pages=48)
REFERENCE = replace(VARIANT, shape=f"one layer of {SHAPE}", ops=OpTable)
GEOMETRY = Geometry(bucket=VARIANT.bucket, num_rows=VARIANT.num_rows, page_size=VARIANT.page_size)
PROMPT = np.random.default_rng(71).integers(3, 331, 21).tolist()
CURSED_TOKEN = 2
NUM_DECODES = 4
DRAW = Draw(temperature=0.8, seed=5, num_logprobs=20)


class CappedExperts(OpTable):
    """The fault that batches of experts are known for: each takes the first tokens that come."""

    capacity = 3

    def grouped_linear(
        self,
        x: jax.Array,
        weight: Linear,
        choice: ExpertChoice,
        residual: jax.Array,
        count: jax.Array,
    ) -> jax.Array:
        ids = choice.ids
        earlier = jnp.cumsum(jax.nn.one_hot(ids, len(weight.weight)).sum(axis=1), axis=0)  # [T, X]
        is_full = jnp.take_along_axis(earlier, ids, axis=1) > self.capacity
        kept = choice._replace(ids=jnp.where(is_full, -1, ids))
        return super().grouped_linear(x, weight, kept, residual, count)


class Rerouted(Mapping[str, AnyArray]):
    def __init__(self, weights: Weights, route: str) -> None:
        self._weights, self._route = weights, route

    def __getitem__(self, name: str) -> AnyArray:
        tensor = np.array(self._weights[name])
        if name == EMBEDDING and self._route == "cursed":
            tensor[CURSED_TOKEN] = np.nan
        elif name.endswith(".mlp.gate.weight") and self._route == "all to the same":
            tensor[:] = 0.0  # ties go to the lowest ids
        elif name.endswith(".mlp.gate.weight") and self._route == "all to others":
            tensor *= 50.0
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


ROUTES = ["as drawn", "all to the same", "all to others", "cursed"]
CASES = [(name, route) for name in ("served", "reference") for route in ROUTES]
BY_DAY = [*CASES[: len(ROUTES)], ("reference", "all to the same"), ("reference", "cursed")]


def make_runner(lab: Lab, variant: Variant, route: str) -> XlaRunner:
    weights = Rerouted(lab.weights(variant.shape), route)
    return lab.runner_with(weights, variant.config, variant)


Neighbours = Callable[[int], list[Chunk]]


def play(runner: XlaRunner, row: int, neighbours: Neighbours) -> np.ndarray:
    runner.reset()
    stream = Stream(row=row, pages=[5, 2], draw=DRAW)
    results: list[np.ndarray] = []
    for step in range(3 + NUM_DECODES):
        part = PROMPT[step * 7 : (step + 1) * 7]
        chunk = stream.chunk(part, samples=step == 2) if part else stream.next_token()
        inputs = build_inputs([chunk, *neighbours(step)], GEOMETRY)
        array = runner.launch(inputs).rows()
        if chunk.samples:
            used = inputs.logits.rows[: inputs.num_logits].tolist()
            results.append(array[used.index(row)])
    return np.array(results)


def alone(step: int) -> list[Chunk]:
    return []


class Crowd:
    """Rows with work of their own in every step, which `tokens` gives for a step and an index."""

    def __init__(self, rows: list[int], tokens: Callable[[int, int], list[int]]) -> None:
        self._tokens = tokens
        self._streams = [
            Stream(row=row, pages=[10 + 4 * i + j for j in range(4)], draw=DRAW)
            for i, row in enumerate(rows)
        ]

    def __call__(self, step: int) -> list[Chunk]:
        return [
            stream.chunk(self._tokens(step, index), samples=index % 2 == 0)
            for index, stream in enumerate(self._streams)
        ]


def the_same_tokens(step: int, index: int) -> list[int]:
    return PROMPT[step * 7 : (step + 1) * 7] or [PROMPT[step]]


def other_tokens(step: int, index: int) -> list[int]:
    return np.random.default_rng([step, index]).integers(3, 331, 1 + (step + index) % 8).tolist()


def cursed_tokens(step: int, index: int) -> list[int]:
    return [CURSED_TOKEN, *other_tokens(step, index)[1:]]


@pytest.fixture(scope="module", params=by_day(CASES, BY_DAY), ids="-".join)
def runner(request: pytest.FixtureRequest, lab: Lab) -> XlaRunner:
    name, route = request.param
    return make_runner(lab, VARIANT if name == "served" else REFERENCE, route)


@pytest.fixture(scope="module")
def played_alone(runner: XlaRunner) -> np.ndarray:
    return play(runner, 0, alone)


@pytest.mark.parametrize("tokens", [the_same_tokens, other_tokens, cursed_tokens])
@pytest.mark.parametrize(("row", "others"), [(0, [1, 2, 3, 4, 5, 6, 7]), (7, [0, 3]), (3, [1])])
def test_a_row_has_the_same_bits_whoever_shares_its_experts(
    runner: XlaRunner,
    played_alone: np.ndarray,
    tokens: Callable[[int, int], list[int]],
    row: int,
    others: list[int],
):
    assert (played_alone[:, COLUMN_STATE] == STATE_CHOSEN).all()
    assert np.array_equal(play(runner, row, Crowd(others, tokens)), played_alone)


@pytest.mark.parametrize("route", ROUTES)
def test_the_routes_are_what_they_are_called(lab: Lab, route: str):
    """How many of the experts the tokens of a step choose, in the first layer's router."""
    weights = Rerouted(lab.weights(SHAPE), route)
    ops = OpTable(DecoderSpec(model=CONFIG, dtype=np.float32, page_size=16))
    router = ops.load_linear([weights["model.layers.0.mlp.gate.weight"]], [])
    x = np.random.default_rng(3).standard_normal((64, CONFIG.hidden_size)).astype(np.float32)
    choice = ops.route_experts(jnp.asarray(x), router, jnp.int32(64))
    chosen = np.unique(np.asarray(choice.ids))
    assert CONFIG.experts is not None
    expected = 3 if route == "all to the same" else CONFIG.experts.num_experts
    assert len(chosen) == expected
    largest = float(np.median(np.asarray(choice.weights)[:, 0]))
    assert (largest > 0.9) == (route == "all to others")


def test_experts_with_a_capacity_change_the_bits(lab: Lab):
    """The negative control: the comparison notices experts that take the first tokens only."""
    capped = make_runner(lab, replace(VARIANT, ops=CappedExperts), "as drawn")
    expected = play(capped, 0, alone)
    together = play(capped, 7, Crowd([0, 1, 2, 3], the_same_tokens))
    assert not np.array_equal(together, expected)


def test_the_cursed_neighbour_is_not_finite(lab: Lab):
    cursed = make_runner(lab, VARIANT, "cursed")
    stream = Stream(row=1, pages=[3])
    assert not run_step(cursed, [stream.chunk([CURSED_TOKEN], samples=True)], GEOMETRY).is_finite[0]


HEAVY = {"dot", "reduce", "reduce-window", "sort", "exponential", "rsqrt"}
PASSING_ON = {"parameter", "get-tuple-element", "tuple", "custom-call"}
# Loops over integers: the tokens into the history, and the newest choice of each row.
NUM_SCATTERS = 2


def operations_of(runner: XlaRunner) -> list[tuple[str, str]]:
    text = runner.programs.step[VARIANT.bucket].as_text()
    return re.findall(r"= (\(.*?\)|\S+) ([a-z][a-z-]*)\(", text)


def names_of(operations: list[tuple[str, str]]) -> Counter[str]:
    return Counter(name for _, name in operations)


def names_with_floats(operations: list[tuple[str, str]]) -> set[str]:
    return {name for result, name in operations if re.search(r"\bb?f\d+\[", result)}


@pytest.mark.native
def test_a_native_step_leaves_nothing_heavy_to_xla(lab: Lab):
    runner = lab.runner(VARIANT)
    operations = operations_of(runner)
    assert not names_of(operations).keys() & HEAVY
    assert names_of(operations)["while"] <= NUM_SCATTERS
    assert names_with_floats(operations) <= PASSING_ON
    text = runner.programs.step[VARIANT.bucket].as_text()
    assert len(re.findall(r'custom_call_target="\w*cadenza_program"', text)) == 1
    by_xla = operations_of(lab.runner(REFERENCE))
    assert names_with_floats(by_xla) >= {"dot", "reduce"}
