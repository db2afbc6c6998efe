"""Receipts that older revisions wrote, of the bundled model in the portable arithmetic, which has
the same bits on every machine: this revision computes them again. A change that ends them removes
them here and says so in CHANGELOG.md, with another `ARITHMETIC_REVISION` or receipt format.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.harness import Ran

CORPUS = sorted((Path(__file__).parents[1] / "fixtures" / "receipts").glob("*.json"))


def test_the_corpus_is_there():
    assert {path.stem for path in CORPUS} >= {"float32", "greedy", "int8", "sampled"}


@pytest.mark.parametrize("receipt", CORPUS, ids=lambda path: path.stem)
def test_an_older_receipt_is_computed_again(cadenza: Callable[..., Ran], receipt: Path):
    ran = cadenza("replay", receipt)
    assert (ran.code, ran.out.partition(": ")[2].partition(",")[0]) == (0, "equal"), ran.err
