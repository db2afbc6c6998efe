"""Pages copied to the host and back have the same bits, wherever they then lie."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cadenza.backends.base import PageCopier, Runner
from cadenza.errors import RunnerError
from tests.by_day import by_day
from tests.contract.backends import LIMITS, make_fake, make_reference, make_xla
from tests.contract.steps import Geometry, Stream, run_step

GEOMETRY = Geometry(
    bucket=LIMITS.max_num_batched_tokens, num_rows=LIMITS.max_num_seqs, page_size=LIMITS.page_size
)
PROMPT = np.random.default_rng(5).integers(3, 90, 48).tolist()


COPIERS = {
    "fake": make_fake,
    "xla": partial(make_xla, dtype="bfloat16"),  # whose pages the native table keeps as bits
    "xla, float32": make_xla,
    "xla reference": make_reference,
}


def make(name: str, folder: Path) -> Runner:
    runner = COPIERS[name](LIMITS, folder)
    runner.warmup()
    return runner


def prefill(runner: Runner, stream: Stream, prompt: list[int]) -> None:
    for start in range(0, len(prompt), 16):
        run_step(runner, [stream.chunk(prompt[start : start + 16], samples=True)], GEOMETRY)


@pytest.mark.parametrize("name", by_day(COPIERS, {"fake", "xla"}))
def test_a_stream_goes_on_over_pages_that_were_copied_to_another_runner(name: str, tmp_path: Path):
    first = make(name, tmp_path)
    assert isinstance(first, PageCopier)
    source = Stream(row=0, pages=[5, 2, 7, 9])
    prefill(first, source, PROMPT)
    contents = first.read_pages([5, 2, 7])
    expected = run_step(first, [source.chunk([4], samples=True)], GEOMETRY)
    assert first.read_pages([7, 5, 2]) == [contents[2], contents[0], contents[1]]
    first.reset()
    first.write_pages([11, 3, 8], contents)
    assert first.read_pages([11, 3, 8]) == contents
    copy = Stream(row=2, pages=[11, 3, 8, 1], num_computed=len(PROMPT))
    found = run_step(first, [copy.chunk([4], samples=True)], GEOMETRY)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprobs.tobytes() == expected.logprobs.tobytes()
    first.close()


@pytest.mark.parametrize("name", by_day(COPIERS, {"fake", "xla"}))
def test_more_pages_than_a_call_copies_keep_their_places(name: str, tmp_path: Path):
    runner = make(name, tmp_path)
    assert isinstance(runner, PageCopier)
    contents = runner.read_pages(range(LIMITS.num_pages))
    size = len(contents[0])
    marked = [bytes([0, index]) * (size // 2) for index in range(LIMITS.num_pages)]
    order = [*range(LIMITS.num_pages)][::-1]
    runner.write_pages(order[:20], marked[:20])
    after = runner.read_pages(order)
    assert after[:20] == marked[:20]
    assert after[20:] == [contents[page] for page in order[20:]]
    runner.close()


@pytest.mark.parametrize("name", by_day(COPIERS, {"fake", "xla"}))
def test_contents_of_another_size_are_refused(name: str, tmp_path: Path):
    runner = make(name, tmp_path)
    assert isinstance(runner, PageCopier)
    content = runner.read_pages([3])[0]
    with pytest.raises(RunnerError, match="bytes, not"):
        runner.write_pages([3], [content[:-1]])
    assert runner.read_pages([3]) == [content]
    runner.close()
