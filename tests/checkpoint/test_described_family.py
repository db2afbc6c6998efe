"""Models of types that are not known, described by a cadenza.toml beside them."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cadenza.checkpoint.described_family import DESCRIPTION_FILE
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.errors import CheckpointError
from cadenza.weights.safetensors_file import SINGLE_FILE
from tests.checkpoint.config_writer import write_random_checkpoint

NAMES = {
    "model.embed_tokens.weight": "wte.weight",
    "model.norm.weight": "ln_f.weight",
    "model.layers.{layer}.input_layernorm.weight": "h.{layer}.ln_1.weight",
    "model.layers.{layer}.post_attention_layernorm.weight": "h.{layer}.ln_2.weight",
    **{
        f"model.layers.{{layer}}.self_attn.{part}_proj.weight": f"h.{{layer}}.attn.{part}.weight"
        for part in "qkvo"
    },
}
SETTINGS = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "rms_norm_eps": "eps"}
DESCRIPTION = "\n".join(
    [
        'like = "llama"',
        "[settings]",
        *(f'{own} = "{theirs}"' for own, theirs in SETTINGS.items()),
        "[values]",
        'rope_parameters = {rope_type = "default", rope_theta = 20000.0}',
        "[ignored]",
        'names = ["vision."]',
        "[tensors]",
        *(f'"{own}" = "{theirs}"' for own, theirs in NAMES.items()),
    ]
)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A Llama, and the same model as somebody else would have written it."""
    plain, other = tmp_path / "plain", tmp_path / "other"
    write_random_checkpoint(named_shape("tiny-llama"), plain, seed=3, dtype="float32")
    other.mkdir()
    values = json.loads((plain / "config.json").read_text())
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 20_000.0}
    (plain / "config.json").write_text(json.dumps(values))
    del values["rope_parameters"]
    values |= {"model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"]}
    values["auto_map"] = {"AutoConfig": "theirs.Config"}
    values |= {theirs: values.pop(own) for own, theirs in SETTINGS.items()}
    (other / "config.json").write_text(json.dumps(values))
    tensors = {their_name(name): each for name, each in load_file(plain / SINGLE_FILE).items()}
    save_file({**tensors, "vision.patch": np.zeros(3, np.float32)}, other / SINGLE_FILE)
    (other / DESCRIPTION_FILE).write_text(DESCRIPTION)
    return plain, other


def their_name(name: str) -> str:
    number = (*name.split("."), "", "")[2]
    pattern = name.replace(f".{number}.", ".{layer}.", 1)
    return NAMES.get(name) or NAMES.get(pattern, name).replace("{layer}", number)


def test_a_llama_described_so_is_the_llama(folders: tuple[Path, Path]):
    ours, theirs = map(open_checkpoint, folders)
    assert ours.config == theirs.config
    assert set(ours.weights) == set(theirs.weights)
    assert all(np.array_equal(ours.weights[name], theirs.weights[name]) for name in ours.weights)


def test_the_description_is_in_the_digest(folders: tuple[Path, Path]):
    before = open_checkpoint(folders[1]).digest
    (folders[1] / DESCRIPTION_FILE).write_text(f"{DESCRIPTION}\n# a word more")
    assert open_checkpoint(folders[1]).digest != before


def test_norms_are_those_of_the_description(folders: tuple[Path, Path]):
    path = folders[1] / DESCRIPTION_FILE
    path.write_text(f"{DESCRIPTION}\n[norms]\nadds_one = true\nqk = 'none'\n")
    assert open_checkpoint(folders[1]).config.norm_adds_one
    path.write_text(f"{DESCRIPTION}\n[norms]\nqk = 'head'\n")
    with pytest.raises(CheckpointError, match=r"lack model\.layers\.0\.self_attn\.q_norm"):
        open_checkpoint(folders[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("like = ", "is no TOML"),
        ('like = "unheard_of"', "like is .unheard_of.; it must be one of llama"),
        (DESCRIPTION.replace("[values]", "[value]"), "value is not known"),
        (DESCRIPTION.replace('"n_layer"', '"num_blocks"'), "settings names num_blocks, which"),
        (DESCRIPTION.replace("h.{layer}.ln_1", "h.ln_1"), "both need {layer} once, or none"),
        (DESCRIPTION.replace("n_embd", "vocab_size"), "vocab_size is missing"),
        (DESCRIPTION.replace('["vision."]', '["vision.", ""]'), "ignored.names is ''"),
        (DESCRIPTION.replace('["vision."]', "[]"), r"contain vision\.patch"),
        (f"{DESCRIPTION}\n[norms]\nadds_one = 1", "norms.adds_one is 1; it must be true, false"),
        (f"{DESCRIPTION}\n[norms]\nfirst = true", "norms.first is not known"),
        (f"{DESCRIPTION}\n[norms]\nqk = 'all'", "norms.qk is 'all'; it must be none, head"),
    ],
    ids=lambda text: text.split("\n")[0].replace(" ", "-")[:40],
)
def test_a_wrong_description_is_refused_by_what_is_wrong(
    folders: tuple[Path, Path], text: str, message: str
):
    (folders[1] / DESCRIPTION_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=message.replace("{", r"\{")):
        open_checkpoint(folders[1])


def test_a_setting_that_changes_the_arithmetic_is_still_refused(folders: tuple[Path, Path]):
    path = folders[1] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "clip_qkv": 8.0}))
    with pytest.raises(CheckpointError, match="clip_qkv"):
        open_checkpoint(folders[1])
