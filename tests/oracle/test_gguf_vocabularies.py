"""Tokenizers of GGUF metadata against the expected tokenisations in llama.cpp's sources.

`models/` of llama.cpp has files of vocabularies, texts (.inp) and the ids that the models' own
tokenizers give them (.out). `CADENZA_LLAMA_CPP` names a checkout; the source package of
llama-cpp-python has one under vendor/llama.cpp. Skipped without it.
"""

import os
from pathlib import Path

import pytest

from cadenza.checkpoint.gguf.reader import open_gguf
from cadenza.checkpoint.gguf.tokenizer import read_gguf_tokenizer, read_vocabulary
from cadenza.errors import CheckpointError
from cadenza.text import Tokenizer
from cadenza.text.tokens.provenance import written_by_template
from cadenza.text.tokens.tokenizer import TokenizerSource

pytestmark = pytest.mark.oracle

VARIABLE = "CADENZA_LLAMA_CPP"
SUPPORTED = (
    "llama-spm phi-3 llama-bpe qwen2 gpt-2 starcoder refact mpt command-r deepseek-coder".split()
)
REFUSED = {
    "bert-bge": "tokenizer.ggml.model 'bert'",
    "gemma-4": "tokenizer.ggml.model 'gemma4'",
    "falcon": "tokenizer.ggml.pre 'falcon'",
    "deepseek-llm": "tokenizer.ggml.pre 'deepseek-llm'",
    "qwen35": "tokenizer.ggml.pre 'qwen35'",
    "gpt-neox": "tokenizer.ggml.pre is missing",
}
SEPARATOR = "\n__ggml_vocab_test__\n"


def vocabulary_file(name: str) -> Path:
    found = os.environ.get(VARIABLE)
    if not found:
        pytest.skip(f"{VARIABLE} does not name the sources of llama.cpp")
    return Path(found) / "models" / f"ggml-vocab-{name}.gguf"


def tokenizer_of(path: Path) -> Tokenizer:
    vocabulary = read_vocabulary(open_gguf(path).header.metadata)
    assert vocabulary is not None
    return Tokenizer(TokenizerSource(name=path.name, read=lambda: read_gguf_tokenizer(vocabulary)))


@pytest.mark.parametrize("name", SUPPORTED)
def test_texts_get_the_expected_ids(name: str):
    path = vocabulary_file(name)
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split(SEPARATOR)
    lines = path.with_name(f"{path.name}.out").read_text().split("\n")
    tokenizer = tokenizer_of(path)
    assert len(texts) > 40
    for text, line in zip(texts, lines, strict=False):
        ids = tokenizer.encode(written_by_template(text), add_special_tokens=False)
        assert ids == [int(word) for word in line.split()], text


@pytest.mark.parametrize("name", REFUSED)
def test_other_vocabularies_are_refused_by_name(name: str):
    with pytest.raises(CheckpointError, match=REFUSED[name]):
        tokenizer_of(vocabulary_file(name))


def test_every_vocabulary_with_expected_ids_is_tested():
    folder = vocabulary_file("gpt-2").parent
    names = {path.name.removesuffix(".gguf.inp") for path in folder.glob("*.gguf.inp")}
    assert {f"ggml-vocab-{name}" for name in {*SUPPORTED, *REFUSED} - {"gpt-neox"}} == names
