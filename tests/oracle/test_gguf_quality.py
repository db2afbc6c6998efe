"""The GGUF files of `make real`, computed from their codes, against the same weights in float32.

The measure is the mean KL(float32 of transformers ‖ ours) in nats over the second half of each
chunk of a text, as `llama-perplexity --kl-divergence` takes it, in bfloat16, as users run it. Where
`CADENZA_LLAMA_CPP` names a built checkout of llama.cpp, its own figure for the same file and text
is a bound too.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.checkpoint import open_checkpoint
from cadenza.text import Tokenizer
from tests.oracle.hf import load_model
from tests.oracle.test_gguf_vocabularies import VARIABLE
from tests.xla.divergence import kl_of_positions, logprobs_of

pytestmark = [pytest.mark.oracle, pytest.mark.native]

MOST_KL = 2e-3
CHUNK, NUM_CHUNKS = 512, 4
TEXT = Path("ARCHITECTURE.md")


@pytest.fixture(scope="module")
def gguf(real_folder: Path) -> Path:
    """The file that the folder was made of."""
    return real_folder.with_suffix(".gguf")


@pytest.fixture(scope="module")
def chunks(real_folder: Path) -> list[list[int]]:
    """Consecutive tokens; where the model wants a first token, it replaces that of each chunk."""
    tokenizer = Tokenizer(real_folder / "tokenizer.json")
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    found = [ids[at : at + CHUNK] for at in range(0, CHUNK * NUM_CHUNKS, CHUNK)]
    assert len(found[-1]) == CHUNK
    has_first = tokenizer.encode("a") != tokenizer.encode("a", add_special_tokens=False)
    return [[ids[0], *chunk[1:]] for chunk in found] if has_first else found


def scored(logprobs: np.ndarray) -> np.ndarray:
    """Of the positions that llama-perplexity scores: each has at least half a chunk before it."""
    return logprobs[CHUNK // 2 : CHUNK - 1]


def their_logprobs(folder: Path, chunks: list[list[int]]) -> Iterator[np.ndarray]:
    import torch

    model = load_model(folder)
    for chunk in chunks:
        with torch.inference_mode():
            logits = model(torch.tensor([chunk]), use_cache=False).logits[0]
            yield torch.log_softmax(logits.float(), dim=-1).numpy()


def test_a_file_is_as_near_to_float32_as_in_llama_cpp(
    real_folder: Path,
    gguf: Path,
    chunks: list[list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    ours = logprobs_of(chunks, open_checkpoint(gguf), bucket=CHUNK, dtype=jnp.bfloat16)
    pairs = zip(their_logprobs(real_folder, chunks), ours, strict=True)
    each = np.concatenate([kl_of_positions(scored(p), scored(q)) for p, q in pairs])
    kl, error = float(each.mean()), float(each.std() / np.sqrt(len(each)))
    theirs = kl_of_llama_cpp(gguf, tmp_path)
    with capsys.disabled():
        print(f"\n{real_folder.name}: KL {kl:.2e} ± {error:.1e}, llama.cpp's {theirs}", end="")
    assert 1e-6 < kl <= MOST_KL
    assert theirs is None or kl <= theirs


def kl_of_llama_cpp(gguf: Path, folder: Path) -> float | None:
    """Its mean KL of the file from the same weights in F32; None if llama.cpp is not there."""
    sources = os.environ.get(VARIABLE)
    programs = None if sources is None else Path(sources) / "build" / "bin"
    if programs is None or not (programs / "llama-perplexity").exists():
        return None
    wide, base = folder / "f32.gguf", folder / "base"
    run(programs / "llama-quantize", "--allow-requantize", gguf, wide, "F32")
    score = [programs / "llama-perplexity", "-f", TEXT, "-c", CHUNK, "--chunks", NUM_CHUNKS]
    run(*score, "-m", wide, "--kl-divergence-base", base)
    output = run(*score, "-m", gguf, "--kl-divergence-base", base, "--kl-divergence")
    found = re.search(r"Mean\s+KLD:\s+([-\d.e]+)", output)
    assert found is not None, output
    return float(found[1])


def run(*command: Any) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr
