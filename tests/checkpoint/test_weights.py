"""Finding tensors in one file or many, and comparing them with the declaration; what `hostile` has
is not repeated."""

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cadenza.checkpoint.mtp_head import mtp_head_of
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape, text_shape_names
from cadenza.checkpoint.stacked_experts import split_stacks
from cadenza.errors import CheckpointError
from cadenza.models.declaration import EMBEDDING, HEAD, check_weights, count_parameters, declare
from cadenza.models.mtp_layout import QWEN_MTP
from cadenza.weights.stored_tensor import MappedFile
from cadenza.weights.weights import open_weights
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.checkpoint.files import small_model, write_tensors

TINY_SHAPES = [name for name in text_shape_names() if name.startswith("tiny-")]
INDEX = "model.safetensors.index.json"
UP_PROJ = "mtp.layers.0.mlp.up_proj.weight"
BY_DAY = ("tiny-llama", "tiny-gemma3", "tiny-mixtral", "tiny-phi3")


def write_shards(folder: Path, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    """Splits `tensors` over two files with an index; returns its weight_map."""
    names = list(tensors)
    half = len(names) // 2
    weight_map: dict[str, str] = {}
    for shard, part in (("one.safetensors", names[:half]), ("two.safetensors", names[half:])):
        write_tensors(folder / shard, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_shards_and_a_single_file_hold_the_same(tmp_path: Path):
    config, tensors = small_model()
    (tmp_path / "single").mkdir()
    (tmp_path / "sharded").mkdir()
    write_tensors(tmp_path / "single" / "model.safetensors", tensors)
    write_shards(tmp_path / "sharded", tensors)
    single, sharded = open_weights(tmp_path / "single"), open_weights(tmp_path / "sharded")
    assert set(single) == set(sharded) == set(tensors)
    assert len(sharded.files) == 2
    for name, array in tensors.items():
        assert np.array_equal(single[name], array)
        assert np.array_equal(sharded[name], array)
    check_weights(config, single)
    check_weights(config, sharded)


def test_mtp_layers_may_lie_in_a_file_beside_the_model(tmp_path: Path):
    """As those of the bundled model."""
    shape = replace(named_shape("tiny-qwen3"), num_mtp_layers=1, mtp_layout=QWEN_MTP)
    write_random_checkpoint(shape, tmp_path, seed=1, dtype="float32")
    together = load_file(tmp_path / "model.safetensors")
    own = {name: each for name, each in together.items() if name.startswith("mtp.")}
    save_file(own, tmp_path / "mtp.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor .mtp\S+ is both in model\.safetensors and"):
        open_checkpoint(tmp_path)
    rest = {name: each for name, each in together.items() if name not in own}
    save_file(rest, tmp_path / "model.safetensors")
    head = mtp_head_of(open_checkpoint(tmp_path))
    assert np.array_equal(head.weights["model.layers.0.mlp.up_proj.weight"], own[UP_PROJ])
    assert len(head.weights.files) == 2

    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}))
    assert set(open_checkpoint(tmp_path).weights) == set(rest)


def test_a_folder_without_safetensors_says_what_it_has(tmp_path: Path):
    with pytest.raises(CheckpointError, match="neither"):
        open_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which is not supported"):
        open_weights(tmp_path)


ESCAPES = [
    "sub/inside.safetensors",
    "C:outside.safetensors",
    ".hidden.safetensors",
    "a\0.safetensors",
    "",
    None,
    ["one.safetensors"],
]


def test_a_digest_does_not_follow_the_names_of_shards(tmp_path: Path):
    weight_map = write_shards(tmp_path, small_model()[1])
    first = open_weights(tmp_path)
    state = hashlib.sha256()
    for place, file in enumerate(first.files, start=1):
        name = f"model-{place:05}-of-00002.safetensors"
        state.update(f"{name}\0{len(file.data)}\0{len(file.header)}\0".encode() + file.header)
    assert first.digest() == state.hexdigest(), "that of shards with the usual names"
    for shard in set(weight_map.values()):
        (tmp_path / shard).rename(tmp_path / f"a {shard}")
    named = {tensor: f"a {shard}" for tensor, shard in weight_map.items()}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": named}))
    assert open_weights(tmp_path).digest() == first.digest()


@pytest.mark.parametrize("shard", ESCAPES, ids=repr)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, shard: Any):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    tensors = small_model()[1]
    for place in (tmp_path / "outside.safetensors", folder / "sub" / "inside.safetensors"):
        write_tensors(place, tensors)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))
    with pytest.raises(CheckpointError, match="same folder"):
        open_weights(folder)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{}", "weight_map"),
        ("[]", "object"),
        ("{", "JSON"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "twice"),
    ],
)
def test_a_malformed_index_is_a_named_error(tmp_path: Path, index: str, said: str):
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=said):
        open_weights(tmp_path)


def check_small(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    write_tensors(folder / "model.safetensors", tensors)
    check_weights(small_model()[0], open_weights(folder))


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    check_small(tmp_path, small_model()[1] | {name: np.zeros(2, np.float32)})


def test_a_tied_head_may_be_stored_if_it_equals_the_embedding(tmp_path: Path):
    tensors = small_model()[1]
    check_small(tmp_path, tensors | {HEAD: tensors[EMBEDDING]})
    for wrong in (tensors[EMBEDDING] + 1, tensors[EMBEDDING].astype(np.float16)):
        with pytest.raises(CheckpointError, match="ties the head"):
            check_small(tmp_path, tensors | {HEAD: wrong})


def test_every_tensor_of_the_declaration_has_its_own_name():
    for shape in ("tiny-llama", "tiny-qwen3"):
        specs = declare(named_shape(shape))
        assert len({spec.name for spec in specs}) == len(specs)


def test_parameters_are_counted_as_published():
    assert count_parameters(named_shape("smollm2-135m")) == 134_515_008
    assert count_parameters(named_shape("llama-3.2-1b")) == 1_235_814_400
    assert count_parameters(named_shape("qwen3-0.6b")) == 596_049_920


def test_the_digest_follows_the_headers_and_not_the_data(tmp_path: Path):
    tensors = small_model()[1]
    digests = []
    for index, change in enumerate(({}, {"x": np.zeros(1, np.float32)})):
        folder = tmp_path / str(index)
        folder.mkdir()
        write_tensors(folder / "model.safetensors", tensors | change)
        digests.append(open_weights(folder).digest())
        assert open_weights(folder).digest() == digests[-1]
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    "name",
    [
        name if name in BY_DAY else pytest.param(name, marks=pytest.mark.soak)
        for name in TINY_SHAPES
    ],
)
def test_every_declared_tensor_is_needed_and_missed_by_name(name: str, tmp_path: Path):
    """Biases and norms too, which a decoder could do without."""
    config = named_shape(name)
    write_random_checkpoint(config, tmp_path, seed=1, dtype=config.dtype)
    whole = split_stacks(config, open_weights(tmp_path))
    check_weights(config, whole)
    for spec in declare(config):
        with pytest.raises(CheckpointError, match=f"lack {re.escape(spec.name)}, which"):
            check_weights(config, whole.with_parts({spec.name: {}}))


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_a_flag_that_calls_for_tensors_which_are_not_there_is_refused(name: str, tmp_path: Path):
    config = named_shape(name)
    without = replace(
        config,
        has_attention_out_bias=False,
        has_mlp_bias=False,
        num_layers=max(2, config.kv_groups[0].layers[0] + 1),
    )
    if without.family not in ("qwen2", "mimo"):
        without = replace(without, has_qkv_bias=False)
    write_random_checkpoint(without, tmp_path, seed=1, dtype=without.dtype)
    open_checkpoint(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for flag in ("attention_bias", "mlp_bias", "qkv_bias", "use_qk_norm"):
        text = values.get("text_config")
        more = {flag: True} if text is None else {"text_config": {**text, flag: True}}
        (tmp_path / "config.json").write_text(json.dumps({**values, **more}))
        if (without.family, flag) != ("mimo", "attention_bias"):  # as it is without the flag
            with pytest.raises(CheckpointError, match=rf"lack .*\.bias|{flag} is True"):
                open_checkpoint(tmp_path)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CountingFile(MappedFile):
    """A mapped file that notes how many tensors had been read when its pages were released."""

    reads: list[str] = field(default_factory=list[str])
    releases: list[int] = field(default_factory=list[int])

    def release_pages(self) -> None:
        self.releases.append(len(self.reads))
        MappedFile.release_pages(self)


def test_pages_are_released_when_the_reading_comes_to_another_layer(tmp_path: Path):
    config, tensors = small_model()
    write_tensors(tmp_path / "model.safetensors", tensors)
    weights = open_weights(tmp_path)
    (whole,) = weights.files
    file = CountingFile(
        name=whole.name, path=whole.path, data=whole.data, modified_ns=whole.modified_ns
    )
    loaded = replace(weights, files=(file,)).watched(file.reads.append).released_by_layer()
    names = [spec.name for spec in declare(config)]
    for name in names:
        assert np.array_equal(loaded[name], tensors[name])
    assert file.reads == names
    layers = [name.split(".")[2] if ".layers." in name else "" for name in names]
    changes = [at + 1 for at in range(1, len(names)) if layers[at] != layers[at - 1]]
    assert file.releases == changes
    assert len(changes) == config.num_layers + 1
