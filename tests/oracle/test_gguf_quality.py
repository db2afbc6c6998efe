"""The GGUF files of `make real`, computed from their codes, against the same weights in float32.

The measure is the mean KL(float32 of transformers ‖ ours) in nats over the second half of each
chunk of a text, which `llama-perplexity --kl-divergence` scores too. Where `CADENZA_LLAMA_CPP`
names a built checkout of llama.cpp, its logits for the same file and tokens are held beside ours.
"""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.text import Tokenizer
from tests.oracle.hf import load_model
from tests.oracle.tapped_engine import log_softmax
from tests.oracle.test_gguf_vocabularies import VARIABLE
from tests.xla.divergence import kl_of_positions, logprobs_of

pytestmark = [pytest.mark.oracle, pytest.mark.native]

MOST_KL = 2e-3
MOST_OF_LLAMA_CPP = 0.75
"""In bfloat16, where llama.cpp has activations in float32 and KV in float16."""

CHUNK, NUM_CHUNKS = 512, 2
NUM_SCORED = CHUNK // 2 - 1
TEXT = Path(__file__).with_name("corpus.txt")
LIBRARIES = ("src/libllama.a", *(f"ggml/src/libggml{part}.a" for part in ("", "-cpu", "-base")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A file, the folder with its weights in float32, and the tokens of each chunk."""

    file: Path
    folder: Path
    chunks: list[list[int]]


@pytest.fixture(scope="module")
def model(real_folder: Path) -> Model:
    """Where the tokenizer adds a first token, it replaces that of each chunk."""
    tokenizer = Tokenizer(real_folder / "tokenizer.json")
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    chunks = [ids[at : at + CHUNK] for at in range(0, CHUNK * NUM_CHUNKS, CHUNK)]
    assert len(chunks[-1]) == CHUNK
    if tokenizer.encode("a") != tokenizer.encode("a", add_special_tokens=False):
        chunks = [[ids[0], *chunk[1:]] for chunk in chunks]
    return Model(file=real_folder.with_suffix(".gguf"), folder=real_folder, chunks=chunks)


@pytest.fixture(scope="module")
def exact(model: Model) -> list[np.ndarray]:
    """transformers' log probabilities [NUM_SCORED, V] of each chunk."""
    import torch

    theirs = load_model(model.folder)
    found: list[np.ndarray] = []
    for chunk in model.chunks:
        with torch.inference_mode():
            logits = theirs(torch.tensor([chunk]), use_cache=False).logits[0, CHUNK // 2 : -1]
            found.append(torch.log_softmax(logits.float(), dim=-1).numpy())
    return found


def ours(model: Model, dtype: type) -> Iterator[np.ndarray]:
    checkpoint = open_checkpoint(model.file)
    for each in logprobs_of(model.chunks, checkpoint, bucket=CHUNK, dtype=dtype):
        yield each[CHUNK // 2 : -1]


def mean_kl(exact: list[np.ndarray], others: Iterator[np.ndarray]) -> float:
    pairs = zip(exact, others, strict=True)
    return float(np.mean([kl_of_positions(p, q).mean() for p, q in pairs]))


def test_a_file_is_near_to_float32(
    model: Model, exact: list[np.ndarray], capsys: pytest.CaptureFixture[str]
):
    name = model.folder.name
    kl = mean_kl(exact, ours(model, jnp.bfloat16))
    with capsys.disabled():
        print(f"\n{name}: KL {kl:.2e} in bfloat16", end="")
    assert 1e-6 < kl <= MOST_KL


def test_a_file_is_as_near_to_float32_as_in_llama_cpp(
    model: Model, exact: list[np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    wide, narrow = (mean_kl(exact, ours(model, dtype)) for dtype in (jnp.float32, jnp.bfloat16))
    theirs = mean_kl(exact, logprobs_of_llama_cpp(model, tmp_path))
    with capsys.disabled():
        print(
            f"\n{model.folder.name}: KL {wide:.2e} in float32, {narrow:.2e} in bfloat16; "
            f"llama.cpp's {theirs:.2e}",
            end="",
        )
    assert min(wide, narrow) > 1e-6
    assert max(wide, narrow) <= MOST_OF_LLAMA_CPP * theirs


def logprobs_of_llama_cpp(model: Model, folder: Path) -> Iterator[np.ndarray]:
    program, tokens, logits = build_llama_logits(folder), folder / "tokens", folder / "logits"
    np.array(model.chunks, np.int32).tofile(tokens)
    subprocess.run([program, model.file, tokens, str(CHUNK), logits], check=True)
    stored = np.memmap(logits, np.float32, "r").reshape(len(model.chunks), NUM_SCORED, -1)
    for chunk in stored:
        yield log_softmax(np.asarray(chunk))


def build_llama_logits(folder: Path) -> Path:
    """`llama_logits.cpp`, with the static libraries of the checkout; skips without them."""
    sources = Path(os.environ.get(VARIABLE) or "/nowhere")
    libraries = [sources / "build" / name for name in LIBRARIES]
    if not all(path.exists() for path in libraries):
        pytest.skip(f"{VARIABLE} names no sources of llama.cpp with a build/ of static libraries")
    program = folder / "llama_logits"
    own = Path(__file__).with_name("llama_logits.cpp")
    headers = [f"-I{sources / name}" for name in ("include", "ggml/include")]
    flags = ["-O1", *headers, "-o", program]
    subprocess.run(["g++", own, *libraries, *flags, "-fopenmp", "-ldl"], check=True)
    return program
