"""Models of the hub: one commit, only the wanted files, the cache, and what can go wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.hub import Hub, is_hub_id
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError, ConfigError
from cadenza.loading.build import find_checkpoint
from tests.checkpoint.files import SMALL_CONFIG, encode_file, encode_tensors, small_model
from tests.checkpoint.hub_server import NAME, FakeHub, serving
from tests.ports import refusing_port

OLD, NEW = "a" * 40, "b" * 40


def repository(**changes: bytes) -> dict[str, bytes]:
    weights = encode_file(*encode_tensors(small_model()[1]))
    files = {
        "config.json": json.dumps(SMALL_CONFIG).encode(),
        "generation_config.json": b'{"temperature": 0.5}',
        "model.safetensors": weights,
        "pytorch_model.bin": b"never",
        "modeling_evil.py": b"never",
        "original/consolidated.safetensors": b"never",
        "README.md": b"never",
        "additional_chat_templates/tool_use.jinja": b"tools",
        "chat_template.jinja": b"old words",
    }
    return {**files, **{name.replace("__", "."): value for name, value in changes.items()}}


def in_shards() -> dict[str, bytes]:
    tensors = small_model()[1]
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    halves = [dict(list(tensors.items())[:3]), dict(list(tensors.items())[3:])]
    files = repository()
    del files["model.safetensors"]
    weight_map = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    for name, half in zip(names, halves, strict=True):
        files[name] = encode_file(*encode_tensors(half))
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    files["consolidated.safetensors"] = b"never"
    return files


@pytest.fixture
def hub() -> FakeHub:
    files = {OLD: repository(), NEW: repository(chat_template__jinja=b"new words")}
    return FakeHub(refs={"main": NEW, "v1": OLD}, files=files)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def client(hub: FakeHub, tmp_path: Path, lines: list[str]) -> Iterator[Hub]:
    with serving(hub) as endpoint:
        yield Hub(endpoint=endpoint, cache=tmp_path, is_offline=False, report=lines.append)


def offline(tmp_path: Path) -> Hub:
    return Hub(endpoint="http://127.0.0.1:1", cache=tmp_path, is_offline=True)


def test_a_model_is_fetched_and_opened(client: Hub, hub: FakeHub, lines: list[str]):
    checkpoint = find_checkpoint(NAME, hub=client)
    assert (checkpoint.revision, checkpoint.chat_template) == (NEW, "new words")
    assert checkpoint.generation_defaults.temperature == 0.5
    assert checkpoint.tokenizer.chat_templates["tool_use"] == "tools"
    assert "fetching 1 of 1: model.safetensors" in "\n".join(lines)


def test_only_wanted_files_are_asked_for(client: Hub, hub: FakeHub):
    client.fetch(NAME)
    asked = " ".join(hub.requests)
    for name in ("config.json", "model.safetensors", "tool_use.jinja"):
        assert name in asked
    for name in (".bin", ".py", "original", "README"):
        assert name not in asked


def test_a_revision_names_a_commit_for_every_file(client: Hub):
    checkpoint = find_checkpoint(NAME, revision="v1", hub=client)
    assert (checkpoint.revision, checkpoint.chat_template) == (OLD, "old words")
    assert find_checkpoint(NAME, revision=OLD, hub=client).revision == OLD


def test_a_branch_that_moves_meanwhile_changes_nothing(client: Hub, hub: FakeHub):
    hub.refs["main"], hub.moves_after_lookup = OLD, NEW
    checkpoint = find_checkpoint(NAME, hub=client)
    assert (checkpoint.revision, checkpoint.chat_template) == (OLD, "old words")
    assert {line.split("/resolve/")[1][:40] for line in hub.requests if "/resolve/" in line} == {
        OLD
    }


def test_shards_are_fetched_by_the_index_and_by_nothing_else(client: Hub, hub: FakeHub):
    hub.files = {NEW: in_shards()}
    checkpoint = find_checkpoint(NAME, hub=client)
    assert len(checkpoint.weights.files) == 2
    assert "consolidated" not in " ".join(hub.requests)


def test_mtp_layers_in_a_file_of_their_own_are_fetched(client: Hub, hub: FakeHub):
    hub.files = {NEW: repository(mtp__safetensors=b"not opened")}
    assert (client.fetch(NAME).path / "mtp.safetensors").exists()
    hub.files = {OLD: in_shards() | {"mtp.safetensors": b"never"}}
    hub.refs["main"] = OLD
    assert not (client.fetch(NAME).path / "mtp.safetensors").exists()


def test_a_second_start_fetches_no_file_again(client: Hub, hub: FakeHub):
    client.fetch(NAME)
    before = len(hub.requests)
    client.fetch(NAME)
    assert [line for line in hub.requests[before:] if "/api/" not in line] == []


def test_offline_the_cache_is_enough(client: Hub, hub: FakeHub, tmp_path: Path):
    client.fetch(NAME)
    client.fetch(NAME, "v1")
    before = len(hub.requests)
    assert find_checkpoint(NAME, hub=offline(tmp_path)).revision == NEW
    assert find_checkpoint(NAME, revision="v1", hub=offline(tmp_path)).revision == OLD
    assert find_checkpoint(NAME, revision=OLD, hub=offline(tmp_path)).revision == OLD
    assert len(hub.requests) == before


def test_offline_what_is_missing_is_named(client: Hub, hub: FakeHub, tmp_path: Path):
    with pytest.raises(CheckpointError, match="lacks all of it"):
        find_checkpoint(NAME, hub=offline(tmp_path))
    hub.files = {NEW: in_shards()}
    folder = client.fetch(NAME).folder
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks model-00002-of-00002"):
        find_checkpoint(NAME, hub=offline(tmp_path))


REFUSALS = {"GatedRepo": "is gated; accept", "RepoNotFound": "there is no model", "broken": "500"}


@pytest.mark.parametrize(("refuse", "message"), REFUSALS.items())
def test_what_the_hub_refuses_is_said_clearly(client: Hub, hub: FakeHub, refuse: str, message: str):
    hub.refuse = refuse
    with pytest.raises(CheckpointError, match=message):
        client.fetch(NAME)


def test_an_unknown_revision_is_named(client: Hub):
    with pytest.raises(CheckpointError, match="no revision v9; check --revision"):
        client.fetch(NAME, "v9")


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path):
    with refusing_port() as port:
        hub = Hub(endpoint=f"http://127.0.0.1:{port}", cache=tmp_path, is_offline=False)
        with pytest.raises(CheckpointError, match=r"cannot be reached.*HF_HUB_OFFLINE=1"):
            hub.fetch(NAME)


FAULTS: dict[str, tuple[dict[str, bytes], str]] = {
    "no config": ({"model.safetensors": b"x"}, "has no config"),
    "no safetensors": (
        {"config.json": json.dumps(SMALL_CONFIG).encode(), "pytorch_model.bin": b"x"},
        "no model.safetensors; it has pytorch_model.bin, which are not supported",
    ),
    "an unknown family": (
        {"config.json": b'{"model_type": "odd"}', "model.safetensors": b"x"},
        "model_type",
    ),
    "an index out of its folder": (
        {
            "config.json": json.dumps(SMALL_CONFIG).encode(),
            "model.safetensors.index.json": b'{"weight_map": {"a": "../../x.safetensors"}}',
        },
        "in the same folder",
    ),
}


@pytest.mark.parametrize(("files", "message"), FAULTS.values(), ids=FAULTS)
def test_what_is_not_supported_is_refused_before_weights_are_fetched(
    client: Hub, hub: FakeHub, files: dict[str, bytes], message: str
):
    hub.files = {NEW: files}
    with pytest.raises(CheckpointError, match=message):
        client.fetch(NAME)
    assert "resolve" not in " ".join(
        line for line in hub.requests if "model.safetensors" in line and "index" not in line
    )


def test_a_small_file_that_is_huge_is_refused_before_it_is_fetched(client: Hub, hub: FakeHub):
    class Huge(bytes):
        def __len__(self) -> int:
            return 1 << 40

    hub.files = {NEW: {**repository(), "tokenizer.json": Huge(b"x")}}
    with pytest.raises(CheckpointError, match=r"tokenizer\.json of 1,048,576\.0 MiB"):
        client.fetch(NAME)


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("someone/tiny-model", True),
        ("a/b.c_d-1", True),
        ("../secret", False),
        ("/etc/passwd", False),
        ("a/b/c", False),
        ("a/..", False),
        ("plain", False),
        ("a/b\n", False),
        ("a--b/c", False),
        ("a/b:Q4_K_M", True),
        ("a/b:UD-Q4_K_XL", True),
        ("a/b:tiny.Q8_0.gguf", True),
        ("a/b:", False),
        ("a/b:c/d", False),
        ("a/b:c:d", False),
        ("a:c/b", False),
        ("a/b:../c", False),
        ("a/b:Q4\n", False),
    ],
)
def test_only_owner_and_model_and_a_selector_make_a_hub_id(name: str, is_id: bool):
    assert is_hub_id(name) == is_id


@pytest.mark.parametrize("revision", ["../../x", "a b", "", "-x", "a/../b"])
def test_a_revision_leads_nowhere_else(tmp_path: Path, revision: str):
    hub = offline(tmp_path)
    with pytest.raises(CheckpointError, match=r"not a hub id|lacks all of it"):
        hub.fetch(NAME, revision)


def test_a_local_folder_comes_before_the_hub(tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    os.makedirs(NAME)
    with pytest.raises(CheckpointError, match=r"is empty"):
        find_checkpoint(NAME)


def test_a_local_model_has_no_revision(tmp_path: Path):
    with pytest.raises(ConfigError, match="--revision v1"):
        find_checkpoint(str(tmp_path), revision="v1")
    with pytest.raises(ConfigError, match="the bundled model is not one"):
        find_checkpoint(None, revision="v1")
    assert open_checkpoint(None).revision is None


def run_info(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "import sys; from cadenza.cli import main; sys.exit(main())",
        "info",
        NAME,
    ]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.soak
def test_the_command_line_takes_a_hub_id(hub: FakeHub, tmp_path: Path):
    with serving(hub) as endpoint:
        ran = run_info({"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"})
    assert (ran.returncode, NEW[:12] in ran.stdout) == (0, True), ran.stderr
    assert "fetching 1 of 1: model.safetensors" in ran.stderr


def test_the_command_line_honours_hf_hub_offline(tmp_path: Path):
    ran = run_info({"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    assert ran.returncode == 3
    assert "HF_HUB_OFFLINE is set and the cache lacks all of it" in ran.stderr


def test_a_local_model_loads_no_hub_library():
    code = (
        "import sys; from cadenza.checkpoint.opening import open_checkpoint;"
        "open_checkpoint(None); print(sorted(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cadenza.checkpoint.opening" in ran.stdout
    assert "huggingface_hub" not in ran.stdout
