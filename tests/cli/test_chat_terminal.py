"""The terminal's part of `cadenza chat`: wrapped words, and what was typed in earlier ones."""

import re
from pathlib import Path

import pytest

from cadenza.cli.chat_terminal import MAX_LINES, InputHistory, WordWrap, completions

readline = pytest.importorskip("readline")

WIDTH = 24


def screen(written: str) -> list[str]:
    """The lines of a terminal without an edge, after cursor left and erase to the end of line."""
    lines, column = [""], 0
    for back, erase, char in re.findall(r"\x1b\[(\d+)D|(\x1b\[K)|(.)", written, re.DOTALL):
        if back:
            column -= int(back)
        elif erase:
            lines[-1] = lines[-1][:column]
        elif char == "\n":
            lines.append("")
            column = 0
        else:
            lines[-1] = lines[-1][:column] + char + lines[-1][column + 1 :]
            column += 1
    return lines


def wrapped(*parts: str, width: int = WIDTH) -> list[str]:
    written: list[str] = []
    wrap = WordWrap(written.append, lambda: width)
    for part in parts:
        wrap(part)
    return screen("".join(written))


TEXT = "The quick brown fox jumps over the lazy dog. One two three four five six seven."


@pytest.mark.parametrize("size", [1, 3, 7, len(TEXT)])
def test_lines_break_between_words_however_the_text_comes(size: int):
    parts = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    lines = wrapped(*parts)
    assert all(len(line) < WIDTH for line in lines)
    assert " ".join(line.rstrip() for line in lines) == TEXT
    assert lines[0].rstrip() == "The quick brown fox"


def test_line_ends_and_indents_stay():
    assert wrapped("a\n  - b\n\n  - c") == ["a", "  - b", "", "  - c"]


def test_a_word_longer_than_a_line_is_cut():
    lines = wrapped("see " + "x" * 60)
    assert "".join(lines).count("x") == 60
    assert all(len(line) < WIDTH for line in lines)


def test_wide_characters_break_anywhere_and_count_as_two_cells():
    lines = wrapped("日本語" * 10)
    assert [len(line) for line in lines] == [11, 11, 8]


def test_code_is_left_as_it_is_and_text_after_it_is_wrapped_again():
    code = "    return " + " + ".join("abcdefgh")
    lines = wrapped(f"```python\n{code}\n```\n{TEXT}")
    assert lines[1] == code
    assert lines[3].rstrip() == "The quick brown fox"


@pytest.mark.parametrize("width", [0, 10])
def test_a_terminal_that_cannot_go_back_gets_the_text_alone(width: int):
    assert wrapped(TEXT, width=width) == [TEXT]


def remembered() -> list[str]:
    return [
        readline.get_history_item(index + 1)
        for index in range(readline.get_current_history_length())
    ]


@pytest.fixture(autouse=True)
def clean_readline():
    readline.clear_history()
    yield
    readline.clear_history()
    readline.set_auto_history(True)


def test_what_was_typed_is_there_in_the_next_conversation(tmp_path: Path):
    file = tmp_path / "cache" / "history"
    first = InputHistory(file)
    first.load()
    for text in ("hello", "two\nlines", "two\nlines", "  ", "/bye"):
        first.add(text)
    readline.clear_history()
    InputHistory(file).load()
    assert remembered() == ["hello", "two\nlines", "/bye"]
    assert file.stat().st_mode & 0o777 == 0o600


def test_without_a_file_only_this_process_knows(tmp_path: Path):
    history = InputHistory(None)
    history.load()
    history.add("hello")
    assert remembered() == ["hello"]


def test_a_long_history_is_cut_and_a_damaged_line_is_passed_over(tmp_path: Path):
    file = tmp_path / "history"
    lines = [f'"{number}"' for number in range(2 * MAX_LINES + 5)]
    file.write_text("\n".join([*lines, "{not json", "12", '"last"']) + "\n")
    InputHistory(file).load()
    assert (len(remembered()), remembered()[-1]) == (MAX_LINES, "last")
    assert len(file.read_text().splitlines()) == MAX_LINES


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    history = InputHistory(tmp_path / "file" / "history")
    history.load()
    history.add("hello")
    assert remembered() == ["hello"]


def test_tab_completes_commands_and_the_files_of_images(tmp_path: Path):
    (tmp_path / "a b").mkdir()
    for name in ("ab.png", "other.png", ".hidden", "a b/in.png"):
        (tmp_path / name).touch()
    commands = ("/image", "/help", "/set")
    assert completions("/i", commands, "/image") == ["/image "]
    assert completions("/", commands, "/image") == ["/image ", "/help ", "/set "]
    at = f"/image {tmp_path}"
    assert completions(f"{at}/a", commands, "/image") == [f"{at}/a b/", f"{at}/ab.png"]
    assert completions(f"{at}/a b/", commands, "/image") == [f"{at}/a b/in.png"]
    assert completions(f"{at}/.h", commands, "/image") == [f"{at}/.hidden"]
    assert len(completions(f"{at}/", commands, "/image")) == 3
    for line in ("hello", "/set o", "/image /nowhere/", "/image a\0b"):
        assert completions(line, commands, "/image") == []
