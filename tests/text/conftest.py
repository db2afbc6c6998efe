"""One tokenizer of each kind, and the bundled one with its compiler, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.loading.build import constraint_compiler
from cadenza.text import Tokenizer
from cadenza.text.constraints.token_constraint import ConstraintCompiler
from tests.text.vocabularies import KINDS


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("tokenizers")
    return {kind: Tokenizer(make(folder / f"{kind}.json")) for kind, make in KINDS.items()}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    source = open_checkpoint(None).tokenizer_source
    assert source is not None
    return Tokenizer(source)


@pytest.fixture(scope="session")
def compiler() -> Iterator[ConstraintCompiler]:
    made = constraint_compiler(open_checkpoint(None))
    assert made is not None
    yield made
    made.close()
