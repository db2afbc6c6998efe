"""Writes checkpoints with random weights, of a named shape or any config. The bytes depend only on
config, seed and type; at most a part of one tensor is in memory. Errors change the output:
activations keep unit variance, attention is peaked, norms and biases are noisy, and logits have a
deviation of sqrt(ln V), half of the maximum entropy at temperature 1."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import cast

import numpy as np

from cadenza.checkpoint.mtp_head import declare_mtp_layers
from cadenza.checkpoint.stacked_experts import stacked_parts
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, parse_json_object, read_json_object
from cadenza.models.config_json import CONFIG_FILE, parse_model_config
from cadenza.models.declaration import (
    EMBEDDING,
    HEAD,
    LAYER_EMBEDDING,
    declare,
    declare_final_norm,
)
from cadenza.models.model_config import ModelConfig
from cadenza.models.towers.reader import (
    IMAGE_PROCESSOR_FILE,
    VisionOptions,
    read_processor_settings,
)
from cadenza.models.towers.registry import READERS, read_vision
from cadenza.models.wrapped_text import TEXT_CONFIG, outer_name
from cadenza.weights.safetensors_file import (
    DEFAULT_SHARD_BYTES,
    NewTensor,
    Part,
    write_shards,
)
from cadenza.weights.stored_tensor import AnyArray
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weight_format import FORMAT_OF_NAME, WeightDType

_PROCESSOR = "image_processor"

_CHUNK_ELEMENTS = 1 << 20
_NORM_NOISE = 0.2
_BIAS_NOISE = 0.2
_BOUND = 2.0  # of clipped linears: some of their inputs and outputs lie beyond
_QUERY_GAIN = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """The normal distribution of one tensor's elements."""

    mean: float
    sigma: float


_OF_KIND: Mapping[str, Normal] = {
    "scale": Normal(mean=1.0, sigma=_NORM_NOISE),
    # of ln(-rate): states remember some twenty tokens, and some of them hundreds
    "decay": Normal(mean=-3.0, sigma=1.0),
    "positions": Normal(mean=0.0, sigma=0.5),
    "bias": Normal(mean=0.0, sigma=_BIAS_NOISE),
    "sink": Normal(mean=2.0, sigma=1.0),  # scores; those of few tokens are small beside it
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSource:
    """Random numbers: `draw` gives so many in float32, with mean 0 and variance 1."""

    seed: int
    draw: Callable[[np.random.Generator, int], AnyArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model without weights: its config, and its folder's settings by file."""

    config: ModelConfig
    files: Mapping[str, Mapping[str, object]]


def named_shape(name_or_file: str) -> ModelConfig:
    return read_shape(name_or_file).config


def read_shape(name_or_file: str) -> Shape:
    """A named shape, or that of a config.json given by its path or its folder's. Raises
    CheckpointError if there is no such name or file, or the file is not supported."""
    shape = resources.files("cadenza.checkpoint") / "shapes" / f"{name_or_file}.json"
    if name_or_file in shape_names():
        return _read_shape(parse_json_object(shape.read_bytes(), CONFIG_FILE))
    path = Path(name_or_file)
    path = path / CONFIG_FILE if path.is_dir() else path
    if path.is_file():
        return _read_shape(read_json_object(path), path.parent)
    raise CheckpointError(
        f"there is no shape {name_or_file!r}; give one of {', '.join(shape_names())}, or the path "
        f"of a config.json"
    )


def _read_shape(raw: JsonObject, folder: Path | None = None) -> Shape:
    """A shape has the settings of the image processor in an entry of its own, a model's in a file
    beside it."""
    processor = raw.child(_PROCESSOR)
    if processor is None and folder is not None:
        processor = read_processor_settings(folder)
    config = parse_model_config(raw.values)
    config = replace(config, vision=read_vision(raw, processor, config, VisionOptions()))
    own = {key: value for key, value in raw.values.items() if key != _PROCESSOR}
    files: dict[str, Mapping[str, object]] = {CONFIG_FILE: own}
    if config.vision is not None and processor is not None:
        files[IMAGE_PROCESSOR_FILE] = processor.values
    return Shape(config=config, files=files)


def shape_names() -> tuple[str, ...]:
    files = (resources.files("cadenza.checkpoint") / "shapes").iterdir()
    return tuple(sorted(file.name[:-5] for file in files if file.name.endswith(".json")))


def text_shape_names() -> tuple[str, ...]:
    return tuple(name for name in shape_names() if named_shape(name).vision is None)


def write_random_checkpoint(
    shape: Shape,
    folder: Path,
    *,
    seed: int,
    dtype: WeightDType,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes a shape's files and normal random weights in `dtype` into a new or empty folder.
    Raises CheckpointError if it is not empty or cannot be written."""
    source = NoiseSource(seed=seed, draw=_normal)
    write_drawn_checkpoint(shape, folder, source, dtype=dtype, max_shard_bytes=max_shard_bytes)


def write_drawn_checkpoint(
    shape: Shape,
    folder: Path,
    source: NoiseSource,
    *,
    dtype: WeightDType,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """As `write_random_checkpoint`, with weights of another distribution of the same width."""
    config = shape.config
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CheckpointError(
                f"the folder {folder.name} is not empty; a random checkpoint needs a new one"
            )
        specs = (*declare(config), *declare_mtp_layers(config))
        parts = stacked_parts(config, [_part(spec, config, source, dtype) for spec in specs])
        write_shards(folder, parts, max_shard_bytes=max_shard_bytes)
        for name, content in shape.files.items():
            own = _settings_of(content, dtype) if name == CONFIG_FILE else content
            text = json.dumps(own, indent=2)
            (folder / name).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"a random checkpoint cannot be written to {folder.name}: {error.strerror}"
        ) from error


def _settings_of(config: Mapping[str, object], dtype: WeightDType) -> dict[str, object]:
    values = {key: value for key, value in config.items() if key != "torch_dtype"}
    inner = values.get(TEXT_CONFIG)
    if isinstance(inner, dict):
        values[TEXT_CONFIG] = _settings_of(cast(dict[str, object], inner), dtype)
    return {"pad_token_id": None, **values, "dtype": dtype}


def _part(spec: TensorSpec, config: ModelConfig, source: NoiseSource, dtype: WeightDType) -> Part:
    numpy_type = FORMAT_OF_NAME[dtype].numpy

    def make() -> Iterator[AnyArray]:
        for part in _draw(spec, distribution_of(spec, config), source):
            yield part.astype(numpy_type)

    name, vision = spec.name, config.vision
    if vision is not None and not READERS[vision.family].has(name):
        name = outer_name(vision.family, name)
    return Part(tensors=(NewTensor(name=name, dtype=dtype, shape=spec.shape),), make=make)


def distribution_of(spec: TensorSpec, config: ModelConfig) -> Normal:
    """Linears keep the variance of their input."""
    if spec.kind == "norm":
        is_final = spec.name == declare_final_norm(config).name
        gain = _final_gain(config) if is_final else _norm_gain(spec, config)
        return Normal(mean=gain - float(config.norm_adds_one), sigma=_NORM_NOISE * gain)
    if spec.kind in _OF_KIND:
        return _OF_KIND[spec.kind]
    if spec.kind == "tower":
        fan_in = math.prod(spec.shape[1:])
        return Normal(mean=0.0, sigma=fan_in**-0.5)
    if spec.kind == "bound":
        mean = _BOUND if spec.name.endswith("_max") else -_BOUND
        return Normal(mean=mean, sigma=_BIAS_NOISE)
    sigma = spec.shape[-1] ** -0.5
    if spec.name == HEAD or (spec.name == EMBEDDING and config.tie_word_embeddings):
        spread = math.sqrt(math.log(max(config.vocab_size, 2))) * config.logit_divisor
        return Normal(mean=0.0, sigma=sigma * spread / _final_gain(config))
    if spec.name == LAYER_EMBEDDING and config.layer_inputs is not None:
        return Normal(mean=0.0, sigma=config.layer_inputs.size**-0.5)
    if spec.name == EMBEDDING:
        return Normal(mean=0.0, sigma=1.0 / config.embedding_scale)
    return Normal(mean=0.0, sigma=sigma * _score_gain(spec, config))


def _final_gain(config: ModelConfig) -> float:
    """Lets a tied head be small: with larger embeddings the layers' outputs would be negligible
    beside the token's own embedding, and every token would predict itself."""
    if not config.tie_word_embeddings:
        return 1.0
    return config.embedding_scale * config.logit_divisor / config.residual_scale


def _norm_gain(spec: TensorSpec, config: ModelConfig) -> float:
    """That of queries has the scale of the scores, if the model has none."""
    if config.attention_scale == 1.0 and spec.name.endswith(".q_norm.weight"):
        return spec.shape[-1] ** -0.5
    return 1.0


def _score_gain(spec: TensorSpec, config: ModelConfig) -> float:
    """Gain of the query weights that makes attention peaked; 1 if query norms would cancel it."""
    if config.qk_norm is not None:
        return 1.0
    size = config.head_dim if config.latent is None else config.latent.query_size
    scale = config.attention_scale or size**-0.5
    gain = _QUERY_GAIN * size**-0.5 / scale
    if spec.name.endswith((".q_proj.weight", ".q_b_proj.weight")):
        return gain
    return math.sqrt(gain) if spec.name.endswith(".qkv_proj.weight") else 1.0


def _draw(spec: TensorSpec, normal: Normal, source: NoiseSource) -> Iterator[AnyArray]:
    """In float32 chunks, which depend on the seed and the tensor's name."""
    words = np.frombuffer(spec.name.encode().ljust(-(-len(spec.name) // 4) * 4), dtype="<u4")
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([source.seed, *words])))
    for start in range(0, spec.num_elements, _CHUNK_ELEMENTS):
        count = min(_CHUNK_ELEMENTS, spec.num_elements - start)
        part = source.draw(generator, count)
        yield part * np.float32(normal.sigma) + np.float32(normal.mean)


def _normal(generator: np.random.Generator, count: int) -> AnyArray:
    return generator.standard_normal(count, dtype=np.float32)
