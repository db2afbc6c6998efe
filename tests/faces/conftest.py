"""Tiny random checkpoints for the faces: one of token ids only, one with a tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cadenza import LLM
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.frontend.text_frontend import TextFrontend
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.cli.harness import write_model

LIMITS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_queued_reqs": 16,
}
"""Of all tests' engines here where no others matter, so that their programs compile once."""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    shape = named_shape("tiny-llama")
    write_random_checkpoint(shape, folder, seed=3, dtype=shape.dtype)
    return folder


@pytest.fixture(scope="session")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, **LIMITS) as llm:
        yield llm


@pytest.fixture(scope="session")
def worded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "worded")


@pytest.fixture(scope="session")
def worded(worded_folder: Path) -> Iterator[LLM]:
    with LLM(worded_folder, **LIMITS) as llm:
        yield llm


@pytest.fixture(scope="session")
def worded_text(worded_folder: Path) -> TextFrontend:
    return TextFrontend(open_checkpoint(worded_folder))


@pytest.fixture(scope="session")
def tiny_text(tiny_folder: Path) -> TextFrontend:
    return TextFrontend(open_checkpoint(tiny_folder))
