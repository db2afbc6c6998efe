"""Whole folders: what they recommend, where they end a sequence, and what is wrong with them."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cadenza.checkpoint.generation_defaults import GenerationDefaults
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError
from tests.checkpoint.files import SMALL_CONFIG, small_model, write_folder, write_tensors

FIXTURES = Path(__file__).parent.parent / "fixtures"


TOKENIZER = {
    "added_tokens": [{"id": 5, "content": "<|end|>"}, {"id": 6, "content": "<|start|>"}],
    "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 7}, "merges": []},
}


@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
)
def test_fixtures_open(name: str):
    checkpoint = open_checkpoint(FIXTURES / name)
    assert checkpoint.num_weight_bytes < 1 << 20
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.tokenizer_source is None
    assert checkpoint.chat_template is None
    assert len(checkpoint.digest) == 64


def test_weight_bytes_count_a_stored_tied_head_once(tmp_path: Path):
    tensors = small_model()[1]
    plain = open_checkpoint(write_folder(tmp_path)).num_weight_bytes
    assert plain == sum(array.nbytes for array in tensors.values())
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    write_tensors(tmp_path / "model.safetensors", tensors | head)
    assert open_checkpoint(tmp_path).num_weight_bytes == plain


@pytest.mark.parametrize("path", ["meta-llama/Llama-3.2-1B", "absent", "/absent/folder"])
def test_what_is_no_local_folder_says_that_only_those_are_read(path: str):
    with pytest.raises(CheckpointError, match=r"folder with config\.json"):
        open_checkpoint(Path(path))


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "model.bin").write_bytes(b"GGU")
    with pytest.raises(CheckpointError, match="is no model: it is not in the GGUF format"):
        open_checkpoint(tmp_path / "model.bin")


@pytest.mark.parametrize("name", ["llama3.2:1b", "qwen3:latest"])
def test_a_name_as_ollama_has_it_says_where_its_file_is(name: str):
    with pytest.raises(CheckpointError, match=f"ollama show --modelfile {name}"):
        open_checkpoint(Path(name))


def test_models_of_the_package_open_by_name_unless_a_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint(Path("bundled")).digest == open_checkpoint(None).digest
    own = write_folder(tmp_path / "bundled")
    assert open_checkpoint(Path("bundled")).folder == own.relative_to(tmp_path)


@pytest.mark.parametrize("name", ["absent", "owner/llama3.2:1b", "a:b:c", ":1b"])
def test_other_names_say_nothing_of_ollama(name: str):
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(Path(name))
    assert "ollama" not in str(error.value)


def test_a_folder_without_config_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, {}),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "do_sample": True}, None),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"repetition_penalty": 1.05, "min_new_tokens": 2, "max_new_tokens": 2048}, None),
    ],
)
def test_generation_defaults_are_read(
    tmp_path: Path, content: dict[str, Any] | None, expected: dict[str, Any] | None
):
    """None is what the file says; `do_sample: false` is greedy."""
    folder = write_folder(tmp_path, {"generation_config.json": content} if content else {})
    if expected is None:
        expected = {key: value for key, value in (content or {}).items() if key != "do_sample"}
    assert open_checkpoint(folder).generation_defaults == GenerationDefaults(**expected)


def test_what_generation_config_asks_for_and_is_not_applied_is_named(tmp_path: Path):
    content = {"num_beams": 4, "typical_p": 1.0, "suppress_tokens": [], "no_repeat_ngram_size": 3}
    folder = write_folder(tmp_path, {"generation_config.json": content})
    unapplied = open_checkpoint(folder).generation_defaults.unapplied
    assert unapplied == ("no_repeat_ngram_size", "num_beams")


@pytest.mark.parametrize(
    "content",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": 0.005},
        {"repetition_penalty": 101},
        {"max_new_tokens": 0},
        {"temperature": -1},
        {"top_p": 2},
        {"top_k": "5"},
        {"eos_token_id": 999},
        {"min_p": "NaN"},
    ],
)
def test_a_wrong_generation_config_names_its_key(tmp_path: Path, content: dict[str, Any]):
    folder = write_folder(tmp_path, {"generation_config.json": content})
    with pytest.raises(CheckpointError, match=next(iter(content))):
        open_checkpoint(folder)


def test_eos_is_the_union_of_what_three_files_say(tmp_path: Path):
    files = {
        "generation_config.json": {"eos_token_id": [2, 4]},
        "tokenizer_config.json": {"eos_token": {"content": "<|end|>"}},
        "tokenizer.json": TOKENIZER,
    }
    assert open_checkpoint(write_folder(tmp_path, files)).eos_token_ids == (2, 4, 5)


@pytest.mark.parametrize(
    ("tokenizer_config", "expected"),
    [
        ({"eos_token": "<|start|>"}, (2, 6)),
        ({"eos_token": "</s>"}, (2, 7)),
        ({"eos_token": "absent"}, (2,)),
        ({"eos_token": None}, (2,)),
        ({"eos_token": "x", "added_tokens_decoder": {"9": {"content": "x"}}}, (2, 9)),
    ],
)
def test_the_tokenizers_eos_is_found_by_its_text(
    tmp_path: Path, tokenizer_config: dict[str, Any], expected: tuple[int, ...]
):
    files = {"tokenizer_config.json": tokenizer_config, "tokenizer.json": TOKENIZER}
    assert open_checkpoint(write_folder(tmp_path, files)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<|channel|>analysis' }}", (2, 5, 9)),
        ("{{ '<|tool_call>call:' }}", (2, 5, 10)),
        ("{{ '<tool_call>' }}", (2, 5)),
    ],
)
def test_what_a_template_shows_to_end_answers_ends_them(
    tmp_path: Path, template: str, expected: tuple[int, ...]
):
    """Behind a call a tool goes on, although a copy of the checkpoint names the other end only."""
    names = {"5": "<|return|>", "9": "<|call|>", "10": "<|tool_response>", "99": "<turn|>"}
    config = {
        "eos_token": "<|return|>",
        "chat_template": template,
        "added_tokens_decoder": {key: {"content": name} for key, name in names.items()},
    }
    files = {"tokenizer_config.json": config, "tokenizer.json": TOKENIZER}
    assert open_checkpoint(write_folder(tmp_path, files)).eos_token_ids == expected


def test_a_tokenizer_eos_beyond_the_vocabulary_is_refused(tmp_path: Path):
    config = {"eos_token": "x", "added_tokens_decoder": {"99": {"content": "x"}}}
    with pytest.raises(CheckpointError, match="the tokenizer: eos_token"):
        open_checkpoint(write_folder(tmp_path, {"tokenizer_config.json": config}))


def test_a_template_file_comes_before_the_tokenizer_configs(tmp_path: Path):
    folder = write_folder(tmp_path, {"tokenizer_config.json": {"chat_template": "old"}})
    assert open_checkpoint(folder).chat_template == "old"
    (folder / "chat_template.jinja").write_text("new")
    assert open_checkpoint(folder).chat_template == "new"


def test_named_templates_are_kept_by_name(tmp_path: Path):
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    folder = write_folder(tmp_path, {"tokenizer_config.json": {"chat_template": templates}})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.chat_template == "plain"
    assert checkpoint.tokenizer.chat_templates["tool_use"] == "tools"


def test_special_tokens_are_read_from_strings_and_objects(tmp_path: Path):
    files = {
        "special_tokens_map.json": {"unk_token": "<unk>", "bos_token": "<old>"},
        "tokenizer_config.json": {"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
    }
    tokens = open_checkpoint(write_folder(tmp_path, files)).tokenizer.special_tokens
    assert tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def test_a_config_without_dtype_takes_the_weights(tmp_path: Path):
    config = {key: value for key, value in SMALL_CONFIG.items() if key != "torch_dtype"}
    folder = write_folder(tmp_path, {"config.json": config})
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in small_model()[1].items()}
    write_tensors(folder / "model.safetensors", tensors)
    assert open_checkpoint(folder).config.dtype == "bfloat16"


def test_the_digest_changes_with_the_config(tmp_path: Path):
    first = open_checkpoint(write_folder(tmp_path / "a")).digest
    again = open_checkpoint(write_folder(tmp_path / "b")).digest
    config = {**SMALL_CONFIG, "rms_norm_eps": 1e-5}
    other = open_checkpoint(write_folder(tmp_path / "c", {"config.json": config})).digest
    assert first == again != other


def test_opening_reads_no_weights(tmp_path: Path):
    """A sparse file of a huge model opens at once: only its header has content."""
    config = {**SMALL_CONFIG, "vocab_size": 1 << 22, "hidden_size": 1 << 12, "head_dim": 4}
    folder = write_folder(tmp_path, {"config.json": config})
    write_sparse_weights(folder / "model.safetensors", config)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.num_weight_bytes > 1 << 36
    assert checkpoint.weights["model.norm.weight"].shape == (1 << 12,)
    assert np.count_nonzero(checkpoint.weights["model.norm.weight"]) == 0


def write_sparse_weights(path: Path, config: dict[str, Any]) -> None:
    from cadenza.models.config_json import parse_model_config
    from cadenza.models.declaration import declare

    header: dict[str, Any] = {}
    position = 0
    for spec in declare(parse_model_config(config)):
        stop = position + 4 * spec.num_elements
        header[spec.name] = {
            "dtype": "F32",
            "shape": spec.shape,
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


def test_a_watched_checkpoint_tells_the_bytes_that_were_read(tmp_path: Path):
    tensors = small_model()[1]
    told: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(write_folder(tmp_path))
    watched = checkpoint.watched(lambda done, total: told.append((done, total)))
    read, expected = 0, []
    for name in [*tensors, next(iter(tensors))]:  # read twice, counted once
        assert np.array_equal(watched.weights[name], checkpoint.weights[name])
        expected.append((min(read, checkpoint.num_weight_bytes), checkpoint.num_weight_bytes))
        read += tensors[name].nbytes
    assert told == expected


def test_the_bundled_model_opens():
    checkpoint = open_checkpoint(None)
    assert checkpoint.tokenizer_source is not None
    assert checkpoint.chat_template is not None
    assert checkpoint.eos_token_ids
    assert checkpoint.num_weight_bytes < 16 << 20
