"""Writes a GGUF model that sees, of random weights: a text file and its tower (mmproj).

    pip install gguf
    python -m benchmarks.rivals.seeing_gguf smolvlm2-500m FOLDER [BF16|F16|Q8_0] \\
        [--one-tile] [--layers N]

The shapes are those of SmolVLM2-500M and of Qwen3-VL-2B; weights of both files are in the given
type but for embeddings, norms and biases. The vocabulary is random, with the family's special
tokens at its end. `encode_time` times Cadenza's tower on such a
folder, and llama.cpp's `llama-mtmd-cli -m FOLDER/model.gguf --mmproj FOLDER/mmproj.gguf` its own.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from benchmarks.rivals.as_gguf import (
    add_shape,
    add_tokenizer,
    converted,
    of_shape,
    settings_of,
    stored_tensors,
    tokenizer_of,
)
from cadenza.models.config_json import parse_model_config

Array = np.ndarray[Any, Any]
Tensors = Iterator[tuple[str, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """The shape of a tower; `patch` pixels a side, `merged` patches a side of a token."""

    depth: int
    width: int
    inner: int
    heads: int
    image: int
    patch: int
    merged: int
    deepstack: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeing:
    """A model's two halves, its special tokens and its template."""

    architecture: str
    text: dict[str, Any]
    tower: Tower
    tokens: tuple[str, ...]
    template: str


_TWO_NEWLINES = "\u010a\u010a"
"""As byte-level vocabularies write it; llama.cpp looks it up."""
_ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
_PARTS = (
    "{% for part in message.content %}{% if part.type == 'image' %}IMAGE"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
)
_CONTENT = (
    "{% if message.content is string %}{{ message.content }}{% else %}" + _PARTS + "{% endif %}"
)

MODELS: dict[str, Seeing] = {
    "smolvlm2-500m": Seeing(
        architecture="llama",
        text={
            "model_type": "llama",
            "hidden_size": 960,
            "intermediate_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 15,
            "num_key_value_heads": 5,
            "head_dim": 64,
            "vocab_size": 49280,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        tower=Tower(depth=12, width=768, inner=3072, heads=12, image=512, patch=16, merged=4),
        tokens=(
            *("<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>"),
            *("<global-img>", *_ROWS, _TWO_NEWLINES),
        ),
        template="<|im_start|>{% for message in messages %}{{ message.role | capitalize }}: "
        + _CONTENT.replace("IMAGE", "<image>")
        + "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}",
    ),
    "qwen3-vl-2b": Seeing(
        architecture="qwen3vl",
        text={
            "model_type": "qwen3",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5000000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        tower=Tower(
            depth=24,
            width=1024,
            inner=4096,
            heads=16,
            image=768,
            patch=16,
            merged=2,
            deepstack=(5, 11, 17),
        ),
        tokens=(
            *("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
            *("<|image_pad|>", "<|video_pad|>"),
        ),
        template="{% for message in messages %}<|im_start|>{{ message.role }}\n"
        + _CONTENT.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
        + "<|im_end|>\n{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
}


def write_text(model: Seeing, out: Path, wanted: str, num_layers: int) -> None:
    """The text half, as `as_gguf` writes one."""
    config = parse_model_config({**model.text, "num_hidden_layers": num_layers})
    generator = np.random.default_rng(0)
    settings, draw = settings_of(config), of_shape(config, generator)
    writer = gguf.GGUFWriter(out, model.architecture)
    add_shape(writer, settings)
    if model.architecture == "qwen3vl":
        writer.add_rope_dimension_sections([24, 20, 20, 0])
        writer.add_num_deepstack_layers(len(model.tower.deepstack))
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{wanted}"])
    add_tokenizer(writer, _with_tokens(config.vocab_size, model.tokens), config.vocab_size)
    writer.add_chat_template(model.template)
    for each in stored_tensors(config, wanted):
        (data,) = converted(each, draw, settings)
        block, size = gguf.GGML_QUANT_SIZES[each.kind]
        shape = (*each.shape[:-1], each.shape[-1] // block * size)
        writer.add_tensor(each.name, data.reshape(shape), raw_dtype=each.kind)
    _finish(writer)


def _with_tokens(vocab_size: int, tokens: Sequence[str]) -> dict[str, Any]:
    """A random tokenizer whose last tokens are these."""
    made = tokenizer_of(Path(), vocab_size)
    first = vocab_size - len(tokens)
    vocab = {text: index for text, index in made["model"]["vocab"].items() if index < first}
    places = {token: first + at for at, token in enumerate(tokens)}
    vocab |= {text: index for text, index in places.items() if text == _TWO_NEWLINES}
    added = [{"id": places[text], "content": text} for text in places if text not in vocab]
    model = {**made["model"], "vocab": vocab}
    return {**made, "model": model, "added_tokens": made["added_tokens"] + added}


def write_tower(model: Seeing, out: Path, wanted: str, longest_edge: int) -> None:
    tower, width = model.tower, model.text["hidden_size"]
    is_qwen = model.architecture == "qwen3vl"
    writer = gguf.GGUFWriter(out, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("qwen3vl_merger" if is_qwen else "idefics3")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{wanted}"])
    writer.add_vision_projection_dim(width)
    writer.add_vision_image_size(tower.image)
    writer.add_vision_patch_size(tower.patch)
    writer.add_vision_embedding_length(tower.width)
    writer.add_vision_feed_forward_length(tower.inner)
    writer.add_vision_block_count(tower.depth)
    writer.add_vision_head_count(tower.heads)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    writer.add_vision_attention_layernorm_eps(1e-6 if is_qwen else 1e-5)
    writer.add_vision_use_gelu(True)
    if is_qwen:
        writer.add_vision_spatial_merge_size(tower.merged)
        writer.add_vision_is_deepstack_layers([at in tower.deepstack for at in range(tower.depth)])
    else:
        writer.add_vision_projector_scale_factor(tower.merged)
        writer.add_vision_preproc_image_size(longest_edge)
    parts = _qwen_parts(tower, width) if is_qwen else _siglip_parts(tower, width)
    for name, array in parts:
        is_plain = array.ndim == 1 or "_embd" in name
        kind = Kind.F32 if is_plain else Kind[wanted]
        data = array if is_plain else gguf.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True, slots=True)
class _Draw:
    generator: np.random.Generator

    def linear(self, name: str, n: int, k: int, *, has_bias: bool = True) -> Tensors:
        sigma = np.float32(k**-0.5)
        yield f"{name}.weight", self.generator.standard_normal((n, k), np.float32) * sigma
        if has_bias:
            yield f"{name}.bias", self.generator.standard_normal(n, np.float32) * sigma

    def norm(self, name: str, width: int) -> Tensors:
        yield f"{name}.weight", np.ones(width, np.float32)
        yield f"{name}.bias", np.zeros(width, np.float32)

    def layer(self, tower: Tower, at: int, *, is_fused: bool) -> Tensors:
        name, width = f"v.blk.{at}", tower.width
        yield from self.norm(f"{name}.ln1", width)
        yield from self.norm(f"{name}.ln2", width)
        if is_fused:
            yield from self.linear(f"{name}.attn_qkv", 3 * width, width)
        else:
            for letter in "qkv":
                yield from self.linear(f"{name}.attn_{letter}", width, width)
        yield from self.linear(f"{name}.attn_out", width, width)
        yield from self.linear(f"{name}.ffn_up", tower.inner, width)
        yield from self.linear(f"{name}.ffn_down", width, tower.inner)

    def patches(self, tower: Tower, count: int) -> Tensors:
        shape = (tower.width, 3, tower.patch, tower.patch)
        for at in range(count):
            array = self.generator.standard_normal(shape, np.float32) * np.float32(0.03)
            yield f"v.patch_embd.weight{'.1' * at}", array
        yield "v.patch_embd.bias", np.zeros(tower.width, np.float32)
        table = (tower.image // tower.patch) ** 2, tower.width
        array = self.generator.standard_normal(table, np.float32) * np.float32(0.02)
        yield "v.position_embd.weight", array


def _siglip_parts(tower: Tower, text_width: int) -> Tensors:
    draw = _Draw(np.random.default_rng(1))
    yield from draw.patches(tower, 1)
    for at in range(tower.depth):
        yield from draw.layer(tower, at, is_fused=False)
    yield from draw.norm("v.post_ln", tower.width)
    joined = tower.width * tower.merged**2
    yield from draw.linear("mm.model.fc", text_width, joined, has_bias=False)


def _qwen_parts(tower: Tower, text_width: int) -> Tensors:
    draw, joined = _Draw(np.random.default_rng(1)), tower.width * tower.merged**2
    yield from draw.patches(tower, 2)
    for at in range(tower.depth):
        yield from draw.layer(tower, at, is_fused=True)
    yield from draw.norm("v.post_ln", tower.width)
    yield from draw.linear("mm.0", joined, joined)
    yield from draw.linear("mm.2", text_width, joined)
    for at in tower.deepstack:
        yield from draw.norm(f"v.deepstack.{at}.norm", joined)
        yield from draw.linear(f"v.deepstack.{at}.fc1", joined, joined)
        yield from draw.linear(f"v.deepstack.{at}.fc2", text_width, joined)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("type", nargs="?", default="BF16", choices=("BF16", "F16", "Q8_0"))
    parser.add_argument("--one-tile", action="store_true")
    parser.add_argument("--layers", type=int)
    given = parser.parse_args(arguments)
    model = MODELS[given.model]
    longest_edge = model.tower.image if given.one_tile else 2048
    given.folder.mkdir(parents=True, exist_ok=True)
    num_layers = given.layers or model.text["num_hidden_layers"]
    write_text(model, given.folder / "model.gguf", given.type, num_layers)
    write_tower(model, given.folder / "mmproj.gguf", given.type, longest_edge)


if __name__ == "__main__":
    main()
