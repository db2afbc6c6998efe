"""`make release`: what it refuses, how it cuts the changelog, and that archives are repeatable."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from tools import release, wheels

CHANGELOG = """# Changelog

## [Unreleased]

### What it does

Serves models.

### Changed

- One ([page](docs/gpu.md#a), [map](ARCHITECTURE.md), [site](https://a.b)).

### Added

- Two.

## [0.1.0] – 2026-01-01

The first.
"""


ONE = "- One ([page](../gpu.md#a), [map](../../ARCHITECTURE.md), [site](https://a.b))."


def test_the_page_stays_and_the_lists_go_to_a_page_of_their_own():
    cut = release.cut_changelog(CHANGELOG, "0.2.0", "2026-02-03")
    link = "Everything that changed: [0.2.0](docs/changes/0.2.0.md)."
    assert cut.changelog == (
        "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] – 2026-02-03\n\n"
        f"### What it does\n\nServes models.\n\n{link}\n\n## [0.1.0] – 2026-01-01\n\nThe first.\n"
    )
    assert cut.details == f"# Changes in 0.2.0\n\n## Changed\n\n{ONE}\n\n## Added\n\n- Two.\n"
    assert release.notes_of(cut.changelog, "0.2.0") == f"{cut.notes}\n"


@pytest.mark.parametrize(
    ("changelog", "version", "words"),
    [
        (CHANGELOG, "0.1.0", "has a section of 0.1.0"),
        (CHANGELOG.replace("### What it does\n\nServes models.\n\n", ""), "0.2.0", "needs a page"),
        (CHANGELOG.replace("Serves", "Serves\n" * 100), "0.2.0", "is longer than"),
        ("# Changelog\n", "0.2.0", "needs a page"),
    ],
)
def test_a_changelog_without_a_page_is_refused(changelog: str, version: str, words: str):
    with pytest.raises(release.ReleaseError, match=words):
        release.cut_changelog(changelog, version, "2026-02-03")


@pytest.mark.parametrize("version", ["1", "0.2", "v0.2.0", "0.2.0-beta", "0.2.0 "])
def test_what_is_no_version_is_refused(version: str):
    with pytest.raises(release.ReleaseError, match=r"is not X\.Y\.Z"):
        release.check_version(version)


def test_a_tree_with_changes_is_refused_and_names_them(tmp_path: Path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    release.check_tree(tmp_path)
    (tmp_path / "new.py").touch()
    with pytest.raises(release.ReleaseError, match=r"not committed:\n\?\? new\.py"):
        release.check_tree(tmp_path)


def packed(*names: str, mtime: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uid, member.uname = 3, mtime, mtime, "someone"
            archive.addfile(member, io.BytesIO(b"abc"))
    return file.getvalue()


def test_an_archive_of_the_same_files_has_the_same_bytes():
    one = wheels.repack(packed("a/x", "a/y", mtime=10), 400_000_000)
    assert one == wheels.repack(packed("a/y", "a/x", mtime=99), 400_000_000)
    with tarfile.open(fileobj=io.BytesIO(one)) as archive:
        assert [(each.name, each.mtime, each.uname) for each in archive] == [
            ("a/x", 400_000_000, ""),
            ("a/y", 400_000_000, ""),
        ]


@pytest.mark.parametrize(
    ("wheel", "target", "is_one"),
    [
        ("cadenza-1-py3-none-manylinux_2_28_aarch64.whl", "linux-aarch64", True),
        ("cadenza-1-py3-none-linux_aarch64.whl", "linux-aarch64", False),
        ("cadenza-1-py3-none-manylinux_2_34_x86_64.whl", "linux-aarch64", False),
        ("cadenza-1-py3-none-macosx_13_0_arm64.whl", "macos-arm64", True),
        ("cadenza-1-py3-none-any.whl", "macos-arm64", False),
    ],
)
def test_a_wheel_names_its_platform(wheel: str, target: str, is_one: bool):
    check = wheels.check_platform
    if is_one:
        check(Path(wheel), wheels.TARGETS[target])
    else:
        with pytest.raises(SystemExit, match="does not say that it is for"):
            check(Path(wheel), wheels.TARGETS[target])
