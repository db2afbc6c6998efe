"""Embeddings against transformers' last hidden states, in float32."""

from pathlib import Path

import numpy as np
import pytest

from cadenza import LLM, PoolingParams
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.request import Pooling
from tests.oracle.hf import compute_hidden_states
from tests.oracle.test_engine_logits import FOLDERS, OPS, PROMPT_LENGTHS, TOLERANCE, shortest_prompt

pytestmark = pytest.mark.oracle


def pooled(states: np.ndarray, pooling: Pooling) -> np.ndarray:
    """By the definition, of all states [T, E] of a prompt."""
    wide = states.astype(np.float64)
    vector = wide[-1] if pooling == "last" else wide.mean(axis=0)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_embeddings_are_those_of_transformers(folder: Path, ops: str) -> None:
    config = open_checkpoint(folder).config
    rng, least = np.random.default_rng(11), shortest_prompt(config)
    lengths = [length for length in PROMPT_LENGTHS if length >= least]
    prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in lengths]
    poolings: tuple[Pooling, ...] = ("last", "mean")
    with LLM(folder, ops=ops, dtype="float32", max_model_len=128, max_num_seqs=4) as llm:
        found = {each: llm.embed(prompts, PoolingParams(pooling=each)) for each in poolings}
    for index, prompt in enumerate(prompts):
        states = compute_hidden_states(folder, prompt)
        vectors = {each: np.array(found[each][index].outputs.embedding) for each in poolings}
        for pooling, ours in vectors.items():
            theirs = pooled(states, pooling)
            assert np.abs(ours - theirs).max() < TOLERANCE * np.ptp(theirs)
        if len(prompt) > 1:
            other = np.abs(vectors["mean"] - pooled(states, "last")).max()
            assert other > TOLERANCE * np.ptp(states[-1]), "the poolings cannot be told apart"
