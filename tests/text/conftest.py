"""One tokenizer of each kind, made once."""

from pathlib import Path

import pytest

from cadenza.text import Tokenizer
from tests.text.vocabularies import KINDS


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("tokenizers")
    return {kind: Tokenizer(make(folder / f"{kind}.json")) for kind, make in KINDS.items()}
