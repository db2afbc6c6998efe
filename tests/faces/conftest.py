"""One tiny random checkpoint for the faces: no tokenizer, token ids only."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza import LLM
from cadenza.checkpoint import named_shape, write_random_checkpoint


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    shape = named_shape("tiny-llama")
    write_random_checkpoint(shape, folder, seed=3, dtype=shape.dtype)
    return folder


@pytest.fixture(scope="session")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, max_num_seqs=4, max_model_len=256) as llm:
        yield llm
