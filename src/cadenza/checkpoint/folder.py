"""An opened model, `Checkpoint`, the reader of folders in the Hugging Face layout, and
`writing_folder`. The weights of a `Checkpoint` match its config; opening reads only their headers
and executes nothing from the folder. A folder that is written appears complete or not at all."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from cadenza.checkpoint.described_family import Description, read_description
from cadenza.checkpoint.formats import SETTINGS, apply_scheme, read_scheme
from cadenza.checkpoint.generation_defaults import (
    DefaultPooling,
    GenerationDefaults,
    parse_generation_defaults,
    read_default_pooling,
    read_generation_config,
)
from cadenza.checkpoint.stacked_experts import split_stacks
from cadenza.checkpoint.tokenizer_files import TokenizerFiles, read_tokenizer_files
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, parse_json_object, read_small_file
from cadenza.models.config_json import (
    CONFIG_FILE,
    ModelOutline,
    outline_of,
    parse_model_config,
    read_outline,
    read_token_ids,
)
from cadenza.models.declaration import (
    EMBEDDING,
    HEAD,
    check_weights,
    declare,
    declare_final_norm,
)
from cadenza.models.model_config import ModelConfig
from cadenza.models.score_head import SCORE_NAMES, ScoreHead, read_score_head
from cadenza.models.towers.reader import VisionOptions, read_processor_settings
from cadenza.models.towers.registry import NO_TOWER, read_vision, reader_of
from cadenza.models.wrapped_text import names_of_text, unwrap_config
from cadenza.text.tokens.tokenizer import TokenizerSource
from cadenza.weights.stored_tensor import StoredScheme
from cadenza.weights.weight_format import WeightDType, as_weight_dtype
from cadenza.weights.weights import Weights, by_rules, open_weights, usual_names

MAX_CONFIG_BYTES = 4 << 20

MAX_UNREAD_BYTES = 1 << 20  # of each file, in the digest of a model that only a backend reads

_PREFIX = "model."
_BASE_NAMES = (HEAD, HEAD), ("*", f"{_PREFIX}*")  # of a base model, or with a head beside it

# called with the bytes of the weights that are done, and of all
OnProgress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened model folder, or GGUF model in `folder`. `known` are its arithmetic and tensors, or
    why they are not known, for models that only a backend reads; `outline` is always there.
    `eos_token_ids` is the union of those in config.json, generation_config.json and the tokenizer
    files. `pooling` is the default of embeddings. A model without a head has embeddings only, one
    with `score_head` scores too: neither can generate. `revision` is the commit of a hub model.
    `digest` is a hash of config.json and of the headers of the weights' files, not of the weights
    themselves."""

    folder: Path
    format: Literal["safetensors", "gguf"] = "safetensors"
    outline: ModelOutline
    generation_defaults: GenerationDefaults
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerFiles
    digest: str
    known: tuple[ModelConfig, Weights] | CheckpointError
    revision: str | None = None
    pooling: DefaultPooling = field(default_factory=DefaultPooling)
    can_generate: bool = True
    score_head: ScoreHead | None = None

    @property
    def tokenizer_source(self) -> Path | TokenizerSource | None:
        """None if the checkpoint has no tokenizer."""
        return self.tokenizer.source

    @property
    def is_known(self) -> bool:
        """Whether there are `config` and `weights`."""
        return not isinstance(self.known, CheckpointError)

    @property
    def config(self) -> ModelConfig:
        """Raises CheckpointError if only a backend knows the model's arithmetic."""
        return self._read()[0]

    @property
    def weights(self) -> Weights:
        """Raises CheckpointError if only a backend can read the tensors."""
        return self._read()[1]

    def _read(self) -> tuple[ModelConfig, Weights]:
        if isinstance(self.known, CheckpointError):
            raise self.known
        return self.known

    def watched(self, on_progress: OnProgress) -> "Checkpoint":
        """A copy that calls `on_progress` before each weight is read, with the stored bytes of
        those that were read before it, and of all."""
        if isinstance(self.known, CheckpointError):
            return self
        config, weights = self.known
        sizes = {spec.name: weights.num_bytes(spec.name) for spec in declare(config)}
        total, done = sum(sizes.values()), 0

        def on_read(name: str) -> None:
            nonlocal done
            on_progress(done, total)
            done += sizes.pop(name, 0)

        return replace(self, known=(config, weights.watched(on_read)))

    @property
    def scheme(self) -> StoredScheme | None:
        """How the stored weights are quantised; None if they are not, or not known."""
        return self.weights.scheme if self.is_known else None

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template; None if the folder has none."""
        return self.tokenizer.chat_templates.get("default")

    @property
    def num_weight_bytes(self) -> int:
        """Stored bytes of the model's tensors; a tied head is not counted again."""
        return sum(self.weights.num_bytes(spec.name) for spec in declare(self.config))


def open_folder(
    folder: Path,
    *,
    revision: str | None = None,
    any_family: bool = False,
    vision: VisionOptions | None = None,
) -> Checkpoint:
    """Opens a folder with a config.json. `vision` is what is asked for of the model's images, None
    is `VisionOptions()`; `revision` the hub commit that the folder is a snapshot of; `any_family`
    opens models of unknown arithmetic too, of which only the outline is read. Raises
    CheckpointError if the content is invalid or not supported."""
    config_bytes = read_small_file(folder / CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES)
    raw_config, described = parse_json_object(config_bytes, CONFIG_FILE), read_description(folder)
    try:
        known, can_generate, score_head = _read_known(
            raw_config, folder, (described, vision or VisionOptions())
        )
        outline, digest = outline_of(known[0]), known[1].digest()
    except CheckpointError as error:
        if not any_family:
            raise
        known, outline = error, read_outline(raw_config.values)
        can_generate, score_head = True, None
        digest = _digest_of_unread(folder)
    described_bytes = b"" if described is None else described.content
    generation = read_generation_config(folder)
    tokenizer = read_tokenizer_files(folder)
    return Checkpoint(
        folder=folder,
        outline=outline,
        generation_defaults=parse_generation_defaults(generation),
        eos_token_ids=unite_eos(outline, generation, tokenizer),
        tokenizer=tokenizer,
        digest=hashlib.sha256(
            config_bytes + described_bytes + digest.encode() + vision_settings(known)
        ).hexdigest(),
        revision=revision,
        known=known,
        pooling=read_default_pooling(folder),
        can_generate=can_generate,
        score_head=score_head,
    )


def vision_settings(known: tuple[ModelConfig, Weights] | CheckpointError) -> bytes:
    """For the digest of the settings: what decides a vision model's pixels, and which token it
    never generates."""
    if isinstance(known, CheckpointError) or known[0].vision is None:
        return b""
    return known[0].vision.processor.settings + f" without {known[0].placeholder}".encode()


def _read_known(
    raw: JsonObject, folder: Path, given: tuple[Description | None, VisionOptions]
) -> tuple[tuple[ModelConfig, Weights], bool, ScoreHead | None]:
    """The arithmetic and the weights, which match, whether the model can generate, and its score
    head. In this order: names of stored tensors, stacks, formats, check. A model without a head has
    the embedding as its head, which nothing reads. Raises CheckpointError."""
    described, options = given
    text = unwrap_config(raw)
    plain = {key: value for key, value in text.values.items() if key not in SETTINGS}
    if described is None:
        config = parse_model_config(plain)
    else:
        config = described.read_config(JsonObject(plain, text.where))
    scheme = read_scheme(text)
    weights = open_weights(folder, has_mtp_layers=config.num_mtp_layers > 0)
    if described is None:
        reader, vision = reader_of(raw), None
        if reader is not None and any(map(reader.has, weights)):
            vision = read_vision(raw, read_processor_settings(folder), config, options)
        config = replace(config, vision=vision)
        tower = () if vision is None or reader is None else reader.names
        names = names_of_text(raw, (*tower, *NO_TOWER))
    else:
        names = described.names
    weights = weights.renamed(by_rules(names))
    score_head, is_base = read_score_head(text, config, weights), _is_base(weights)
    has_head = config.tie_word_embeddings or HEAD in weights or not is_base
    if score_head is not None or not has_head:
        config = replace(config, tie_word_embeddings=True)
    names = (*(SCORE_NAMES if score_head else ()), *(_BASE_NAMES if is_base else ()))
    weights = split_stacks(config, weights.renamed(by_rules(names)))
    if scheme is not None:
        weights = apply_scheme(scheme, config, weights)
    check_weights(config, weights)
    if not text.has("dtype") and not text.has("torch_dtype"):
        config = replace(config, dtype=_float_type(config, weights))
    return (config, weights), has_head and score_head is None, score_head


def _is_base(weights: Weights) -> bool:
    """Whether tensors lack the prefix that they have within the model that generates, as in
    transformers' base models, such as `Qwen3Model`, which have no head, and in embedding models."""
    is_bare = EMBEDDING.removeprefix(_PREFIX) in weights
    return is_bare and not any(name.startswith(_PREFIX) for name in weights)


def _float_type(config: ModelConfig, weights: Weights) -> WeightDType:
    """Of the embedding, or of the final norm if the embedding is quantised."""
    norm = declare_final_norm(config).name
    name = norm if EMBEDDING in weights.quantised else EMBEDDING
    dtype = as_weight_dtype(weights.entry(name).dtype)
    assert dtype is not None, "checked by check_weights"
    return dtype


def _digest_of_unread(folder: Path) -> str:
    """In hex, over the sizes and beginnings of a folder's safetensors files."""
    state = hashlib.sha256()
    paths = sorted(folder.glob("*.safetensors"))
    for name, path in zip(usual_names([path.name for path in paths]), paths, strict=True):
        with path.open("rb") as file:
            state.update(f"{name}\0{path.stat().st_size}\0".encode())
            state.update(file.read(MAX_UNREAD_BYTES))
    return state.hexdigest()


def unite_eos(
    outline: ModelOutline, generation: JsonObject, tokenizer: TokenizerFiles
) -> tuple[int, ...]:
    """The end-of-sequence ids of config.json, generation_config.json and the tokenizer files, and
    those that the chat template shows."""
    vocab_size = outline.vocab_size
    found = set(outline.eos_token_ids)
    found.update(read_token_ids(generation, "eos_token_id", vocab_size))
    if tokenizer.eos_token_id is not None:
        raw = JsonObject({"eos_token": tokenizer.eos_token_id}, "the tokenizer")
        found.update(read_token_ids(raw, "eos_token", vocab_size))
    found.update(token_id for token_id in tokenizer.end_token_ids if token_id < vocab_size)
    return tuple(sorted(found))


_SMALL_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_NOTICES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")


@contextmanager
def writing_folder(out: Path) -> Generator[Path]:
    """A folder to write, which becomes `out`, new or empty, at the end. Raises CheckpointError if
    `out` is not empty or cannot be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{str(out)!r} exists and is not an empty folder; name another one")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
            folder = Path(name) / "folder"
            folder.mkdir()
            yield folder
            os.replace(folder, out)
    except OSError as error:
        raise CheckpointError(f"{str(out)!r} cannot be written: {error.strerror}") from error


def copy_small_files(source: Path, target: Path) -> None:
    """Copies tokenizer, template, generation settings and notices, not config.json."""
    for path in sorted(source.iterdir()):
        is_small = path.suffix in _SMALL_FILES or path.name.startswith(_NOTICES)
        is_replaced = path.name == CONFIG_FILE or path.name.endswith(".index.json")
        if path.is_file() and is_small and not is_replaced:
            shutil.copyfile(path, target / path.name)
