"""What is given in place of a model: a folder of the hub's cache, an adapter, a Git LFS pointer."""

import json
import shutil
from pathlib import Path

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError
from tests.checkpoint.files import write_folder
from tests.checkpoint.gguf_bytes import small_file

COMMIT, OTHER = "0123456789" * 4, "f" * 40
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 988097824\n"
)


def cached_model(hub: Path, commits: tuple[str, ...], main: str | None) -> Path:
    """As huggingface_hub lays it out: snapshots are links to files of another folder."""
    folder = hub / "models--owner--small-model"
    blobs = folder / "blobs"
    blobs.mkdir(parents=True)
    write_folder(blobs)
    for commit in commits:
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for blob in blobs.iterdir():
            (snapshot / blob.name).symlink_to(blob)
    if main is not None:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(main)
    return folder


def test_a_folder_of_the_hubs_cache_is_its_main_snapshot(tmp_path: Path):
    folder = cached_model(tmp_path, (OTHER, COMMIT), main=COMMIT)
    assert open_checkpoint(folder).folder == folder / "snapshots" / COMMIT


def test_the_only_snapshot_is_taken_without_a_main_one(tmp_path: Path):
    folder = cached_model(tmp_path, (OTHER,), main=None)
    assert open_checkpoint(folder).folder == folder / "snapshots" / OTHER


@pytest.mark.parametrize("main", ["../../../secret", "\xff", "", "0" * 40])
def test_a_main_that_is_no_snapshot_of_several_is_refused(tmp_path: Path, main: str):
    folder = cached_model(tmp_path, (OTHER, COMMIT), main=main)
    with pytest.raises(CheckpointError, match=r"2 snapshots .* as owner/small-model, or one of"):
        open_checkpoint(folder)


def test_a_cached_model_without_snapshots_is_refused(tmp_path: Path):
    folder = cached_model(tmp_path, (), main=COMMIT)
    (folder / "snapshots").mkdir()
    with pytest.raises(CheckpointError, match="has no snapshot; name the model as owner/"):
        open_checkpoint(folder)


def test_a_model_folder_of_such_a_name_is_itself(tmp_path: Path):
    folder = tmp_path / "models--owner--model"
    folder.mkdir()
    assert open_checkpoint(write_folder(folder)).folder == folder


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapters_folder_is_called_one_with_its_base(tmp_path: Path, has_config: bool):
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    if not has_config:
        (tmp_path / "config.json").unlink()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    said = "is a LoRA adapter of 'owner/base', which is no model by itself; merge it into"
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is a LoRA adapter, which is no model by itself"):
        open_checkpoint(tmp_path)


def test_a_merged_model_with_its_adapters_config_opens(tmp_path: Path):
    (write_folder(tmp_path) / "adapter_config.json").write_text("{}")
    assert open_checkpoint(tmp_path).can_generate


def test_a_gguf_adapter_is_called_one_with_its_base(tmp_path: Path):
    path = tmp_path / "style.gguf"
    metadata = [("general.type", "adapter"), ("general.base_model.0.name", "Small Base")]
    path.write_bytes(small_file(metadata=small_file().metadata + metadata).encode())
    with pytest.raises(CheckpointError, match=r"^style\.gguf is a LoRA adapter of 'Small Base',"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"]
)
def test_a_git_lfs_pointer_in_a_folder_is_called_that(tmp_path: Path, name: str):
    (write_folder(tmp_path) / name).write_text(POINTER)
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(tmp_path)
    said = str(refused.value)
    assert said.startswith(f"{name} is a Git LFS pointer in place of the file of 942.3 MiB")
    assert "`git lfs pull`" in said


def test_a_git_lfs_pointer_of_a_shard_or_a_gguf_file_is_called_that(tmp_path: Path):
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"a": "part-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "part-1.safetensors").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors is a Git LFS pointer"):
        open_checkpoint(tmp_path)
    shutil.copy(tmp_path / "part-1.safetensors", tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"model\.gguf is a Git LFS pointer"):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_small_file_that_only_names_git_lfs_is_no_pointer(tmp_path: Path):
    content = {"a": POINTER}
    (write_folder(tmp_path) / "generation_config.json").write_text(json.dumps(content))
    assert open_checkpoint(tmp_path).can_generate
