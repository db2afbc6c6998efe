"""The same logits, options and seed give the same tokens on MLX as on XLA."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.batch.step_schema import NO_HIDDEN, LogitInputs
from cadenza.request import Request, SamplingParams
from tests.contract.steps import logit_rows
from tests.mlx.test_kinds import streams

VOCAB_SIZE = 997
NUM_ROWS = 96


def random_rows(rng: np.random.Generator) -> LogitInputs[Any]:
    """Settings of every filter, alone and together, with each switched off in some rows."""

    def some(values: Any, off: float) -> Any:
        return np.where(rng.random(NUM_ROWS) < 0.5, values, off)

    return logit_rows(
        NUM_ROWS,
        positions=np.arange(NUM_ROWS),
        keys=rng.integers(0, 1 << 32, (NUM_ROWS, 2), np.uint64).astype(np.uint32),
        num_logprobs=some(20, -1),
        temperature=some(rng.uniform(0.2, 2.0, NUM_ROWS), 0.0),
        top_k=some(rng.integers(1, 50, NUM_ROWS), 0),
        top_p=some(rng.uniform(0.1, 1.0, NUM_ROWS), 1.0),
        min_p=some(rng.uniform(0.0, 0.3, NUM_ROWS), 0.0),
        top_n_sigma=some(rng.uniform(0.5, 3.0, NUM_ROWS), 0.0),
        targets=np.where(rng.random(NUM_ROWS) < 0.1, 5, -1),
    )


def test_choices_from_equal_logits_are_equal():
    import jax.numpy as jnp
    import mlx.core as mx

    from cadenza.backends.mlx.arrays import mlx_arrays
    from cadenza.backends.token_choice import TokenChoice, read_result
    from cadenza.backends.xla.ops.reference import CHOICE

    rng = np.random.default_rng(0)
    rows = random_rows(rng)
    logits = (rng.standard_normal((NUM_ROWS, VOCAB_SIZE)) * 3).astype(np.float32)
    logits[:, 17] = logits[:, 4]
    logits[3, 9] = np.nan
    names = LogitInputs.__dataclass_fields__
    on_device = replace(rows, **{name: jnp.asarray(getattr(rows, name)) for name in names})
    theirs = read_result(
        np.asarray(CHOICE.choose_tokens(jnp.asarray(logits), on_device)), NO_HIDDEN
    )
    chosen = TokenChoice(mlx_arrays()).choose_tokens(mx.array(logits), rows)
    ours = read_result(np.array(chosen), NO_HIDDEN)
    finite = np.arange(NUM_ROWS) != 3
    assert ours.is_finite.tolist() == finite.tolist()
    for name in ("token_ids", "ranks", "top_ids"):
        found, expected = (getattr(each, name)[finite].tolist() for each in (ours, theirs))
        assert found == expected
    np.testing.assert_allclose(ours.logprobs[finite], theirs.logprobs[finite], atol=2e-5)


RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drawn": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 11},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {14: 4.0, 15: -100.0}, "temperature": 0.7, "seed": 2},
    "allowed": {"allowed_token_ids": tuple(range(20, 400))},
    "stop late": {"min_tokens": 6, "stop_token_ids": (13, 14, 15, 16, 300), "ignore_eos": False},
    "several": {"n": 2, "temperature": 1.0, "seed": 8, "repetition_penalty": 1.1},
}


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(1)
    return [tuple(rng.integers(3, 2000, length).tolist()) for length in (4, 77)]


def requests(prompts: list[tuple[int, ...]]) -> list[Request]:
    basic = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    return [
        Request(
            prompt_token_ids=prompt,
            params=replace(basic, **RULES[name]),
            bad_word_token_ids=((40,), (50, 60)) if index % 2 else (),
        )
        for index, name in enumerate(RULES)
        for prompt in prompts
    ]


def test_every_rule_gives_the_same_tokens_as_on_xla(prompts: list[tuple[int, ...]]):
    from cadenza.config import EngineConfig
    from cadenza.frontend.loaded_model import load_model

    found: list[list[list[int]]] = []
    for backend in ("xla", "mlx"):
        config = EngineConfig(
            backend=backend,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_num_queued_reqs=64,
        )
        with closing(load_model(None, config)) as loaded:
            found.append(streams(loaded.core, requests(prompts), at_once=True))
    assert found[0] == found[1]


def test_a_folder_of_another_family_is_served_by_its_name(tmp_path: Path):
    """The bundled model's tokenizer with a recurrent model: text in, text out."""
    import shutil

    from cadenza import LLM
    from cadenza.checkpoint.opening import open_checkpoint
    from tests.mlx.tiny_models import KINDS, Kind, write_tiny_model

    bundled = open_checkpoint(None)
    config = {**KINDS["recurrent"].config, "vocab_size": bundled.config.vocab_size}
    folder = write_tiny_model(Kind(config=config), tmp_path / "mamba")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled.folder / name, folder / name)
    llm = LLM(str(folder), backend="mlx", max_num_seqs=2, max_model_len=64)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        (output,) = llm.generate(["The capital of France is"], params)
        assert len(output.outputs[0].token_ids) == 5
    finally:
        llm.close()
