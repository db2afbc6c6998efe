"""Rule 1 on the compiled step itself: a row's bits follow from its own tokens and nothing else.

Each test computes one stream in a plain setting (row 0, alone, whole chunks, pages in order) and
again in another; results (token, flag, log probabilities, top twenty) and the KV it leaves must be
the same bits. No scheduler and no packer take part.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.backends.xla.mutants import RelativeBlocks
from cadenza.backends.xla.runner import XlaRunner
from tests.contract.steps import Chunk, Draw, Geometry, Stream, build_inputs
from tests.xla.harness import BASE, REFERENCE, Lab, Variant, page_bytes, slots_of

PROMPT = np.random.default_rng(21).integers(3, 211, 290).tolist()
NUM_DECODES = 3
LOUD = Draw(temperature=0.8, top_p=0.95, seed=77, num_logprobs=20)
QUIET = Draw()
DENSE = replace(BASE, page_size=320, num_pages=8)
PAGES_OF_64 = replace(BASE, page_size=64, num_pages=30)


@dataclass(frozen=True, slots=True)
class Trace:
    tokens: bytes
    details: bytes
    kv: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    row: int = 0
    pages: tuple[int, ...] | None = None
    cuts: tuple[int, ...] = ()
    draw: Draw = LOUD
    neighbours: Callable[[int], list[Chunk]] = lambda step: []
    prompt: tuple[int, ...] = tuple(PROMPT[:150])


def geometry_of(variant: Variant) -> Geometry:
    return Geometry(bucket=variant.bucket, num_rows=variant.num_rows, page_size=variant.page_size)


def compute(runner: XlaRunner, variant: Variant, setting: Setting) -> Trace:
    geometry = geometry_of(variant)
    prompt = setting.prompt
    total = len(prompt) + NUM_DECODES
    pages = setting.pages or tuple(range(-(-total // variant.page_size)))
    stream = Stream(row=setting.row, pages=list(pages), draw=setting.draw)
    results: list[np.ndarray] = []
    chunks = _chunks(prompt, setting.cuts, variant.bucket)
    for step in range(len(chunks) + NUM_DECODES):
        if step < len(chunks):
            chunk = stream.chunk(chunks[step], samples=step == len(chunks) - 1)
        else:
            chunk = stream.next_token()
        inputs = build_inputs([chunk, *setting.neighbours(step)], geometry)
        handle = runner.launch(inputs)
        used = inputs.logits.rows[: inputs.num_logits].tolist()
        if chunk.samples:
            results.append(handle.rows()[used.index(setting.row)])
    slots = slots_of(pages, stream.num_computed, variant.page_size)
    rows = np.array(results)  # [steps, C]
    kv = page_bytes(runner)[slots]
    return Trace(rows[:, :2].tobytes(), rows[:, 2:].tobytes(), kv.tobytes())


def _chunks(prompt: tuple[int, ...], cuts: tuple[int, ...], longest: int) -> list[tuple[int, ...]]:
    bounds = [0, *sorted(set(cuts)), len(prompt)]
    parts: list[tuple[int, ...]] = []
    for begin, end in pairwise(bounds):
        parts += [prompt[at : min(at + longest, end)] for at in range(begin, end, longest)]
    return parts


class Company:
    """Neighbours with work of their own in every step: prompts, decodes, greedy and sampled."""

    def __init__(self, rows: list[int], first_page: int, chunk: int, page_size: int) -> None:
        per_row = -(-160 // page_size)
        self._chunk = chunk
        self._rng = np.random.default_rng(5)
        self._streams = [
            Stream(
                row=row,
                pages=list(range(first_page + i * per_row, first_page + (i + 1) * per_row)),
                draw=[QUIET, LOUD, replace(LOUD, seed=row, top_k=3)][i % 3],
            )
            for i, row in enumerate(rows)
        ]

    def __call__(self, step: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for index, stream in enumerate(self._streams):
            length = self._chunk if (index + step) % 2 else 1
            tokens = self._rng.integers(3, 211, length).tolist()
            chunks.append(stream.chunk(tokens, samples=index % 3 != 2))
        return chunks


@pytest.fixture
def alone(lab: Lab) -> Trace:
    return compute(lab.runner(), BASE, Setting())


@pytest.mark.parametrize("row", range(BASE.num_rows))
def test_a_row_has_the_same_bits_in_every_row_position(lab: Lab, alone: Trace, row: int):
    assert compute(lab.runner(), BASE, Setting(row=row)) == alone


@pytest.mark.parametrize("count", range(1, BASE.num_rows))
@pytest.mark.parametrize("row", [0, 3, 7])
def test_a_row_has_the_same_bits_with_every_number_of_neighbours(
    lab: Lab, alone: Trace, count: int, row: int
):
    rows = [r for r in range(BASE.num_rows) if r != row][:count]
    chunk = (BASE.bucket - 16) // BASE.num_rows
    setting = Setting(
        row=row, cuts=tuple(range(10, 150, 10)), neighbours=Company(rows, 11, chunk, 16)
    )
    assert compute(lab.runner(), BASE, setting) == alone


@given(cuts=st.sets(st.integers(1, 149), max_size=12))
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(lab: Lab, cuts: set[int]):
    alone = compute(lab.runner(), BASE, Setting())
    assert compute(lab.runner(), BASE, Setting(cuts=tuple(cuts))) == alone


@given(placement=st.permutations(range(BASE.num_pages)))
def test_a_row_has_the_same_bits_on_whatever_pages_it_lies(lab: Lab, placement: list[int]):
    alone = compute(lab.runner(), BASE, Setting())
    assert compute(lab.runner(), BASE, Setting(pages=tuple(placement[:10]))) == alone


@pytest.mark.parametrize("variant", [PAGES_OF_64, DENSE], ids=["pages_of_64", "dense"])
def test_a_row_has_the_same_bits_with_every_page_size(lab: Lab, variant: Variant):
    setting = Setting(prompt=tuple(PROMPT), cuts=(7, 100, 131))
    paged = compute(lab.runner(), BASE, setting)
    assert compute(lab.runner(variant), variant, setting) == paged
    last = variant.num_pages - 1
    pages = tuple(range(last, last - -(-293 // variant.page_size), -1))
    elsewhere = replace(setting, row=5, pages=pages, cuts=())
    assert compute(lab.runner(variant), variant, elsewhere) == paged


def test_a_greedy_row_has_the_same_bits_beside_sampled_rows_and_with_log_probabilities(lab: Lab):
    silent = compute(lab.runner(), BASE, Setting(draw=QUIET))
    loud = compute(lab.runner(), BASE, Setting(draw=replace(QUIET, num_logprobs=20)))
    company = Company([1, 2, 4], 11, 4, 16)
    beside = compute(
        lab.runner(), BASE, Setting(draw=QUIET, cuts=tuple(range(10, 150, 10)), neighbours=company)
    )
    for other in (loud, beside):
        assert (silent.tokens, silent.kv) == (other.tokens, other.kv)


def test_another_token_changes_the_bits(lab: Lab, alone: Trace):
    """The comparison can fail: one early token differs."""
    prompt = (PROMPT[0] + 1, *PROMPT[1:150])
    assert compute(lab.runner(), BASE, Setting(prompt=prompt)) != alone


def test_blocks_that_follow_the_neighbours_change_the_bits(lab: Lab):
    """The comparison can fail: a table whose reductions depend on the batch."""
    variant = replace(REFERENCE, ops=RelativeBlocks)
    alone = compute(lab.runner(variant), variant, Setting(cuts=(140,)))
    together = compute(lab.runner(variant), variant, Setting(cuts=(3,)))
    assert alone != together
