"""What the words of a command are: models or prompts; files of prompts; answers to a question."""

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from cadenza.cli.app import build_app
from cadenza.cli.words import (
    first_model,
    model_and_out,
    model_and_prompts,
    only_model,
    read_prompts_file,
    several_models,
    yes_or_no,
)
from cadenza.errors import ConfigError, InvalidRequestError
from tests.cli.harness import Cadenza, run_cadenza


def test_words_are_prompts_for_the_bundled_model():
    words = ("The capital of France is", "and")
    assert model_and_prompts(words, None) == (None, words)


def test_a_first_word_that_is_a_folder_is_the_model(model: Path, tmp_path: Path):
    for folder in (str(model), str(tmp_path)):
        assert model_and_prompts([folder], None) == (folder, ())
        assert model_and_prompts([folder, "a", folder], None) == (folder, ("a", folder))


def test_a_first_word_that_is_a_gguf_file_is_the_model(tmp_path: Path):
    named, blob, other = tmp_path / "my model.gguf", tmp_path / "sha256-1", tmp_path / "notes"
    named.touch()
    blob.write_bytes(b"GGUF\x03")
    other.write_text("GGUX")
    for file in map(str, (named, blob)):
        assert model_and_prompts([file, "a"], None) == (file, ("a",))
    with pytest.raises(ConfigError, match="--model"):
        model_and_prompts([str(other), "a"], None)


def test_a_first_word_that_names_a_model_of_the_package_is_the_model():
    assert model_and_prompts(["bundled-vision", "a"], None) == ("bundled-vision", ("a",))
    assert model_and_prompts(["a", "bundled-vision"], None) == (None, ("a", "bundled-vision"))


NAMES = ("org/name-1.5B", "a/b:Q4_K_M", "llama3.2:1b", "qwen3:latest")


@pytest.mark.parametrize("word", NAMES)
def test_a_name_of_the_hubs_or_ollamas_form_is_the_model_where_a_prompt_follows(word: str):
    assert model_and_prompts([word, "a"], None) == (word, ("a",))
    assert model_and_prompts([word], None, has_more=True) == (word, ())
    assert model_and_prompts([word], None) == (None, (word,))
    assert model_and_prompts(["a", word], None) == (None, ("a", word))


def test_with_the_model_flag_every_word_is_a_prompt(model: Path):
    for word in (str(model), *NAMES):
        assert model_and_prompts([word, "a"], "other") == ("other", (word, "a"))


@pytest.mark.parametrize("word", ["./absent", "/absent/x", "../x", "~/m", "x.gguf", "X/Y.GGUF"])
def test_a_path_that_is_not_there_is_refused_rather_than_taken_as_a_prompt(word: str):
    with pytest.raises(ConfigError, match=r"no such folder or file exists.*--model"):
        model_and_prompts([word], None)


WORDS = ("and/or what?", "1 / 2", "a", "", "x" * 5000, "nul\0", "// is", "a: b", ":", "a/b/c", "x:")


@pytest.mark.parametrize("word", WORDS)
def test_other_first_words_are_prompts(word: str):
    assert model_and_prompts([word, "b"], None) == (None, (word, "b"))


def test_a_model_named_twice_is_refused():
    assert only_model(None, None) is None
    assert only_model("a", None) == only_model(None, "a") == "a"
    assert several_models(["a", "b"], None) == ("a", "b")
    assert several_models(None, None) == (None,)
    for twice in (lambda: only_model("a", "b"), lambda: several_models(["a"], "b")):
        with pytest.raises(ConfigError, match="twice"):
            twice()


def test_a_command_that_needs_a_model_takes_its_first_word_as_one(tmp_path: Path):
    assert first_model(["llama3"], None) == ("llama3", ())
    assert first_model(["a/b", "c", "d"], None) == ("a/b", ("c", "d"))
    assert first_model(["c", "d"], "m") == ("m", ("c", "d"))
    assert first_model([], "m") == ("m", ())
    folder = tmp_path / "my models"
    folder.mkdir()
    assert first_model([str(folder)], None) == (str(folder), ())
    for words in ([], ["What is this?"], [" "]):
        with pytest.raises(ConfigError, match="by --model"):
            first_model(words, None)


def test_a_command_that_makes_a_folder_takes_two_words_or_one_beside_model():
    assert model_and_out(["m", "out"], None) == ("m", Path("out"))
    assert model_and_out(["out"], "m") == ("m", Path("out"))
    for words, model in ((["m"], None), (["m", "out", "x"], None), (["m", "out"], "n"), ([], "n")):
        with pytest.raises(ConfigError, match="give the model, and the folder"):
            model_and_out(words, model)


def commands() -> dict[str, Any]:
    app: Any = get_command(build_app())
    bench = {f"bench {name}": each for name, each in app.commands["bench"].commands.items()}
    return {**app.commands, **bench}


def test_every_command_with_a_word_for_a_model_has_the_flag_too():
    """`pull` and `rm` are of the hub's names alone."""
    for name, command in commands().items():
        words = [each for each in command.params if each.param_type_name == "argument"]
        if any("MODEL" in (each.metavar or "") for each in words) and name not in ("pull", "rm"):
            assert any("--model" in each.opts for each in command.params), name


SEVERAL = ("info", "verify", "chat", "bench load", "bench throughput")


@pytest.mark.parametrize("command", SEVERAL)
def test_the_flag_names_the_model_of_every_command(cadenza: Cadenza, tmp_path: Path, command: str):
    absent = tmp_path / "absent"
    ran = cadenza(*command.split(), "--model", absent)
    assert (ran.code, f"the model folder '{absent}' does not exist" in ran.err) == (3, True)
    twice = cadenza(*command.split(), absent, "--model", "other")
    assert (twice.code, "named twice" in twice.err) == (2, True)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("nope.gguf", "the GGUF file 'nope.gguf' does not exist"),
        ("llama3.2:1b", "the model 'llama3.2:1b' does not exist"),
        ("nope", "the model folder 'nope' does not exist"),
    ],
)
def test_what_is_not_there_is_called_what_its_name_says(cadenza: Cadenza, word: str, said: str):
    for words in (["info", word], ["run", word, "hi"], ["quantize", word, "o", "--scheme", "int8"]):
        assert said in cadenza(*words).err


def test_a_gguf_file_that_is_not_there_is_no_folder_for_serve_either():
    ran = run_cadenza(["serve", "nope.gguf", "--port", "0"])
    assert (ran.code, "the GGUF file 'nope.gguf' does not exist" in ran.err) == (2, True)


def test_a_name_alone_is_a_prompt_and_a_line_says_so(cadenza: Cadenza, model: Path):
    flags = ("--max-tokens", 1, "-np", 1, "-c", 64, "--max-num-batched-tokens", 64)
    ran = cadenza("generate", "and/or", *flags)
    assert (ran.code, ran.err.count("\n")) == (0, 1)
    assert "note: 'and/or' is taken as the prompt" in ran.err
    assert cadenza("generate", "--model", model, "and/or", *flags).err == ""


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
