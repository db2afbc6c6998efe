"""Long prompts in chunks, exact against `ReferenceEngine`: hundreds of softmax blocks and steps."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.reference_model import ReferenceModel
from cadenza.backends.xla.runner import XlaRunner
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.events import Token
from cadenza.models.rope_config import RopeConfig
from cadenza.request import Request, SamplingParams
from cadenza.verification.reference import ReferenceEngine
from cadenza.weights.weights import open_weights
from tests.by_day import by_day
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.xla.harness import HOSTILE, NAN, replay

SMALLEST = replace(
    HOSTILE,
    vocab_size=97,
    hidden_size=8,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rope=RopeConfig(theta=1e6, rotary_dim=4),
    max_position_embeddings=1 << 16,
)
NUM_OUTPUT_TOKENS = 8
TOLERANCE = 1e-4


def long_request(num_prompt_tokens: int) -> Request:
    prompt = np.random.default_rng(95).integers(3, 97, num_prompt_tokens)
    params = SamplingParams(
        max_tokens=NUM_OUTPUT_TOKENS, temperature=1.0, seed=3, ignore_eos=True, logprobs=0
    )
    return Request(prompt_token_ids=tuple(prompt.tolist()), params=params)


def serve_long(runner: XlaRunner, limits: EngineLimits, request: Request) -> list[Token]:
    runner.reset()
    engine = EngineCore(runner, limits, CoreOptions(eos_token_ids=frozenset({2})))
    engine.submit(request)
    tokens: list[Token] = []
    while not engine.is_idle:
        tokens += [event for event in engine.step() if isinstance(event, Token)]
    return tokens


def logprobs_of(tokens: list[Token]) -> np.ndarray:
    return np.array([token.logprobs.logprob for token in tokens if token.logprobs])


def check_long_prompt(folder: Path, num_prompt_tokens: int) -> None:
    replay(f"a prompt of {num_prompt_tokens} tokens, seed 95")
    write_random_checkpoint(SMALLEST, folder, seed=0, dtype="float32")
    weights = open_weights(folder)
    context = num_prompt_tokens + NUM_OUTPUT_TOKENS
    limits = EngineLimits(
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=context,
        page_size=64,
        num_pages=context // 64 + 2,
        max_num_queued_reqs=4,
    )
    runner = XlaRunner(SMALLEST, weights, RunnerSetup(limits=limits, fill=NAN), OpTable)
    runner.warmup()
    request = long_request(num_prompt_tokens)
    reference = ReferenceEngine(
        ReferenceModel(SMALLEST, weights, context), max_model_len=context, eos_token_ids=[2]
    )
    expected = reference.run(request)
    tokens = serve_long(runner, limits, request)
    assert tuple(token.token_id for token in tokens) == expected.token_ids
    assert np.abs(logprobs_of(tokens) - np.array(expected.logprobs)).max() < TOLERANCE
    half = num_prompt_tokens // 2
    other = (*request.prompt_token_ids[1:half], 5, *request.prompt_token_ids[half:])
    tokens = serve_long(runner, limits, replace(request, prompt_token_ids=other))
    error = np.abs(logprobs_of(tokens) - np.array(expected.logprobs)).max()
    assert error > 2 * TOLERANCE, "another first half changed nothing"


@pytest.mark.parametrize("num_tokens", by_day([1024, 4096, 32768], {1024}))
def test_a_long_prompt_in_chunks_is_exact(tmp_path: Path, num_tokens: int):
    check_long_prompt(tmp_path / "checkpoint", num_tokens)
