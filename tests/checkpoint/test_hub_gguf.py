"""GGUF models of the hub: which file a name means, its parts, and the cache when offline."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.checkpoint.gguf.files import (
    choose_gguf,
    choose_projector,
    first_files,
    split_names,
)
from cadenza.checkpoint.hub import Hub
from cadenza.errors import CheckpointError
from cadenza.loading.build import find_checkpoint
from tests.checkpoint.files import encode_file, encode_tensors, small_model
from tests.checkpoint.gguf_models import convert
from tests.checkpoint.hub_server import NAME, FakeHub, serving

COMMIT = "c" * 40
WHERE = {"where": "the model", "model": NAME}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two models in one file each, one in several in a folder, and what lies beside them."""
    folder = tmp_path_factory.mktemp("models")
    model = convert("qwen3", folder / "original")
    names = ("tiny-F16.gguf", "tiny-BF16.gguf")
    for name in names:
        model.kind = name[5:-5]
        model.write(folder / name)
    (folder / "F32").mkdir()
    model.kind = "F32"
    model.write(folder / "F32" / "tiny-F32.gguf", num_per_file=20)
    found = {name: (folder / name).read_bytes() for name in names}
    found |= {f"F32/{path.name}": path.read_bytes() for path in (folder / "F32").iterdir()}
    return {**found, "README.md": b"never", "mmproj-tiny-F16.gguf": b"never", "config.json": b"{}"}


@pytest.fixture
def hub(files: dict[str, bytes]) -> FakeHub:
    return FakeHub(refs={"main": COMMIT}, files={COMMIT: dict(files)})


@pytest.fixture
def client(hub: FakeHub, tmp_path: Path) -> Iterator[Hub]:
    with serving(hub) as endpoint:
        yield Hub(endpoint=endpoint, cache=tmp_path, is_offline=False, report=lambda line: None)


def fetched(hub: FakeHub) -> set[str]:
    resolved = [line.split("/resolve/")[1] for line in hub.requests if "/resolve/" in line]
    return {line.split()[0][len(COMMIT) + 1 :] for line in resolved}


def test_a_selector_names_one_file_which_is_fetched_with_its_tower(
    client: Hub, hub: FakeHub, tmp_path: Path
):
    checkpoint = find_checkpoint(f"{NAME}:bf16", hub=client)
    assert checkpoint.config.dtype == "bfloat16"
    assert checkpoint.revision == COMMIT
    assert fetched(hub) == {"tiny-BF16.gguf", "mmproj-tiny-F16.gguf"}
    hub.requests.clear()
    blind = replace(client, has_images=False, cache=tmp_path / "other")
    find_checkpoint(f"{NAME}:f16", hub=blind)
    assert fetched(hub) == {"tiny-F16.gguf"}, "without the tower"


def test_all_parts_of_a_model_are_fetched(client: Hub, hub: FakeHub):
    checkpoint = find_checkpoint(f"{NAME}:F32", hub=client)
    assert checkpoint.config.dtype == "float32"
    assert len(checkpoint.weights.files) > 1
    assert fetched(hub) == {f"F32/{file.name}" for file in checkpoint.weights.files}


def test_several_models_without_a_selector_are_listed(client: Hub):
    with pytest.raises(CheckpointError, match=r"3 GGUF models: F32/.*tiny-F16.gguf; choose one"):
        client.fetch(NAME)


def test_the_only_model_needs_no_selector(client: Hub, hub: FakeHub, files: dict[str, bytes]):
    hub.files = {COMMIT: {name: files[name] for name in ("tiny-F16.gguf", "README.md")}}
    assert find_checkpoint(NAME, hub=client).config.dtype == "float16"


def test_safetensors_come_first_without_a_selector(client: Hub, hub: FakeHub):
    weights = encode_file(*encode_tensors(small_model()[1]))
    hub.files = {COMMIT: {**hub.files[COMMIT], "model.safetensors": weights}}
    with pytest.raises(CheckpointError, match=r"config\.json has neither"):
        client.fetch(NAME)
    assert fetched(hub) == {"config.json"}


def test_a_selector_that_matches_nothing_says_what_there_is(client: Hub):
    with pytest.raises(
        CheckpointError, match=r"has no GGUF model Q4_K_M; it has F32/tiny-F32-00001"
    ):
        client.fetch(f"{NAME}:Q4_K_M")


def test_a_selector_for_a_folder_of_safetensors_is_refused(client: Hub, hub: FakeHub):
    hub.files = {COMMIT: {"config.json": b"{}", "model.safetensors": b""}}
    with pytest.raises(CheckpointError, match="has no GGUF files; leave out :Q8_0"):
        client.fetch(f"{NAME}:Q8_0")


def test_a_missing_part_is_named(client: Hub, hub: FakeHub):
    last = max(name for name in hub.files[COMMIT] if name.startswith("F32/"))
    hub.files = {COMMIT: {k: v for k, v in hub.files[COMMIT].items() if k != last}}
    with pytest.raises(CheckpointError, match=f"has no {last}, which F32/"):
        client.fetch(f"{NAME}:F32")


@pytest.mark.parametrize("name", ["../evil.gguf", "/evil.gguf", "a/../../evil.gguf", ".gguf"])
def test_a_path_out_of_the_repository_is_not_fetched(client: Hub, hub: FakeHub, name: str):
    hub.files = {COMMIT: {name: b"never"}}
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        client.fetch(NAME)
    assert fetched(hub) == set()


def test_offline_the_cache_is_enough(client: Hub, tmp_path: Path):
    offline = Hub(endpoint="http://127.0.0.1:1", cache=tmp_path, is_offline=True)
    for selector in ("F32", "tiny-F16"):
        there = find_checkpoint(f"{NAME}:{selector}", hub=client)
        assert find_checkpoint(f"{NAME}:{selector}", hub=offline).digest == there.digest
    with pytest.raises(CheckpointError, match="has no GGUF model BF16; it has F32/tiny-F32-00001"):
        offline.fetch(f"{NAME}:BF16")
    part = max(tmp_path.rglob("tiny-F32-*.gguf"))
    part.unlink()
    with pytest.raises(CheckpointError, match=f"the cache lacks {part.name} of"):
        offline.fetch(f"{NAME}:F32")


NAMES = [
    "Model-7B-Q4_K_M.gguf",
    "Model-7B-Q4_K_S.gguf",
    "Model-7B.Q8_0.gguf",
    "Model-7B-UD-Q4_K_XL.gguf",
    "BF16/Model-7B-BF16-00001-of-00002.gguf",
    "BF16/Model-7B-BF16-00002-of-00002.gguf",
    "mmproj-Model-7B-Q8_0.gguf",
    "imatrix.gguf",
]


@pytest.mark.parametrize(
    ("selector", "name"),
    [
        ("Q4_K_M", "Model-7B-Q4_K_M.gguf"),
        ("q8_0", "Model-7B.Q8_0.gguf"),
        ("UD-Q4_K_XL", "Model-7B-UD-Q4_K_XL.gguf"),
        ("bf16", "BF16/Model-7B-BF16-00001-of-00002.gguf"),
        ("Model-7B-Q4_K_S.gguf", "Model-7B-Q4_K_S.gguf"),
        ("Model-7B-BF16", "BF16/Model-7B-BF16-00001-of-00002.gguf"),
    ],
)
def test_a_selector_is_a_part_of_the_name_or_all_of_it(selector: str, name: str):
    assert choose_gguf(NAMES, selector, **WHERE) == name


@pytest.mark.parametrize(("selector", "count"), [("7B", 5), ("Model", 5), (None, 5)])
def test_a_selector_of_several_files_is_refused(selector: str | None, count: int):
    with pytest.raises(CheckpointError, match=f"has {count} GGUF models.*choose one by a part"):
        choose_gguf(NAMES, selector, **WHERE)


@pytest.mark.parametrize("selector", ["Q4_K", "4_K_M", "Q4", "imatrix", "K_M"])
def test_part_of_a_word_matches_nothing(selector: str):
    with pytest.raises(CheckpointError, match=f"has no GGUF model {selector}; it has BF16/"):
        choose_gguf(NAMES, selector, **WHERE)


def test_the_files_of_a_model_are_named_by_any_of_them():
    assert split_names("m-00002-of-00003.gguf") == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert split_names("m.gguf") == ["m.gguf"]
    assert first_files(["b-00002-of-00002.gguf", "b-00001-of-00002.gguf", "a.GGUF", "x.bin"]) == [
        "a.GGUF",
        "b-00001-of-00002.gguf",
    ]


def test_a_folder_with_several_models_lists_them(tmp_path: Path, files: dict[str, bytes]):
    for name in ("tiny-F16.gguf", "tiny-BF16.gguf"):
        (tmp_path / name).write_bytes(files[name])
    with pytest.raises(
        CheckpointError, match=r"2 GGUF models: tiny-BF16.gguf, tiny-F16.gguf; name"
    ):
        find_checkpoint(tmp_path)
    (tmp_path / "tiny-F16.gguf").unlink()
    assert find_checkpoint(tmp_path).config.dtype == "bfloat16"


def test_of_several_towers_the_one_in_16_bits_in_the_models_folder_is_meant():
    names = [
        "model-Q4_K_M.gguf",
        "mmproj-model-BF16.gguf",
        "mmproj-model-Q8_0.gguf",
        "other/mmproj-model-F16.gguf",
    ]
    assert choose_projector(names, "model-Q4_K_M.gguf") == "mmproj-model-BF16.gguf"
    names.append("mmproj-model-f16.gguf")
    assert choose_projector(names, "model-Q4_K_M.gguf") == "mmproj-model-f16.gguf"
    assert choose_projector(names, "other/model.gguf") == "other/mmproj-model-F16.gguf"
    assert choose_projector(names, "third/model.gguf") is None
