"""Random checkpoints of a shape, with a tokenizer, kept in the cache folder. Invariants: a cached
folder is complete, as it is renamed into place at the end; each token of a random tokenizer has its
own text, and with at least 256 tokens any text can be encoded (the first stand for bytes)."""

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cadenza.bench import OnStatus
from cadenza.checkpoint.random_checkpoint import Shape, read_shape, write_random_checkpoint
from cadenza.checkpoint.tokenizer_files import TOKENIZER_FILE
from cadenza.errors import CheckpointError
from cadenza.models.declaration import count_parameters
from cadenza.weights.weight_format import WeightDType, item_bytes

_POLL_S = 0.2
_DIGEST_DIGITS = 12
_SPACE = "Ġ"
_LETTERS = "etaoinshrdlucmfwygpbvkxqjz"


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWeights:
    """What determines a random checkpoint."""

    shape: Shape
    dtype: WeightDType
    seed: int = 0

    @property
    def num_bytes(self) -> int:
        return count_parameters(self.shape.config) * item_bytes(self.dtype)

    @property
    def digest(self) -> str:
        facts = json.dumps([asdict(self.shape.config), self.dtype, self.seed], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:_DIGEST_DIGITS]


def random_weights(
    name_or_file: str, dtype: WeightDType | None = None, seed: int = 0
) -> RandomWeights:
    """Of a shape's name or a config.json. Raises CheckpointError."""
    shape = read_shape(name_or_file)
    return RandomWeights(shape=shape, dtype=dtype or shape.config.dtype, seed=seed)


def make_checkpoint(weights: RandomWeights, folder: Path, report: OnStatus) -> None:
    """Raises CheckpointError where the folder is not new or empty."""
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(
            write_random_checkpoint, weights.shape, folder, seed=weights.seed, dtype=weights.dtype
        )
        tenths = 0
        while wait([writing], timeout=_POLL_S).not_done:
            written = min(10, 10 * _bytes_in(folder) // weights.num_bytes)
            if written > tenths:
                tenths = written
                report(f"writing random weights: {10 * tenths} %")
        writing.result()
    write_random_tokenizer(folder / TOKENIZER_FILE, weights.shape.config.vocab_size)
    report("writing random weights: 100 %")


def cached_checkpoint(shape: str, cache: Path, report: OnStatus = lambda _: None) -> Path:
    """The folder of a shape's random weights, written now if need be. Raises CheckpointError."""
    weights = random_weights(shape)
    folder = cached_folder(weights, shape, cache)
    ensure_checkpoint(weights, folder, report)
    return folder


def cached_folder(weights: RandomWeights, label: str, cache: Path) -> Path:
    name = Path(label).name.removesuffix(".json")
    return cache / "bench" / f"{name}-{weights.dtype}-{weights.digest}"


def ensure_checkpoint(weights: RandomWeights, folder: Path, report: OnStatus) -> None:
    """Raises CheckpointError."""
    if _is_complete(folder):
        return
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        make_checkpoint(weights, partial, report)
        if not _is_complete(folder):  # an earlier version wrote fewer files
            shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    except OSError as error:
        # Another process may have written it first; its folder is equal to ours.
        if not _is_complete(folder):
            raise CheckpointError(
                f"the random checkpoint {folder.name} cannot be kept: {error.strerror}"
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / TOKENIZER_FILE).is_file()


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def write_random_tokenizer(path: Path, vocab_size: int) -> None:
    names = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab_size]
    names += [_SPACE + _word(number) for number in range(vocab_size - len(names))]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def _word(number: int) -> str:
    letters = ""
    number += len(_LETTERS)
    while number:
        number, letter = divmod(number, len(_LETTERS))
        letters += _LETTERS[letter]
    return letters
