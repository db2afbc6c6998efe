"""`Identity`: all that decides the bits that an engine computes, keeps or answers, in named parts,
each of which states the keys that have it. Equal parts mean equal bits; no part is a name or a path
of files, or follows the free memory. `content_digest` reads weights once: the cache keeps a digest
under the file's identity and times."""

import hashlib
import logging
import mmap
import os
import platform
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from cadenza import __version__
from cadenza.backends import BACKENDS, Backends, find_backend
from cadenza.backends.base import Backend, BackendTraits, RunnerSetup
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import EngineConfig, EngineLimits
from cadenza.fingerprint import ARITHMETIC_REVISION, Fingerprint

logger = logging.getLogger(__name__)

CHUNK_BYTES = 16 << 20
MAX_THREADS = 4
MIN_CACHED_BYTES = 64 << 20  # smaller files take less than a tenth of a second

_HEX_CHARS = 64


def digest_of(parts: Iterable[str]) -> str:
    framed = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(framed.encode(errors="surrogatepass")).hexdigest()


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file of the cache folder atomically. Raises OSError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def content_digest(checkpoint: Checkpoint, cache_folder: Path) -> str:
    state = hashlib.sha256(checkpoint.digest.encode())
    for path in _weight_files(checkpoint):
        state.update(_file_digest(path, cache_folder / "digests").encode())
    return state.hexdigest()


def _weight_files(checkpoint: Checkpoint) -> list[Path]:
    if checkpoint.is_known:
        return [file.path for file in checkpoint.weights.files]
    return sorted(checkpoint.folder.glob("*.safetensors"))


def _file_digest(path: Path, folder: Path) -> str:
    """Of one file, from the cache if neither its content nor its inode has changed."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        name = hashlib.sha256(repr((str(path.resolve()), identity)).encode()).hexdigest()
        kept = None if found.st_size < MIN_CACHED_BYTES else folder / name
        digest = None if kept is None else _read_kept(kept)
        if digest is None:
            digest = _digest_of(file.fileno(), found.st_size)
            if kept is not None:
                _keep(kept, digest)
        return digest


def _digest_of(descriptor: int, num_bytes: int) -> str:
    """A SHA-256 of the SHA-256 of each chunk, so that several threads can work on one file."""
    state = hashlib.sha256(str(num_bytes).encode())
    if num_bytes:
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:

            def chunk_digest(start: int) -> bytes:
                return hashlib.sha256(view[start : start + CHUNK_BYTES]).digest()

            with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
                for each in threads.map(chunk_digest, range(0, num_bytes, CHUNK_BYTES)):
                    state.update(each)
    return state.hexdigest()


def _read_kept(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return text if len(text) == _HEX_CHARS else None


def _keep(path: Path, digest: str) -> None:
    """Best effort: without a cache the digest is computed again."""
    try:
        replace_file(path, digest.encode("ascii"))
    except OSError as error:
        logger.warning("the digest of the weights cannot be kept: %s", error.strerror)


# What is found, or compared, by parts: pages on a disk, with the states after them; quantised
# weights; scores of prompts; open streams, from one engine process to the next; answers, in their
# `Fingerprint`. For pages and images, a request's tenant and `cache_salt` stand beside them. Image
# rows live as long as their engine: their key has what the tower sees, its processor's settings,
# the sides and the pixels (`vision.processor.image_digest`)
Key = Literal["pages", "weights", "scores", "streams", "answers"]

_CHECKPOINT_CHARS, _DIGEST_CHARS = 32, 16


def _part(*keys: Key) -> Any:
    return field(metadata={"keys": keys})


def _later(*keys: Key) -> Any:
    return field(metadata={"keys": keys}, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity of a model as its engine computes it. A digest has its parts in the order of the
    fields. A tuple that decides nothing is empty, and in no digest."""

    # Of Cadenza: the layout of pages and of packed weights is that of its kernels
    version: str = _part("pages", "weights", "streams")
    revision: int = _part("pages", "weights", "streams")
    # The digest of its settings and of every byte of its weights
    checkpoint: str = _part("pages", "weights", "scores", "streams", "answers")
    # The settings as they are read: an MTP layer lies in the files of its model
    declared: str = _part("weights")
    # Versions, device, instruction set, libraries
    kernels: tuple[str, ...] = _part("pages", "weights", "streams")
    # Where the arithmetic has no name: the processor and the shapes of a step
    machine: tuple[str, ...] = _part("pages")
    backend: str = _part("pages")
    ops: str = _part("pages")
    exactness: str = _part("pages", "weights", "streams")  # `--arithmetic`
    activations: str = _part("pages", "weights", "scores", "streams", "answers")
    # The type of most weights; `quantization` is what of that was asked for
    weights: str = _part("pages", "streams", "answers")
    quantization: str = _part("weights", "scores")
    kv: str = _part("pages", "streams", "answers")
    kv_cache_dtype: str = _part("weights")
    page_size: int = _part("pages")
    # LongRoPE's factors follow it; a request without a length may reach it
    max_model_len: int = _part("pages", "streams", "answers")
    hidden: tuple[str, ...] = _part("pages")  # Whether pages have hidden states, too
    # The class with its revision, or a digest of what decides its bits on this machine
    arithmetic: str = _part("scores", "streams", "answers")
    eos_token_ids: tuple[str, ...] = _part("streams")
    tokenizer: str = _later("answers")
    template: str = _later("answers")
    # Of the recommended sampling, as far as it is followed, and of the tokens that end answers
    defaults: str = _later("answers")
    scorer: str = _later("streams", "answers")  # Of the model that scores prompts
    engine_seed: int = field(metadata={"keys": ("streams", "answers")}, default=0)

    def parts(self, key: Key) -> dict[str, Any]:
        own = (each.name for each in fields(self) if key in each.metadata["keys"])
        return {name: getattr(self, name) for name in own}

    def digest(self, key: Key) -> str:
        """In hex, over the parts of `key`."""
        texts: list[str] = []
        for value in self.parts(key).values():
            texts += value if isinstance(value, tuple) else (str(value),)
        return digest_of(texts)

    @property
    def fingerprint(self) -> Fingerprint:
        """Of answers to whole prompts, without constraints."""
        parts = self.parts("answers")
        parts["checkpoint"] = self.checkpoint[:_CHECKPOINT_CHARS]
        return Fingerprint(**parts)

    def answering(
        self, checkpoint: Checkpoint, config: EngineConfig, scorer: "Identity | None"
    ) -> "Identity":
        """With what decides answers beside a step's bits; `scorer` scores prompts."""
        is_followed = config.generation_config == "auto"
        recommended = repr(checkpoint.generation_defaults) if is_followed else ""
        return replace(
            self,
            tokenizer=_tokenizer_digest(checkpoint),
            template=_digest(*_flat(checkpoint.tokenizer.chat_templates)),
            defaults=_digest(recommended, repr(sorted(checkpoint.eos_token_ids))),
            scorer="" if scorer is None else scorer.digest("scores")[:_DIGEST_CHARS],
            engine_seed=config.seed,
        )


def identify(
    checkpoint: Checkpoint, setup: RunnerSetup, backend: Backend, traits: BackendTraits
) -> Identity:
    """The identity of a model and its backend, without what decides answers alone. Reads all
    weights once, unless their digest is in the cache folder."""
    assert setup.cache_folder is not None
    limits, scheme = setup.limits, checkpoint.scheme
    kernels = backend.describe_arithmetic(setup.device, setup.ops, checkpoint)
    named = backend.name_arithmetic(checkpoint, setup)
    arithmetic = f"{named}-{ARITHMETIC_REVISION}"
    if named is None:
        arithmetic = f"{traits.name}-{_digest(*kernels, repr(limits.of_steps))}"
    stored = setup.dtype if scheme is None else scheme.name
    return Identity(
        version=__version__,
        revision=ARITHMETIC_REVISION,
        checkpoint=content_digest(checkpoint, setup.cache_folder),
        declared=repr(checkpoint.config) if checkpoint.is_known else "",
        kernels=kernels,
        machine=_describe_machine(limits) if named is None else (),
        backend=traits.name,
        ops=traits.ops,
        exactness=setup.arithmetic,
        activations=setup.dtype,
        weights=stored if setup.quantization == "none" else setup.quantization,
        quantization=setup.quantization,
        kv=setup.dtype if setup.kv_cache_dtype == "auto" else setup.kv_cache_dtype,
        kv_cache_dtype=setup.kv_cache_dtype,
        page_size=limits.page_size,
        max_model_len=limits.max_model_len,
        hidden=("hidden states",) if "hidden_states" in setup.capabilities else (),
        arithmetic=arithmetic,
        eos_token_ids=tuple(map(str, sorted(checkpoint.eos_token_ids))),
    )


def find_setting(theirs: str, ours: str, backend: str, backends: Backends = BACKENDS) -> str | None:
    """The environment setting with which this machine computes in the arithmetic `theirs` of a
    fingerprint in place of `ours`; None if there is none, or it does so already."""
    (name, _, revision), (_, _, our_revision) = theirs.rpartition("-"), ours.rpartition("-")
    if theirs == ours or revision != our_revision:
        return None
    return find_backend(backend, backends).find_setting(name)


def _describe_machine(limits: EngineLimits) -> tuple[str, ...]:
    return (platform.machine(), str(os.cpu_count()), _cpu_flags(), repr(limits.of_steps))


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _tokenizer_digest(checkpoint: Checkpoint) -> str:
    source = checkpoint.tokenizer_source
    if source is None:
        return ""
    content = source.read_bytes() if isinstance(source, Path) else source.content
    special = _flat(checkpoint.tokenizer.special_tokens)
    return _digest(hashlib.sha256(content).hexdigest(), *special)


def _flat(texts: dict[str, str]) -> list[str]:
    return [part for entry in sorted(texts.items()) for part in entry]


def _digest(*parts: str) -> str:
    return digest_of(parts)[:_DIGEST_CHARS] if parts else ""
