"""Checkpoints to measure with: random weights of a shape, made once and kept in the cache folder.

Owns their names and the watching of their making; the weights are `checkpoint`'s. Invariant: a
folder in the cache is whole, because it gets its name only when everything is written.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from dataclasses import asdict, dataclass
from pathlib import Path

from cadenza.bench.random_tokenizer import write_random_tokenizer
from cadenza.checkpoint import ModelConfig, count_parameters, named_shape, write_random_checkpoint
from cadenza.checkpoint.dtypes import WeightDType, item_bytes
from cadenza.checkpoint.tokenizer_files import TOKENIZER_FILE
from cadenza.errors import CheckpointError

OnProgress = Callable[[int, int], None]
"""Told the bytes written so far and in all."""

_POLL_S = 0.2
_DIGEST_DIGITS = 12


def _unwatched(num_written: int, num_bytes: int) -> None:
    """Nobody is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWeights:
    """What a random checkpoint follows from."""

    shape: ModelConfig
    dtype: WeightDType
    seed: int = 0

    @property
    def num_bytes(self) -> int:
        return count_parameters(self.shape) * item_bytes(self.dtype)

    @property
    def digest(self) -> str:
        """Changes with every number of the shape, the format and the seed."""
        facts = json.dumps([asdict(self.shape), self.dtype, self.seed], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:_DIGEST_DIGITS]


def random_weights(name_or_file: str, dtype: WeightDType | None = None) -> RandomWeights:
    """Of a known shape or a config.json, in its own type unless told. Raises CheckpointError."""
    shape = named_shape(name_or_file)
    return RandomWeights(shape=shape, dtype=dtype or shape.dtype)


def make_checkpoint(weights: RandomWeights, folder: Path, on_progress: OnProgress) -> None:
    """Writes weights and a tokenizer into a new or empty folder while `on_progress` is told.

    Raises CheckpointError.
    """
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(
            write_random_checkpoint,
            weights.shape,
            folder,
            seed=weights.seed,
            dtype=weights.dtype,
        )
        while not _is_done(done):
            on_progress(min(_bytes_in(folder), weights.num_bytes), weights.num_bytes)
        done.result()
    write_random_tokenizer(folder / TOKENIZER_FILE, weights.shape.vocab_size)
    on_progress(weights.num_bytes, weights.num_bytes)


def cached_checkpoint(shape: str, cache: Path, on_progress: OnProgress = _unwatched) -> Path:
    """Random weights of a known shape or a config.json, made now if need be.

    Raises CheckpointError.
    """
    weights = random_weights(shape)
    folder = cached_folder(weights, shape, cache)
    ensure_checkpoint(weights, folder, on_progress)
    return folder


def cached_folder(weights: RandomWeights, label: str, cache: Path) -> Path:
    """Where the checkpoint is, or will be."""
    name = Path(label).name.removesuffix(".json")
    return cache / "bench" / f"{name}-{weights.dtype}-{weights.digest}"


def ensure_checkpoint(weights: RandomWeights, folder: Path, on_progress: OnProgress) -> None:
    """Makes the checkpoint unless it is there. Raises CheckpointError."""
    if _is_whole(folder):
        return
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        make_checkpoint(weights, partial, on_progress)
        if not _is_whole(folder):  # of an earlier version, which wrote less
            shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    except OSError as error:
        # Another process may have been faster; then its folder is as good as ours.
        if not _is_whole(folder):
            raise CheckpointError(
                f"the random checkpoint {folder.name} cannot be kept: {error.strerror}"
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / TOKENIZER_FILE).is_file()


def _is_done(future: "Future[None]") -> bool:
    try:
        future.exception(timeout=_POLL_S)
    except NotDone:
        return False
    return True


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
