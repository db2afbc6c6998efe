"""What a file of prompts holds, and what an answer to a question means."""

from pathlib import Path

import pytest

from cadenza.cli.words import read_prompts_file, yes_or_no
from cadenza.errors import ConfigError, InvalidRequestError


def read(tmp_path: Path, name: str, content: str | bytes, format=None):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_prompts_file(str(path), format)


def test_a_text_file_has_one_prompt_a_line_and_blank_lines_count_for_nothing(tmp_path: Path):
    assert read(tmp_path, "p.txt", "one \r\n\n  \n two") == ["one ", " two"]


def test_json_lines_hold_texts_and_token_ids(tmp_path: Path):
    lines = '{"prompt": "a\\nb"}\n{"prompt": [1, 2]}\n{"prompt_token_ids": [3]}\n"c"\n[4, 5]\n'
    assert read(tmp_path, "p.jsonl", lines) == ["a\nb", (1, 2), (3,), "c", (4, 5)]


def test_the_format_can_be_told_apart_from_the_name(tmp_path: Path):
    assert read(tmp_path, "p.txt", '{"prompt": "a"}', "jsonl") == ["a"]
    assert read(tmp_path, "p.jsonl", "[1]", "text") == ["[1]"]


@pytest.mark.parametrize(
    "line",
    [
        *("{", "1", "null", "[]", "[1, true]", '[1, "a"]', "{}", "[" * 5000),
        *('{"prompt": 1}', '{"text": "a"}', '{"prompt": "a", "max_tokens": 3}'),
    ],
)
def test_a_json_line_that_is_no_prompt_is_refused_with_its_number(tmp_path: Path, line: str):
    with pytest.raises(InvalidRequestError, match="line 3"):
        read(tmp_path, "p.jsonl", f'"fine"\n\n{line}\n')


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str):
    with pytest.raises(ConfigError, match="no prompts"):
        read(tmp_path, "p.txt", content)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts_file(str(tmp_path / "absent"), None)
    with pytest.raises(ConfigError, match="UTF-8"):
        read(tmp_path, "p.txt", b"\xff\xfe\x00")


def test_what_is_neither_yes_nor_no_is_no_answer():
    for word in ("y", "YES", " yes \n"):
        assert yes_or_no(word, default=False) is True
    for word in ("n", "No", "no\n"):
        assert yes_or_no(word, default=True) is False
    for word in ("maybe", "ja", "/bye", "yn", "0"):
        assert yes_or_no(word, default=True) is None
    assert yes_or_no("\n", default=True) is True
    assert yes_or_no("", default=False) is False
