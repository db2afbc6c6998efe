"""MTP layers of each layout, alone on random hidden states and behind their model, against numpy.

A runner of the target keeps hidden states. For the layer alone, its pages are written with random
ones; behind its model, with those that the target computed. The weights are random, of shapes of
which the decoder knows the arithmetic: what the blocks of Qwen3-Next and GLM-4.5 have beside
Qwen3's is among them where the decoder has it (norms that add one, partly rotated heads, biases
of q, k and v, mixtures). Unwritten KV is NaN.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.runner import XlaRunner
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.models.model_config import ModelConfig
from cadenza.models.mtp_layout import DEEPSEEK_MTP, QWEN_MTP, MTPLayout
from cadenza.models.rope_config import RopeConfig
from cadenza.weights.weights import open_weights
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.contract.steps import run_step
from tests.oracle.numpy_mtp import QWEN_NAMES, HeadNames, NumpyMTP, deepseek_names, numpy_mtp
from tests.xla.harness import slots_of
from tests.xla.test_mtp_head import (
    GEOMETRY,
    LIMITS,
    PAGES,
    TOLERANCE,
    compute_target,
    head_errors,
    head_stream,
    make_pair,
)

VOCAB_SIZE = 211
NUM_TOKENS = 70
TOKEN_IDS: list[int] = np.random.default_rng(5).integers(0, VOCAB_SIZE, NUM_TOKENS).tolist()


@dataclass(frozen=True)
class Case:
    shape: str
    layout: MTPLayout
    names: HeadNames
    changes: dict[str, Any]
    known: dict[str, Any]

    @property
    def config(self) -> ModelConfig:
        return replace(
            named_shape(self.shape),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
            num_mtp_layers=1,
            mtp_layout=self.layout,
            **self.changes,
        )


NEXT = {"norm_adds_one": True, "rope": RopeConfig(theta=1e6, rotary_dim=20)}
NEXT_KNOWN = {"norm_adds_one": True, "partial_rotary_factor": 0.25}
GLM = {"has_qkv_bias": True, "rope": RopeConfig(theta=1e6, rotary_dim=40)}
GLM_KNOWN = {"partial_rotary_factor": 0.5}
CASES = {
    "qwen": Case("tiny-qwen3", QWEN_MTP, QWEN_NAMES, {}, {}),
    "qwen-next": Case("tiny-qwen3", QWEN_MTP, QWEN_NAMES, NEXT, NEXT_KNOWN),
    "qwen-moe": Case("tiny-qwen3-moe", QWEN_MTP, QWEN_NAMES, {}, {}),
    "deepseek": Case("tiny-qwen3-moe", DEEPSEEK_MTP, deepseek_names(4), {}, {}),
    "glm": Case("tiny-qwen3", DEEPSEEK_MTP, deepseek_names(3), GLM, GLM_KNOWN),
}


@dataclass(frozen=True)
class Opened:
    target: XlaRunner
    head: XlaRunner
    definition: NumpyMTP

    def with_fault(self, name: str) -> NumpyMTP:
        return replace(self.definition, wrong=frozenset([name]))


def checkpoint_of(config: ModelConfig, folder: Path) -> Checkpoint:
    """A random checkpoint of a config, of which a config.json need not be able to say all."""
    write_random_checkpoint(config, folder, seed=7, dtype="float32")
    return replace(open_checkpoint(None), known=(config, open_weights(folder)))


def definition_of(case: Case, checkpoint: Checkpoint) -> NumpyMTP:
    config, experts = checkpoint.config, checkpoint.config.experts
    known = {
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_size": config.hidden_size,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope.theta},
        "tie_word_embeddings": config.tie_word_embeddings,
        "num_experts_per_tok": experts and experts.num_chosen,
        "norm_topk_prob": experts and experts.over_chosen,
        **case.known,
    }
    weights = checkpoint.weights
    return numpy_mtp(known, {name: weights[name] for name in weights}, case.names)


# Both layouts, with and without experts; `test_mtp_head.py` has biases.
BY_DAY = {"qwen-next", "deepseek"}


def params() -> Iterator[Any]:
    for name in CASES:
        soak = [] if name in BY_DAY else [pytest.mark.soak]
        marks = [pytest.mark.native, *soak]
        yield pytest.param((NativeOps, name), id=f"native-{name}", marks=marks)
    for name in ("qwen-next", "glm"):
        yield pytest.param((OpTable, name), id=f"reference-{name}", marks=pytest.mark.soak)


@pytest.fixture(scope="module", params=params())
def warm(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    make_ops, name = request.param
    checkpoint = checkpoint_of(CASES[name].config, tmp_path_factory.mktemp("mtp") / name)
    target, head = make_pair(checkpoint, make_ops)
    yield Opened(target, head, definition_of(CASES[name], checkpoint))
    head.close()
    target.close()


@pytest.fixture
def opened(warm: Opened) -> Opened:
    warm.head.reset()
    warm.target.reset()
    return warm


def write_states(target: XlaRunner, hidden: np.ndarray) -> None:
    assert target._state is not None
    kept = np.array(target.kept_hidden)
    kept[slots_of(PAGES, len(hidden), LIMITS.page_size)] = hidden
    placed = jax.device_put(kept, target.kept_hidden.sharding)
    target._state = target._state._replace(kept_hidden=placed)


def kept_states(target: XlaRunner) -> np.ndarray:
    return np.asarray(target.kept_hidden)[slots_of(PAGES, NUM_TOKENS, LIMITS.page_size)]


def errors_of(head: XlaRunner, logits: np.ndarray, chunk: int = 11) -> list[float]:
    return head_errors(head, chunk, logits, TOKEN_IDS)


def random_states(opened: Opened) -> np.ndarray:
    size = (NUM_TOKENS, opened.target.hidden_size)
    return np.random.default_rng(11).standard_normal(size, dtype=np.float32)


def test_the_layer_alone_gives_the_logits_of_its_definition(opened: Opened):
    hidden = random_states(opened)
    write_states(opened.target, hidden)
    logits = opened.definition.logits_of(hidden.astype(np.float64), TOKEN_IDS)
    assert max(errors_of(opened.head, logits)) <= TOLERANCE
    opened.head.reset()
    assert max(errors_of(opened.head, logits, chunk=1)) <= TOLERANCE


def test_a_fault_of_the_definition_would_be_noticed(opened: Opened):
    hidden = random_states(opened)
    write_states(opened.target, hidden)
    for fault in ("order", *(["keeps_first"] if opened.definition.names.zeroes_first else [])):
        logits = opened.with_fault(fault).logits_of(hidden.astype(np.float64), TOKEN_IDS)
        assert max(errors_of(opened.head, logits, chunk=1)) > 100 * TOLERANCE
        opened.head.reset()


def test_hidden_states_are_taken_where_the_definition_takes_them(opened: Opened):
    compute_target(opened.target, TOKEN_IDS, 32, PAGES)
    kept = kept_states(opened.target)
    right, wrong = (
        each.taken_states(TOKEN_IDS)
        for each in (opened.definition, opened.with_fault("before_norm"))
    )
    assert np.abs(kept - right).max() <= TOLERANCE * np.abs(right).max()
    assert np.abs(kept - wrong).max() > 100 * TOLERANCE * np.abs(wrong).max()
    assert max(errors_of(opened.head, opened.definition.mtp_logits(TOKEN_IDS))) <= TOLERANCE


def test_drafts_behind_the_first_follow_from_the_layers_own_output(opened: Opened):
    known = TOKEN_IDS[:40]
    compute_target(opened.target, known[:-1], 32, PAGES)
    stream = head_stream(3, PAGES)
    run_step(opened.head, [stream.chunk(known[1:30], samples=False)], GEOMETRY)
    drafts = list[int]()
    for chunk in (lambda: stream.chunk(known[30:], samples=True), *[stream.next_token] * 2):
        drafts.append(int(run_step(opened.head, [chunk()], GEOMETRY).token_ids[-1]))
    assert drafts == opened.definition.mtp_drafts(known, 3)
