"""Rule 6: what lies in slots that a row does not own cannot reach it, whatever it is.

Pools start out full of NaN in every other suite here; this one also overwrites, between any two
steps, every slot that no live stream has written. And a row whose own numbers are not finite fails
alone, publishes nothing and leaves no trace on the pages it gives back.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from cadenza.backends.base import StepHandle
from cadenza.backends.xla.mutants import MultipliedPadding
from cadenza.backends.xla.runner import XlaRunner
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import SchedulerLoop
from cadenza.models.declaration import EMBEDDING
from cadenza.request import Request, SamplingParams
from cadenza.weights.stored_tensor import AnyArray
from cadenza.weights.weights import Weights
from tests.contract.steps import Geometry, Stream, run_step
from tests.xla.harness import (
    BASE,
    REFERENCE,
    Lab,
    Mode,
    poison,
    random_requests,
    replay,
    serve,
    serve_alone,
    shout,
)

POISONS = {
    "nan": float("nan"),
    "infinity": float("inf"),
    "minus_infinity": float("-inf"),
    "huge": 3e38,
    "denormal": 1e-40,
}
CURSED_TOKEN = 5


class PoisoningRunner:
    """Before each launch overwrites every slot but those that live rows have written.

    Follows the page tables as the device does, and for engines without a prefix cache: a page that
    is handed to a row holds nothing of use, whatever was written there before.
    """

    def __init__(self, runner: XlaRunner, page_size: int, num_rows: int, value: float) -> None:
        self._runner = runner
        self._page_size = page_size
        self._value = value
        self._tables: list[dict[int, int]] = [{} for _ in range(num_rows)]
        self._written: set[int] = set()
        self.num_stale_slots = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def launch(self, inputs: ModelInputs) -> StepHandle:
        size = self._page_size
        for row, index, page in inputs.page_updates.tolist():
            self._tables[row][index] = page
            stale = self._written & set(range(page * size, (page + 1) * size))
            self._written -= stale
            self.num_stale_slots += len(stale)
        fresh = set(inputs.tokens.slots[: inputs.num_tokens].tolist())
        assert self._read_by(inputs) - fresh <= self._written, "a row reads what nobody wrote"
        poison(self._runner, np.array(sorted(self._written), np.int64), self._value)
        self._written |= fresh
        return self._runner.launch(inputs)

    def _read_by(self, inputs: ModelInputs) -> set[int]:
        size = self._page_size
        return {
            self._tables[row][position // size] * size + position % size
            for row, length in enumerate(inputs.rows.kv_lens.tolist())
            for position in range(length)
        }


@pytest.mark.parametrize("name", POISONS)
def test_poison_in_every_unowned_slot_between_steps_changes_no_bit(lab: Lab, name: str):
    replay("seed 31, 12 requests")
    requests = [shout(r) for r in random_requests(31, 12, BASE, longest_output=40)]
    expected = [serve_alone(lab, BASE, request) for request in requests]
    runner = PoisoningRunner(lab.runner(), BASE.page_size, BASE.num_rows, POISONS[name])
    mode = Mode(arrival_seed=32, caching=False, num_pages=24, reserved_output=0.0)
    served = serve(runner, BASE, requests, mode)
    for index, stream in enumerate(served.streams):
        assert stream.difference(expected[index]) is None, f"request {index}"
    assert runner.num_stale_slots, "no page was used twice"


@pytest.mark.parametrize("name", POISONS)
def test_poison_in_others_live_pages_changes_no_bit(lab: Lab, name: str):
    """A row decodes while all that is not its own, its neighbour's KV included, is spoilt."""
    geometry = Geometry(bucket=BASE.bucket, num_rows=BASE.num_rows, page_size=BASE.page_size)
    prompts = np.random.default_rng(33).integers(3, 211, (2, 37)).tolist()
    expected = _decode(lab.runner(), geometry, prompts, spoil=None)
    spoilt = _decode(lab.runner(), geometry, prompts, spoil=POISONS[name])
    assert np.array_equal(expected, spoilt)


def _decode(
    runner: XlaRunner, geometry: Geometry, prompts: list[list[int]], spoil: float | None
) -> np.ndarray:
    streams = [Stream(row=row, pages=[3 + row * 4 + i for i in range(4)]) for row in range(2)]
    streams[1].draw = replace(streams[1].draw, num_logprobs=20)
    run_step(
        runner,
        [s.chunk(p[:30], samples=False) for s, p in zip(streams, prompts, strict=True)],
        geometry,
    )
    rows: list[np.ndarray] = []
    for position in range(30, 37):
        if spoil is not None:
            slots = [streams[1].pages[at // 16] * 16 + at % 16 for at in range(position)]
            poison(runner, np.array(slots), spoil)
        chunks = [
            s.chunk([p[position]], samples=True) for s, p in zip(streams, prompts, strict=True)
        ]
        output = run_step(runner, chunks, geometry)
        rows.append(np.concatenate([output.token_ids[1:2], output.top_logprobs[1].view(np.int32)]))
    return np.array(rows)


def test_padding_that_is_multiplied_by_zero_is_caught(lab: Lab):
    variant = replace(REFERENCE, ops=MultipliedPadding)
    requests = [shout(r) for r in random_requests(31, 4, BASE)]
    runner = PoisoningRunner(lab.runner(variant), BASE.page_size, BASE.num_rows, POISONS["nan"])
    served = serve(runner, variant, requests, Mode(caching=False))
    assert any(stream.finish_reason == "error" for stream in served.streams)


class CursedWeights(Mapping[str, AnyArray]):
    def __init__(self, weights: Weights, value: float) -> None:
        self._weights = weights
        self._value = value

    def __getitem__(self, name: str) -> AnyArray:
        tensor = self._weights[name]
        if name != EMBEDDING:
            return tensor
        cursed = np.array(tensor)
        cursed[CURSED_TOKEN] = self._value
        return cursed

    def __iter__(self):
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def greedy(tokens: list[int], max_tokens: int = 12) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=20)
    return Request(prompt_token_ids=tuple(tokens), params=params)


@pytest.fixture(scope="module", params=["nan", "infinity"])
def cursed(request: pytest.FixtureRequest, lab: Lab) -> XlaRunner:
    weights = CursedWeights(lab.weights("hostile"), POISONS[request.param])
    return lab.runner_with(weights)


def healthy_requests(lab: Lab, seed: int, count: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    found: list[Request] = []
    while len(found) < count:
        request = greedy(rng.integers(6, 211, int(rng.integers(1, 90))).tolist())
        if CURSED_TOKEN not in serve_alone(lab, BASE, request).token_ids:
            found.append(request)
    return found


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_a_non_finite_row_fails_alone_and_none_of_its_pages_is_cached(
    lab: Lab, cursed: XlaRunner, loop: SchedulerLoop
):
    replay("seed 34, 6 requests and a cursed one")
    healthy = healthy_requests(lab, 34, 6)
    expected = [serve_alone(lab, BASE, request) for request in healthy]
    doomed = greedy([*[9] * 50, CURSED_TOKEN, *[9] * 50])
    cursed.reset()
    served = serve(cursed, BASE, [*healthy[:3], doomed, *healthy[3:]], Mode(loop=loop))
    failed = served.streams.pop(3)
    assert failed.finish_reason == "error"
    assert not failed.tokens
    assert failed.finished is not None
    assert "non-finite" in (failed.finished.error or "")
    for index, stream in enumerate(served.streams):
        assert stream.difference(expected[index]) is None, f"request {index}"
    kv_cache = served.engine.scheduler.kv_cache
    assert kv_cache.prefix_cache is not None
    cached = [page.content.token_ids for page in kv_cache.prefix_cache._pages.values()]
    assert cached, "nothing at all was cached"
    assert doomed.prompt_token_ids[:16] not in cached
    counts = kv_cache.pool.counts()
    assert (counts.live, counts.pinned) == (0, 0)


def test_pages_that_held_a_non_finite_row_are_clean_for_the_next(lab: Lab, cursed: XlaRunner):
    """The doomed row takes nearly all of a small pool; the next is served from the same pages."""
    replay("seed 36, 6 requests")
    doomed = greedy([CURSED_TOKEN, *[9] * 100])
    for request in healthy_requests(lab, 36, 6):
        cursed.reset()
        served = serve(cursed, BASE, [doomed, request], Mode(num_pages=8))
        assert served.streams[0].finish_reason == "error"
        assert served.streams[1].difference(serve_alone(lab, BASE, request)) is None


def test_the_curse_is_what_fails_the_row(cursed: XlaRunner):
    cursed.reset()
    served = serve(cursed, BASE, [greedy([7, 8, 9]), greedy([7, CURSED_TOKEN, 9])])
    assert [stream.finish_reason for stream in served.streams] == ["length", "error"]
