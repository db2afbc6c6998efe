"""Our bfloat16 against transformers' bfloat16, both measured from transformers in float32.

The measure is KL(float32 ‖ bfloat16) of the next token's distribution, averaged over every position
of several prompts and their continuations. Ours may be at most 1.5 times theirs: bfloat16 must cost
no more with our kernels than it costs in the engine that everybody measures by. The figures are in
README.md of this folder.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape, text_shape_names
from cadenza.models.model_config import ModelConfig
from cadenza.models.rope_config import Llama3RopeScaling, RopeConfig
from cadenza.text import Tokenizer
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.oracle.hf import decode_greedily, load_model
from tests.oracle.tapped_engine import Float64Array, TappedEngine, log_softmax

pytestmark = [pytest.mark.oracle, pytest.mark.native]

BUNDLED = Path("src/cadenza/models/bundled")
MAX_RATIO = 1.5
MIN_POSITIONS = 512
PROMPT_LENGTHS = (96, 120, 64, 17, 1, 100)
NUM_DECODES = 32
HEAD_TOLERANCE = 1e-4

LLAMA = ModelConfig(
    family="llama",
    vocab_size=8009,
    hidden_size=576,
    intermediate_size=1000,
    num_layers=6,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(
        theta=10_000.0,
        rotary_dim=64,
        scaling=Llama3RopeScaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    has_qkv_bias=True,
    has_attention_out_bias=True,
    has_mlp_bias=True,
    max_position_embeddings=512,
    dtype="bfloat16",
)
QWEN3 = ModelConfig(
    family="qwen3",
    vocab_size=8009,
    hidden_size=328,
    intermediate_size=744,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=80,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1_000_000.0, rotary_dim=80),
    qk_norm="head",
    tie_word_embeddings=True,
    max_position_embeddings=512,
    dtype="bfloat16",
)
SHAPES = {"llama": LLAMA, "qwen3": QWEN3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergences:
    """Mean KL(float32 ‖ bfloat16), in nats a position, of theirs and of ours."""

    theirs: float
    ours: float
    num_positions: int

    def __str__(self) -> str:
        return (
            f"KL of transformers' bfloat16 {self.theirs:.3e}, of ours {self.ours:.3e}: "
            f"ratio {self.ours / self.theirs:.2f} over {self.num_positions} positions"
        )


def divergence(exact: Float64Array, other: Float64Array) -> Float64Array:
    """KL(exact ‖ other) of each row of logits [T, V]."""
    expected, given = log_softmax(exact), log_softmax(other)
    return (np.exp(expected) * (expected - given)).sum(axis=-1)


def compute_logits(model: Any, sequences: list[list[int]]) -> list[Float64Array]:
    import torch

    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0].double().numpy() for ids in sequences]


def measure(
    folder: Path,
    sequences: list[list[int]],
    num_prompt_tokens: list[int],
    config: ModelConfig | None = None,
) -> Divergences:
    exact = compute_logits(load_model(folder, "float32"), sequences)
    theirs = compute_logits(load_model(folder, "bfloat16"), sequences)
    engine = TappedEngine(folder, ops="native", dtype="bfloat16", config=config)
    forced = engine.force(sequences, num_prompt_tokens)
    assert max(each.head_error for each in forced) <= HEAD_TOLERANCE
    ours = [each.logits for each in forced]
    of_theirs = np.concatenate([divergence(*pair) for pair in zip(exact, theirs, strict=True)])
    of_ours = np.concatenate([divergence(*pair) for pair in zip(exact, ours, strict=True)])
    return Divergences(
        theirs=float(of_theirs.mean()), ours=float(of_ours.mean()), num_positions=len(of_ours)
    )


def check(name: str, found: Divergences, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{name}: {found}", end="")
    assert found.num_positions >= MIN_POSITIONS
    assert found.theirs > 1e-7, "the comparison could not fail"
    assert found.ours <= MAX_RATIO * found.theirs


@pytest.mark.parametrize("name", SHAPES)
def test_random_weights_lose_no_more_to_bfloat16_than_in_transformers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_random_checkpoint(SHAPES[name], tmp_path / name, seed=1, dtype="bfloat16")
    sequences = random_sequences(SHAPES[name].vocab_size)
    check(name, measure(tmp_path / name, sequences, list(PROMPT_LENGTHS)), capsys)


@pytest.mark.parametrize("name", [name for name in text_shape_names() if name.startswith("tiny-")])
def test_every_family_loses_no_more_to_bfloat16_than_in_transformers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Tiny shapes, whose windows and original lengths every long prompt passes."""
    config = replace(named_shape(name), dtype="bfloat16", max_position_embeddings=512)
    write_random_checkpoint(config, tmp_path / name, seed=1, dtype="bfloat16")
    sequences = random_sequences(config.vocab_size)
    check(name, measure(tmp_path / name, sequences, list(PROMPT_LENGTHS)), capsys)


def random_sequences(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(2)
    lengths = [length + NUM_DECODES for length in PROMPT_LENGTHS]
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def test_a_slightly_wrong_rope_loses_more_than_is_allowed(tmp_path: Path):
    """The negative control: another 5 % on the rotary base."""
    write_random_checkpoint(LLAMA, tmp_path / "llama", seed=1, dtype="bfloat16")
    wrong = replace(LLAMA, rope=replace(LLAMA.rope, theta=LLAMA.rope.theta * 1.05))
    sequences, lengths = random_sequences(LLAMA.vocab_size)[:2], list(PROMPT_LENGTHS)[:2]
    found = measure(tmp_path / "llama", sequences, lengths, wrong)
    assert found.ours > MAX_RATIO * found.theirs, str(found)


def test_the_bundled_model_loses_no_more_to_bfloat16_than_in_transformers(
    capsys: pytest.CaptureFixture[str],
):
    """Over real text: prompts of the training suite's kinds, and their greedy continuations."""
    path = open_checkpoint(BUNDLED).tokenizer_source
    assert path is not None
    texts = [each["prompt"] for each in json.loads(Path("training/prompts.json").read_text())]
    encoded = [Tokenizer(path).encode(text) for text in texts[::7]]
    prompts = sorted((ids for ids in encoded if len(ids) <= 400), key=len)[-8:]
    sequences = [decode_greedily(BUNDLED, prompt, NUM_DECODES)[0] for prompt in prompts]
    found = measure(BUNDLED, sequences, [len(prompt) for prompt in prompts])
    check("bundled", found, capsys)
