"""`cadenza list`, `pull` and `rm`: models come into the hub's cache, are listed, and leave it."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza.checkpoint.hub import Hub
from cadenza.checkpoint.hub_cache import HubCache
from cadenza.cli.cached_models import is_agreed
from cadenza.errors import InvalidRequestError
from tests.checkpoint.files import SMALL_CONFIG, encode_file, encode_tensors, small_model
from tests.checkpoint.hub_server import NAME, FakeHub, serving
from tests.cli.harness import Ran

OLD, NEW = "a1" * 20, "b2" * 20
ALL = """
import json, sys
from cadenza.cli import main
codes = []
for words in json.loads(sys.argv[1]):
    codes.append(main(words))
    print("\\0", end="", flush=True)
print(codes)
"""


def files(template: bytes) -> dict[str, bytes]:
    return {
        "config.json": json.dumps(SMALL_CONFIG).encode(),
        "model.safetensors": encode_file(*encode_tensors(small_model()[1])),
        "chat_template.jinja": template,
        "README.md": b"never",
    }


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    hub = FakeHub(refs={"main": NEW, "v1": OLD}, files={OLD: files(b"old"), NEW: files(b"new")})
    with serving(hub) as endpoint:
        yield endpoint


@pytest.fixture
def cache(tmp_path: Path, endpoint: str) -> HubCache:
    """With two revisions of a model that share their weights."""
    hub = Hub(endpoint=endpoint, cache=tmp_path, is_offline=False, report=lambda _: None)
    for revision in ("v1", "main"):
        hub.fetch(NAME, revision)
    return HubCache(folder=tmp_path)


def commands(endpoint: str, cache: Path, *lines: str) -> Ran:
    """Several commands in a process of their own, whose hub is the stand-in."""
    environment = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", ALL, json.dumps([line.split() for line in lines])],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def test_a_model_is_pulled_listed_and_removed(endpoint: str, tmp_path: Path):
    ran = commands(
        endpoint,
        tmp_path / "hub",
        "list",
        f"pull {NAME}",
        "list",
        "list --json",
        f"rm {NAME}",
        f"rm {NAME} --yes",
        "list --json",
    )
    none, pulled, table, listed, unasked, removed, empty, codes = ran.out.split("\0")
    assert "cache has no models; `cadenza pull owner/model`" in none
    assert f"{NAME}: commit {NEW[:12]}, in {tmp_path}" in pulled
    assert NAME in table
    assert "main" in table
    assert "KiB" in table
    found = json.loads(listed)
    assert (found["model"], found["commit"], found["refs"]) == (NAME, NEW, ["main"])
    assert (found["num_files"], found["size_bytes"]) == (
        3,
        sum(map(len, files(b"new").values())) - 5,
    )
    assert Path(found["path"]).parts[-1] == NEW
    assert "give --yes" in ran.err
    assert unasked == ""
    assert "Removed 1 revision: " in removed
    assert empty == ""
    assert json.loads(codes) == [0, 0, 0, 0, 2, 0, 0]


class Typed(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "is_yes"), [("y\n", True), ("\n", False), ("n\n", False)])
def test_what_would_be_removed_is_told_before_it_is(
    cache: HubCache, capsys: pytest.CaptureFixture[str], typed: str, is_yes: bool
):
    chosen = cache.chosen(NAME)
    assert is_agreed(chosen, cache.freed_bytes(chosen), Typed(typed)) is is_yes
    told = capsys.readouterr().err
    assert f"{NAME} (v1), " in told
    assert told.endswith(" KiB? [y/N] ")


def test_each_revision_is_listed_by_what_it_is_called(cache: HubCache):
    found = cache.models()
    assert {each.commit: each.refs for each in found} == {OLD: ("v1",), NEW: ("main",)}
    assert {each.model for each in found} == {NAME}
    assert HubCache(folder=Path("/nonexistent")).models() == []


@pytest.mark.parametrize("revision", ["v1", OLD, OLD[:6]])
def test_one_revision_leaves_and_shared_files_stay(cache: HubCache, revision: str):
    chosen = cache.chosen(NAME, revision)
    assert [each.commit for each in chosen] == [OLD]
    assert cache.freed_bytes(chosen) < 4096  # its own template; the weights are shared
    cache.remove(chosen)
    (left,) = cache.models()
    assert left.commit == NEW
    assert (left.path / "model.safetensors").read_bytes() == files(b"")["model.safetensors"]


def test_all_revisions_of_a_name_leave(cache: HubCache):
    cache.remove(cache.chosen(NAME))
    assert cache.models() == []


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("someone/tiny-modle", None, f"did you mean {NAME}"),
        ("zzz", None, "`cadenza list` shows"),
        (f"{NAME}:Q4_0", None, "leave :Q4_0 out"),
        (NAME, "v2", "no revision 'v2' in the cache; it has "),
        (NAME, "a1", "no revision 'a1'"),
    ],
)
def test_what_the_cache_has_not_is_refused(
    cache: HubCache, name: str, revision: str | None, said: str
):
    with pytest.raises(InvalidRequestError) as caught:
        cache.chosen(name, revision)
    assert said in str(caught.value)
    assert len(cache.models()) == 2
