"""The tower of a GGUF model, in a file of its own: `find_projector`, `open_projector`. The metadata
(architecture clip, with llama.cpp's assumptions for each `clip.projector_type`) become a
config.json and a processor's settings, read as strictly as a folder's. Source: llama.cpp's
conversion/, tools/mtmd/clip.cpp and gguf-py."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from cadenza.checkpoint.gguf.clip_projector import (
    VISION_PREFIX,
    ClipProjector,
    ProjectorFile,
    TensorMap,
    map_linear,
    map_norm,
)
from cadenza.checkpoint.gguf.projectors import PROJECTORS
from cadenza.checkpoint.gguf.reader import GGUFFile, open_gguf
from cadenza.checkpoint.gguf.tensors import check_found, cut_parts
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.model_config import ModelConfig
from cadenza.models.tower_spec import TowerLayerSpec, TowerSpec, declare_tower
from cadenza.models.towers.reader import VisionFiles, VisionOptions
from cadenza.vision.tower_config import VisionConfig
from cadenza.weights.stored_tensor import StoredTensor, StoredWeight

_ARCHITECTURE = "clip"
_TYPE_KEYS = ("clip.vision.projector_type", "clip.projector_type")
_WIDTH = f"{VISION_PREFIX}projection_dim"
_AUDIO = ("a.", "mm.a.")  # what the names of tensors begin with that only sound needs


def find_projector(model: Path, text: ModelConfig, options: VisionOptions) -> GGUFFile | None:
    """The file with the tower of a GGUF model: the one that was named, or the only one beside the
    model for text models of its width. Raises CheckpointError if the named one is invalid or for
    another model, or there are several."""
    if not options.has_images:
        return None
    if options.projector is not None:
        file = open_gguf(options.projector)
        _check_projector(file, text)
        return file
    found = [path for path in sorted(model.parent.glob("*.gguf")) if "mmproj" in path.name.lower()]
    fitting = [file for file in map(_try_open, found) if file and _fits(file, text)]
    if len(fitting) > 1:
        names = ", ".join(file.mapped.name for file in fitting)
        raise CheckpointError(
            f"{len(fitting)} files beside {model.name} have towers for it: {names}; name one with "
            f"--mmproj, or leave images out with --no-images"
        )
    return fitting[0] if fitting else None


def open_projector(
    file: GGUFFile, text: ModelConfig, tokens: list[str], options: VisionOptions
) -> tuple[VisionConfig, dict[str, StoredTensor | StoredWeight]]:
    """The vision config, and the tower's tensors under the declared names. Raises CheckpointError
    if a setting or a tensor is missing, unexpected or not supported."""
    opened = ProjectorFile(file=file, text=text, tokens=tokens)
    projector, where = PROJECTORS[_type_of(file)], opened.metadata.where
    files = VisionFiles(
        config=JsonObject(projector.config(opened), where),
        processor=JsonObject(projector.processor(opened), where),
        text=text,
        max_tokens=options.max_tokens,
    )
    vision = projector.reader.read(files)
    made = projector.made(opened, vision)
    return vision, _tensors(file, vision, projector, made)


def _tensors(
    file: GGUFFile,
    vision: VisionConfig,
    projector: ClipProjector,
    made: Mapping[str, StoredWeight],
) -> dict[str, StoredTensor | StoredWeight]:
    tower, stored = declare_tower(vision), file.header.tensors
    mapped = _map_tower(tower, set(stored)) | projector.projectors(tower)
    mapped |= projector.deepstack(vision, tower)
    mapped = {name: parts for name, parts in mapped.items() if parts[0].name not in made}
    used = {part.name for each in made.values() for part in each.parts}
    needed = [name for name in stored if name not in used and not name.startswith(_AUDIO)]
    check_found(mapped, needed, file.mapped.name, "another file of the tower, or --no-images")
    tensors: dict[str, StoredTensor | StoredWeight] = dict(made)
    for name, parts in mapped.items():
        tensors |= {part.name: part for part in cut_parts(stored[name], parts, file.mapped)}
    return tensors


def _map_tower(tower: TowerSpec, stored: set[str]) -> TensorMap:
    entry = tower.entry
    mapped: TensorMap = {"v.patch_embd.weight": (entry.patch.weight,)}
    if entry.patch.bias is not None:
        mapped["v.patch_embd.bias"] = (entry.patch.bias,)
    if tower.table is not None:
        mapped["v.position_embd.weight"] = (tower.table,)
    pre_norm = "v.pre_ln" if entry.patch_norms is None else "v.patch_norm.3"
    mapped |= map_norm(pre_norm, entry.pre_norm)
    mapped |= map_norm("v.post_ln", tower.projectors[0].post_norm)
    for index, layer in enumerate(tower.layers):
        for more in _layer_maps(layer, f"v.blk.{index}", stored):
            mapped |= more
    return mapped


def _layer_maps(layer: TowerLayerSpec, prefix: str, stored: set[str]) -> Iterator[TensorMap]:
    yield map_norm(f"{prefix}.ln1", layer.norm1)
    yield map_norm(f"{prefix}.ln2", layer.norm2)
    yield map_norm(f"{prefix}.attn_post_norm", layer.attention_out.norm)
    yield map_norm(f"{prefix}.ffn_post_norm", layer.mlp_out.norm)
    if layer.head_norms is not None:
        query, key = layer.head_norms
        yield {f"{prefix}.attn_q_norm.weight": (query,), f"{prefix}.attn_k_norm.weight": (key,)}
    if len(layer.qkv.linears) == 1 or f"{prefix}.attn_qkv.weight" in stored:
        weights, *biases = zip(*(linear.tensors() for linear in layer.qkv.linears), strict=True)
        yield {f"{prefix}.attn_qkv.weight": weights}
        yield {f"{prefix}.attn_qkv.bias": parts for parts in biases}
    else:
        for letter, linear in zip("qkv", layer.qkv.linears, strict=True):
            yield map_linear(f"{prefix}.attn_{letter}", linear)
    yield map_linear(f"{prefix}.attn_out", layer.attention_out.linear)
    names = ("ffn_gate", "ffn_up") if len(layer.up.linears) == 2 else ("ffn_up",)
    for name, linear in zip(names, layer.up.linears, strict=True):
        yield map_linear(f"{prefix}.{name}", linear)
    yield map_linear(f"{prefix}.ffn_down", layer.mlp_out.linear)


def _try_open(path: Path) -> GGUFFile | None:
    """A file that was not asked for; None if it is damaged."""
    try:
        return open_gguf(path)
    except CheckpointError:
        return None


def _type_of(file: GGUFFile) -> str:
    metadata = file.header.metadata
    return next((found for key in _TYPE_KEYS if (found := metadata.text(key))), "")


def _fits(file: GGUFFile, text: ModelConfig) -> bool:
    metadata = file.header.metadata
    return (
        metadata.get("general.architecture") == _ARCHITECTURE
        and _type_of(file) in PROJECTORS
        and metadata.get(_WIDTH) == text.hidden_size
    )


def _check_projector(file: GGUFFile, text: ModelConfig) -> None:
    metadata = file.header.metadata
    architecture = metadata.get("general.architecture")
    if architecture != _ARCHITECTURE:
        raise CheckpointError(
            f"--mmproj: {metadata.where} has the architecture {shorten(architecture)}, not "
            f"{_ARCHITECTURE}; name the file with the model's image tower (mmproj)"
        )
    found = _type_of(file)
    if found not in PROJECTORS:
        raise CheckpointError(
            f"--mmproj: {metadata.where} has a projector of type {shorten(found)}, which is not "
            f"supported; supported are {', '.join(PROJECTORS)}; leave it out with --no-images"
        )
    width = metadata.get(_WIDTH)
    if width != text.hidden_size:
        raise CheckpointError(
            f"--mmproj: {metadata.where} is for text models of width {shorten(width)}, and this "
            f"one has {text.hidden_size}; name the file that belongs to it"
        )
