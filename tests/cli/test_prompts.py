"""Which word is the model, and what a file of prompts holds."""

from pathlib import Path

import pytest

from cadenza.cli.prompts import only_model, read_prompts_file, read_words
from cadenza.errors import ConfigError, InvalidRequestError


def test_words_are_prompts_for_the_bundled_model():
    words = ("The capital of France is", "and")
    assert read_words(words, None) == (None, words)


def test_a_first_word_that_is_a_model_folder_is_the_model(model: Path):
    folder = str(model)
    assert read_words([folder, "a", folder], None) == (folder, ("a", folder))


def test_a_first_word_that_is_a_gguf_file_or_a_folder_with_one_is_the_model(tmp_path: Path):
    file = tmp_path / "my model.gguf"
    file.touch()
    for word in (str(file), str(tmp_path)):
        assert read_words([word, "a"], None) == (word, ("a",))


def test_a_first_word_that_names_a_model_of_the_package_is_the_model():
    assert read_words(["bundled-vision", "a"], None) == ("bundled-vision", ("a",))
    assert read_words(["a", "bundled-vision"], None) == (None, ("a", "bundled-vision"))


def test_with_the_model_flag_every_word_is_a_prompt(model: Path):
    assert read_words([str(model), "a"], "other") == ("other", (str(model), "a"))


def test_a_folder_without_config_is_refused_rather_than_taken_as_a_prompt(tmp_path: Path):
    with pytest.raises(ConfigError, match="looks like a model"):
        read_words([str(tmp_path), "a"], None)


@pytest.mark.parametrize(
    "word", ["./absent", "/absent/x", "../x", "~/m", ".", "org/name-1.5B", "a/b:Q4_K_M", "x.gguf"]
)
def test_a_first_word_written_like_a_model_is_refused(word: str):
    with pytest.raises(ConfigError, match="--prompts-file"):
        read_words([word, "a"], None)


@pytest.mark.parametrize("word", ["and/or what?", "1 / 2", "a", "", "x" * 5000, "nul\0", "// is"])
def test_other_first_words_are_prompts(word: str):
    assert read_words([word], None) == (None, (word,))


def test_a_model_named_twice_is_refused():
    assert only_model(None, None) is None
    assert only_model("a", None) == only_model(None, "a") == "a"
    with pytest.raises(ConfigError, match="twice"):
        only_model("a", "b")


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
