"""One tokenizer of each kind, and the bundled one with its compiler, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.text import Tokenizer
from cadenza.text.constraints.token_constraint import ConstraintCompiler
from tests.text.vocabularies import KINDS
from tests.text.walks import Judge


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
    source = open_checkpoint(None).tokenizer_source
    assert source is not None
    made = ConstraintCompiler(source, vocab_size=2560, eos_token_ids=[0])
    yield made
    made.close()


@pytest.fixture(scope="session")
def judge(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> Judge:
    return Judge(tokenizer, compiler)
