"""Which pooling a checkpoint asks for: its sentence-transformers files, or GGUF metadata."""

import json
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.generation_defaults import DefaultPooling
from cadenza.checkpoint.opening import open_checkpoint
from tests.checkpoint.files import write_folder
from tests.checkpoint.gguf_models import convert

MODULES = ["Transformer", "Pooling", "Normalize"]


def folder_with(folder: Path, pooling: Any = None, modules: Any = None) -> Path:
    write_folder(folder)
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def modules_of(names: list[str]) -> list[dict[str, Any]]:
    return [
        {"idx": at, "name": str(at), "path": "", "type": f"sentence_transformers.models.{name}"}
        for at, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (None, "last"),
        ({"word_embedding_dimension": 16}, "mean"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_the_pooling_is_that_of_the_folder(tmp_path: Path, pooling: Any, expected: str) -> None:
    folder = folder_with(tmp_path, pooling, modules_of(MODULES))
    assert open_checkpoint(folder).pooling == DefaultPooling(pooling=expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls_token"),
        ({"pooling_mode_lasttoken": True}, "lasttoken' and 'pooling_mode_mean_tokens"),
        ({"pooling_mode_mean_tokens": False}, "no pooling"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
    ],
)
def test_a_pooling_that_is_not_built_is_no_default(
    tmp_path: Path, pooling: Any, named: str
) -> None:
    found = open_checkpoint(folder_with(tmp_path, pooling)).pooling
    assert found.pooling is None
    assert named in found.reason


def test_a_module_that_is_not_built_leaves_no_default(tmp_path: Path) -> None:
    modules = modules_of(["Transformer", "Pooling", "Dense"])
    found = open_checkpoint(folder_with(tmp_path, None, modules)).pooling
    assert found.pooling is None
    assert "models.Dense" in found.reason


@pytest.mark.parametrize("modules", [7, ["Pooling"], [{"type": 5}], {"idx": 0}])
def test_modules_that_are_none_leave_no_default(tmp_path: Path, modules: Any) -> None:
    check_none(open_checkpoint(folder_with(tmp_path, None, modules)).pooling, "modules.json")


def check_none(found: DefaultPooling, named: str) -> None:
    assert found.pooling is None
    assert named in found.reason


def test_broken_files_leave_no_default(tmp_path: Path) -> None:
    """The model can be opened: generation needs none of them."""
    folder = folder_with(tmp_path, {"pooling_mode_mean_tokens": 3})
    check_none(open_checkpoint(folder).pooling, "pooling_mode_mean_tokens")
    (folder / "1_Pooling" / "config.json").write_text("{")
    check_none(open_checkpoint(folder).pooling, "config.json")
    (folder / "modules.json").write_text("[" * 60_000)
    check_none(open_checkpoint(folder).pooling, "modules.json is not valid JSON")


@pytest.mark.parametrize(
    ("kind", "expected"), [(None, "last"), (1, "mean"), (2, None), (3, "last")]
)
def test_a_gguf_file_says_it_in_its_metadata(
    tmp_path: Path, kind: int | None, expected: str | None
) -> None:
    model = convert("llama", tmp_path / "folder")
    if kind is not None:
        model.metadata["pooling_type"] = kind
    path = tmp_path / "model.gguf"
    model.write(path)
    found = open_checkpoint(path).pooling
    assert found.pooling == expected
    assert bool(found.reason) is (expected is None)


def test_a_gguf_file_with_another_number_leaves_no_default(tmp_path: Path) -> None:
    model = convert("llama", tmp_path / "folder")
    model.metadata["pooling_type"] = 9
    path = tmp_path / "model.gguf"
    model.write(path)
    check_none(open_checkpoint(path).pooling, "pooling_type")
