"""Random checkpoints for the benchmarks: made once, whole, and found again."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cadenza.bench.checkpoints import (
    RandomWeights,
    cached_checkpoint,
    cached_folder,
    ensure_checkpoint,
    make_checkpoint,
    random_weights,
    write_random_tokenizer,
)
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError
from tests.bench.shapes import TINY
from tests.checkpoint.config_writer import shape_of

WEIGHTS = RandomWeights(shape=shape_of(TINY), dtype="bfloat16")


def test_a_made_checkpoint_opens_and_its_progress_ends_at_100_percent(tmp_path: Path):
    lines: list[str] = []
    make_checkpoint(WEIGHTS, tmp_path / "made", lines.append)
    checkpoint = open_checkpoint(tmp_path / "made")
    assert checkpoint.config == TINY
    assert checkpoint.num_weight_bytes == WEIGHTS.num_bytes
    assert lines[-1].endswith("100 %")


@pytest.mark.parametrize("vocab_size", [211, 300, 2000])
def test_every_token_of_a_random_tokenizer_has_a_text_of_its_own(tmp_path: Path, vocab_size: int):
    write_random_tokenizer(tmp_path / "tokenizer.json", vocab_size)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    names = {tokenizer.id_to_token(token_id) for token_id in range(vocab_size)}
    assert tokenizer.get_vocab_size() == vocab_size == len(names)
    if vocab_size >= 256:
        text = "any text: Größe 東京 🙂"
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_kept_checkpoint_is_not_made_again(tmp_path: Path):
    folder = cached_folder(WEIGHTS, "tiny", tmp_path)
    ensure_checkpoint(WEIGHTS, folder, lambda *_: None)
    written = (folder / "model.safetensors").stat()
    ensure_checkpoint(WEIGHTS, folder, lambda *_: pytest.fail("it was made again"))
    assert (folder / "model.safetensors").stat().st_mtime_ns == written.st_mtime_ns
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_shape_is_made_once(tmp_path: Path):
    folder = cached_checkpoint("tiny-llama", tmp_path)
    assert folder == cached_folder(random_weights("tiny-llama"), "tiny-llama", tmp_path)
    assert cached_checkpoint("tiny-llama", tmp_path, lambda *_: pytest.fail("again")) == folder


def test_a_folder_of_an_earlier_version_which_lacks_a_file_is_made_anew(tmp_path: Path):
    folder = cached_folder(WEIGHTS, "tiny", tmp_path)
    ensure_checkpoint(WEIGHTS, folder, lambda *_: None)
    (folder / "tokenizer.json").unlink()
    ensure_checkpoint(WEIGHTS, folder, lambda *_: None)
    assert (folder / "tokenizer.json").is_file()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_checkpoint_that_cannot_be_made_leaves_nothing_in_the_cache(tmp_path: Path):
    (tmp_path / "bench").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError):
        ensure_checkpoint(WEIGHTS, cached_folder(WEIGHTS, "tiny", tmp_path), lambda *_: None)
    assert (tmp_path / "bench").is_file()


@pytest.mark.parametrize(
    "other",
    [
        replace(WEIGHTS, seed=1),
        replace(WEIGHTS, dtype="float32"),
        replace(WEIGHTS, shape=shape_of(replace(TINY, num_layers=3))),
    ],
)
def test_another_shape_type_or_seed_has_another_folder(other: RandomWeights, tmp_path: Path):
    first, second = (cached_folder(each, "tiny", tmp_path) for each in (WEIGHTS, other))
    assert first != second


def test_a_folder_is_named_after_the_shape_and_never_leaves_the_cache(tmp_path: Path):
    folder = cached_folder(WEIGHTS, "../../elsewhere/llama.json", tmp_path)
    assert folder.parent == tmp_path / "bench"
    assert folder.name.startswith("llama-bfloat16-")
