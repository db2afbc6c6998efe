"""`PageFolder`: only what was written is read, whoever uses the folder and whenever one stops."""

import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cadenza.engine.page_folder import (
    OVERHEAD_BYTES,
    SCAN_SHARE,
    FolderAccess,
    PageFolder,
    StoredFile,
    find_files,
)
from cadenza.errors import ConfigError
from tests.engine.stored import files_of

MIN_BYTES = 1 << 20
KEY = bytes(range(32))
CONTENT = b"the keys and values of a page" * 50


def open_folder(folder: Path, fingerprint: str = "a model", most: int = MIN_BYTES) -> PageFolder:
    return PageFolder(folder, fingerprint, most)


def stored(folder: Path) -> Path:
    """The file of one page."""
    pages = open_folder(folder)
    assert pages.write(KEY, CONTENT)
    pages.close()
    (path,) = files_of(folder)
    return path


def test_a_page_is_read_by_the_next_engine(tmp_path: Path) -> None:
    stored(tmp_path)
    pages = open_folder(tmp_path)
    assert KEY in pages
    assert pages.read(KEY) == CONTENT
    assert not pages.write(KEY, CONTENT), "it is there already"
    pages.close()


def test_what_was_never_written_is_absent(tmp_path: Path) -> None:
    pages = open_folder(tmp_path)
    assert KEY not in pages
    assert pages.read(KEY) == "absent"
    pages.close()


def flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x10
        path.write_bytes(data)

    return damage


def cut(size: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:size])

    return damage


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


DAMAGES = {
    "flip in the magic": flip(0),
    "flip in the key": flip(20),
    "flip in the length": flip(50),
    "flip in the content": flip(300),
    "flip in the MAC": flip(-1),
    "empty": cut(0),
    "cut in the header": cut(30),
    "cut in the content": cut(OVERHEAD_BYTES + 10),
    "cut by a byte": cut(-1),
    "a byte more": grow,
}


def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path) -> None:
    path = stored(tmp_path)
    pages = open_folder(tmp_path)
    for name, damage in DAMAGES.items():
        damage(path)
        assert pages.read(KEY) == "damaged", name
        assert not path.exists()
        assert KEY not in pages
        assert pages.write(KEY, CONTENT), "it can be written anew"
        assert pages.read(KEY) == CONTENT
    pages.close()


def test_a_page_under_another_name_is_damaged(tmp_path: Path) -> None:
    path = stored(tmp_path)
    other = bytes([*KEY[:-1], 255])
    shutil.copy(path, path.with_name(other.hex()))
    pages = open_folder(tmp_path)
    assert pages.read(other) == "damaged"
    assert pages.read(KEY) == CONTENT
    pages.close()


@pytest.mark.parametrize("differs", ["fingerprint", "secret"])
def test_pages_of_another_model_or_secret_are_not_taken(tmp_path: Path, differs: str) -> None:
    path = stored(tmp_path / "one")
    other = open_folder(tmp_path / ("one" if differs == "fingerprint" else "two"), "another model")
    if differs == "secret":
        other.close()
        other = open_folder(tmp_path / "two")
    mine = open_folder(tmp_path / "one")
    assert other.key_secret != mine.key_secret, "keys have nothing in common"
    assert KEY not in other
    assert other.read(KEY) == "absent"
    other.write(KEY, b"something else")
    (target,) = [
        each for each in files_of(tmp_path / "one") + files_of(tmp_path / "two") if each != path
    ]
    shutil.copy(path, target)
    assert other.read(KEY) == "damaged", "even if the file is put there"
    other.close()
    mine.close()


def test_the_secret_is_its_owners_only(tmp_path: Path) -> None:
    open_folder(tmp_path).close()
    secret = tmp_path / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    before = secret.read_bytes()
    open_folder(tmp_path).close()
    assert secret.read_bytes() == before
    secret.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        open_folder(tmp_path)


def test_a_secret_of_another_size_is_refused(tmp_path: Path) -> None:
    open_folder(tmp_path).close()
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes, not 32"):
        open_folder(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--prefix-cache-disk .* cannot be used"):
        open_folder(tmp_path / "file" / "folder")


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for mode in (0o770, 0o707, 0o720):
        folder.chmod(mode)
        with pytest.raises(ConfigError, match=r"can be written by others.*chmod go-w"):
            open_folder(folder)
    folder.chmod(0o755)
    open_folder(folder).close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "secret"])
def test_what_belongs_to_another_user_is_refused(tmp_path: Path, name: str) -> None:
    open_folder(tmp_path).close()
    os.chown(tmp_path / name, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to another user \(uid 12345, not 0\)"):
        open_folder(tmp_path)


def test_folders_of_pages_are_their_owners_only(tmp_path: Path) -> None:
    path = stored(tmp_path)
    assert [each.stat().st_mode & 0o777 for each in (path.parent, path.parent.parent)] == [
        0o700
    ] * 2


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    path = stored(tmp_path)
    moved = path.rename(tmp_path / "moved")
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    pages = open_folder(tmp_path)
    assert pages.read(KEY) == "absent"
    pages.close()


def test_a_folder_whose_lock_is_held_is_refused_in_the_end(tmp_path: Path) -> None:
    open_folder(tmp_path).close()
    with (tmp_path / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="has been locked by another process"):
            PageFolder(tmp_path, "a model", MIN_BYTES, FolderAccess(lock_within_s=0.0))
    open_folder(tmp_path).close()


def full_disk(path: Path, data: bytes) -> None:
    path.write_bytes(data[:100])
    raise OSError(28, "No space left on device")


def test_a_full_disk_ends_writing_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(tmp_path)
    pages = PageFolder(tmp_path, "a model", MIN_BYTES, FolderAccess(write_file=full_disk))
    for index in range(3):
        assert not pages.write(bytes([index]) * 32, CONTENT)
    assert pages.error == "No space left on device"
    assert [each.message for each in caplog.records] == [
        "the prefix cache on disk is off: No space left on device"
    ]
    assert files_of(tmp_path) == [path]
    assert pages.read(KEY) == CONTENT, "what is there can still be read"
    pages.close()
    assert not list(tmp_path.glob("writing-*"))


def test_pages_too_large_for_the_bound_end_writing(tmp_path: Path) -> None:
    pages = open_folder(tmp_path)
    assert not pages.write(KEY, bytes(MIN_BYTES // SCAN_SHARE))
    assert pages.error is not None
    assert "--prefix-cache-disk-bytes is too small" in pages.error
    pages.close()


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_of(folder))


def test_two_engines_on_one_folder_keep_the_bound_together(tmp_path: Path) -> None:
    pair = [open_folder(tmp_path), open_folder(tmp_path, "another model")]
    content = bytes(20_000)
    for index in range(80):
        for pages in pair:
            assert pages.write(bytes([index]) * 32, content)
            assert num_bytes(tmp_path) <= MIN_BYTES
    assert num_bytes(tmp_path) > MIN_BYTES // 2
    for pages in pair:
        assert pages.read(bytes([79]) * 32) == content
        pages.close()


def test_without_a_bound_they_would_exceed_it(tmp_path: Path) -> None:
    pages = open_folder(tmp_path, most=1 << 30)
    for index in range(80):
        pages.write(bytes([index]) * 32, bytes(20_000))
    assert num_bytes(tmp_path) > MIN_BYTES
    pages.close()


def test_what_is_read_outlives_what_is_not(tmp_path: Path) -> None:
    pages = open_folder(tmp_path)
    content = bytes(20_000)
    for index in range(120):
        pages.write(bytes([index]) * 32, content)
        assert pages.read(bytes(32)) == content
        os.utime(sorted(tmp_path.glob(f"*/{index:02x}/*"))[0], ns=(0, index * 10**9))
        os.utime(sorted(tmp_path.glob("*/00/*"))[0], ns=(0, 10**15))
    assert bytes([1]) * 32 not in pages
    assert pages.read(bytes([1]) * 32) == "absent"
    pages.close()


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_writes_stays(
    tmp_path: Path,
) -> None:
    living = open_folder(tmp_path)
    (mine,) = tmp_path.glob("writing-*")
    dead = tmp_path / "writing-1-dead"
    dead.mkdir()
    (dead / KEY.hex()).write_bytes(CONTENT)
    open_folder(tmp_path).close()
    assert list(tmp_path.glob("writing-*")) == [mine]
    assert living.write(KEY, CONTENT)
    living.close()


NOT_PAGES = (
    "photographs/ab/large.raw",
    "objects/ab/" + 38 * "c",
    f"{32 * 'a'}/ab/notes",
    f"{32 * 'a'}/zz/{64 * 'b'}",
    f"{32 * 'a'}/abc/{64 * 'b'}",
    f"{31 * 'a'}/ab/{64 * 'b'}",
    f"writing-1-2/ab/{64 * 'b'}",
)


def test_files_that_are_no_pages_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    open_folder(tmp_path).close()
    for name in NOT_PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(2 * MIN_BYTES))
    assert list(find_files(tmp_path)) == []
    open_folder(tmp_path).close()
    # The folder of a process that is gone is removed as a whole.
    assert [name for name in NOT_PAGES if not (tmp_path / name).exists()] == [NOT_PAGES[-1]]


@pytest.mark.parametrize("level", range(3))
def test_links_are_not_followed(tmp_path: Path, level: int) -> None:
    parts = [32 * "a", "bb", 64 * "b"]
    elsewhere = tmp_path / "elsewhere"
    target = elsewhere.joinpath(*parts[level:])
    target.parent.mkdir(parents=True)
    target.write_bytes(bytes(2 * MIN_BYTES))
    link = (tmp_path / "folder").joinpath(*parts[: level + 1])
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere / parts[level])
    assert list(find_files(tmp_path / "folder")) == []
    open_folder(tmp_path / "folder").close()
    assert target.exists()


def test_a_page_beyond_the_bound_is_removed_without_links(tmp_path: Path) -> None:
    """The control of those above."""
    path = tmp_path / (32 * "a") / "bb" / (64 * "b")
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(2 * MIN_BYTES))
    open_folder(tmp_path).close()
    assert not path.exists()


def test_a_folder_that_cannot_be_listed_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    def failing(folder: Path) -> Iterator[StoredFile]:
        raise OSError(5, "Input/output error")

    with pytest.raises(ConfigError, match=r"cannot be used: Input/output error"):
        PageFolder(tmp_path, "a model", MIN_BYTES, FolderAccess(find_files=failing))
    assert not list(tmp_path.glob("writing-*"))


def test_a_folder_that_can_no_longer_be_listed_ends_writing(tmp_path: Path) -> None:
    is_broken = False

    def failing(folder: Path) -> Iterator[StoredFile]:
        if is_broken:
            raise OSError(5, "Input/output error")
        return find_files(folder)

    pages = PageFolder(tmp_path, "a model", MIN_BYTES, FolderAccess(find_files=failing))
    is_broken = True
    assert pages.write(KEY, bytes(20_000))
    assert pages.error is None
    assert pages.write(KEY[::-1], bytes(20_000))
    assert pages.error == "Input/output error"
    assert pages.read(KEY) == bytes(20_000)
    pages.close()


def test_a_folder_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    pages = open_folder(tmp_path)
    assert list(tmp_path.glob("writing-*"))
    pages.close()
    pages.close()
    pages = open_folder(tmp_path)
    del pages
    gc.collect()
    assert not list(tmp_path.glob("writing-*"))


WRITER = """
import sys
from pathlib import Path
from cadenza.engine.page_folder import FolderAccess, PageFolder

def slowly(path, data):
    with path.open("wb") as file:
        for at in range(0, len(data), 100):
            file.write(data[at : at + 100])
            file.flush()
            if at == 1000 and path.name.startswith("05"):
                print("half", flush=True)
                sys.stdin.read()

pages = PageFolder(Path(sys.argv[1]), "a model", 1 << 20, FolderAccess(write_file=slowly))
for index in range(9):
    pages.write(bytes([index]) * 32, bytes([index]) * 5000)
"""


def test_a_process_killed_while_writing_leaves_only_complete_pages(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert list(tmp_path.glob("writing-*/05*")), "it was killed in the middle of a page"
    pages = open_folder(tmp_path)
    assert not list(tmp_path.glob("writing-*/05*"))
    for index in range(9):
        found = pages.read(bytes([index]) * 32)
        assert found == (bytes([index]) * 5000 if index < 5 else "absent")
    pages.close()
