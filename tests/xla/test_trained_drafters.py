"""What training exports as the bundled model's drafters, in the engine.

An MTP layer that was not trained, beside the bundled model's own weights, computes and drafts what
the forward pass of training does; an untrained draft model drafts for the bundled one. Both compute
in bfloat16 with sums in float32, rounded in other places.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.runner import XlaRunner
from cadenza.checkpoint.mtp_head import mtp_head_of
from cadenza.checkpoint.opening import open_bundled_draft, open_checkpoint
from cadenza.config import EngineConfig
from cadenza.errors import CheckpointError
from cadenza.events import Token
from cadenza.loading.build import plan_model
from cadenza.request import Request, SamplingParams
from cadenza.speculative_config import SpeculativeConfig
from tests.contract.steps import Stream, run_step
from tests.xla.harness import NAN
from tests.xla.test_drafters import play
from tests.xla.test_mtp_layers import GEOMETRY, LIMITS, compute_target, error_of, head_stream
from training.acceptance import Reached, acceptance_of, held_out_prompts
from training.corpus.example import Split
from training.corpus.mixture import make_example, open_source
from training.export import export, export_mtp
from training.exported import load_exported
from training.model import DRAFT_SHAPE, ModelShape, Weights, hidden_states, init_weights, logits_of
from training.mtp import init_mtp, mtp_states
from training.tokenizer import BUNDLED, load_tokenizer

SHAPE = ModelShape()
DEPTHS = 3
PAGES = [9, 3, 4, 8, 1, 20, 21]
TOLERANCE = 0.02  # of the range of the logits


@dataclass(frozen=True)
class Head:
    folder: Path
    target: Weights
    weights: Weights
    token_ids: list[int]

    def logits(self, depths: int) -> list[np.ndarray]:
        padding = LIMITS.max_model_len - len(self.token_ids)  # one shape is compiled once
        token_ids = jnp.asarray([[*self.token_ids, *[0] * padding]])
        segments = jnp.ones_like(token_ids)
        embed = self.target["embed"]
        hidden = hidden_states(self.target, token_ids, segments, shape=SHAPE)
        states = mtp_states(self.weights, embed[token_ids], hidden, segments, shape=SHAPE)
        return [np.asarray(logits_of(embed, each)[0]) for each in islice(states, depths)]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Head:
    folder = tmp_path_factory.mktemp("models") / "bundled"
    shutil.copytree(BUNDLED, folder)
    target = load_exported(folder, SHAPE)
    weights = init_mtp(target, jax.random.key(1))
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), weights)
    export(target, SHAPE, folder)
    export_mtp(weights, folder)
    example = make_example("stories", open_source(Split.HELD_OUT, "drafters"), max_tokens=200)
    return Head(folder, target, weights, load_tokenizer().encode(example.text).ids[:90])


@pytest.fixture(scope="module")
def pair(head: Head) -> Iterator[tuple[XlaRunner, XlaRunner]]:
    checkpoint = open_checkpoint(head.folder)
    layer = mtp_head_of(checkpoint)
    setup = RunnerSetup(limits=LIMITS, dtype="bfloat16", fill=NAN)
    target = XlaRunner(
        checkpoint.config,
        checkpoint.weights,
        replace(setup, capabilities=frozenset({"hidden_states"})),
        NativeOps,
    )
    drafter = XlaRunner(layer.config, layer.weights, replace(setup, hidden_of=target), NativeOps)
    for runner in (target, drafter):
        runner.warmup()
    compute_target(target, head.token_ids, 32, PAGES)
    yield target, drafter
    drafter.close()
    target.close()


@pytest.mark.native
@pytest.mark.soak
def test_the_engine_computes_what_was_trained(head: Head, pair: tuple[XlaRunner, XlaRunner]):
    weights = head.weights | {"input_proj": jnp.roll(head.weights["input_proj"], 256, axis=0)}
    (expected,), (swapped,) = head.logits(1), replace(head, weights=weights).logits(1)
    stream, errors, of_swapped = head_stream(2, PAGES), list[float](), list[float]()
    for place in range(1, len(head.token_ids)):
        chunk = stream.chunk(head.token_ids[place : place + 1], samples=True)
        output = run_step(pair[1], [chunk], GEOMETRY)
        errors.append(error_of(output, expected[place]))
        of_swapped.append(error_of(output, swapped[place]))
    assert max(errors) <= TOLERANCE
    assert min(of_swapped) > TOLERANCE, "embedding and hidden state in the other order"


@pytest.mark.native
@pytest.mark.soak
def test_the_engine_drafts_what_training_finds_the_likeliest(
    head: Head, pair: tuple[XlaRunner, XlaRunner]
):
    """Where the text goes on with the drafts, each depth of training is a further draft."""
    num_compared = 0
    for known in range(20, 80, 6):
        pair[1].reset()
        drafts = draft(pair[1], head.token_ids[:known])
        with_drafts = Head(
            head.folder, head.target, head.weights, [*head.token_ids[:known], *drafts]
        )
        for depth, logits in enumerate(with_drafts.logits(DEPTHS)):
            row = logits[known - 1 + depth]
            assert row.max() - row[drafts[depth]] <= TOLERANCE * np.ptp(row), (known, depth)
            num_compared += 1
    assert num_compared == 30


def draft(layer: XlaRunner, token_ids: list[int]) -> list[int]:
    stream = Stream(row=2, pages=PAGES, num_computed=1)
    drafts: list[int] = []
    for start in range(1, len(token_ids), 32):
        chunk = stream.chunk(token_ids[start : start + 32], samples=start + 32 >= len(token_ids))
        output = run_step(layer, [chunk], GEOMETRY)
    for _ in range(DEPTHS):
        drafts.append(int(output.token_ids[-1]))
        output = run_step(layer, [stream.next_token()], GEOMETRY)
    return drafts


@pytest.mark.native
@pytest.mark.soak
def test_the_layer_and_a_draft_model_draft_for_the_bundled_model(head: Head, tmp_path: Path):
    export(init_weights(DRAFT_SHAPE, jax.random.key(1)), DRAFT_SHAPE, tmp_path / "draft")
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=24, ignore_eos=True)
    requests = [Request(prompt_token_ids=tuple(head.token_ids[:n]), params=params) for n in (5, 40)]
    plain = play(head.folder, requests, None).streams
    for speculation in (
        SpeculativeConfig(method="mtp", num_speculative_tokens=3),
        SpeculativeConfig(method="draft_model", model=str(tmp_path / "draft")),
    ):
        drafted, counts, *_ = play(head.folder, requests, speculation)
        assert drafted == plain
        assert counts.num_draft_tokens > 24


@pytest.mark.native
@pytest.mark.soak
def test_acceptance_is_measured_of_the_drafters_that_there_are(head: Head, tmp_path: Path):
    found = acceptance_of(head.folder, tmp_path / "none", 1)
    assert set(found) == {"mtp"}
    assert set(found["mtp"]) == {"0.0", "0.7"}
    assert set(found["mtp"]["0.0"]) == {*held_out_prompts(0), "all"}
    first, *_ = found["mtp"]["0.0"]["all"]
    assert 0.0 <= first < 1.0


def test_drafts_count_where_their_place_was_reached():
    def token(*, is_draft: bool = False, num_rejected_drafts: int = 0) -> Token:
        return Token(
            request_id=1,
            token_id=5,
            index=0,
            is_draft=is_draft,
            num_rejected_drafts=num_rejected_drafts,
        )

    accepted, none_left = token(is_draft=True), token()
    reached = Reached()
    reached.add([none_left, accepted, token(num_rejected_drafts=2)])
    reached.add([accepted, accepted, accepted, none_left, token(num_rejected_drafts=3), accepted])
    assert reached.tried == [4, 2, 1]
    assert reached.accepted == [3, 1, 1]
    assert reached.shares == [0.75, 0.5, 1.0]


def test_a_model_that_is_exported_anew_has_no_mtp_layer(head: Head, tmp_path: Path):
    folder = tmp_path / "again"
    shutil.copytree(head.folder, folder)
    assert json.loads((folder / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    export(head.target, SHAPE, folder)
    assert not (folder / "mtp.safetensors").exists()
    assert open_checkpoint(folder).config.num_mtp_layers == 0


@pytest.mark.native
def test_only_the_bundled_model_has_a_draft_model_of_its_own(head: Head):
    config = EngineConfig(speculative_config=SpeculativeConfig(method="draft_model"))
    with pytest.raises(
        CheckpointError, match=r"for the bundled model only; name another"
    ) as caught:
        plan_model(open_checkpoint(head.folder), config)
    assert "the draft model of --speculative-config" in str(caught.value)


def test_the_bundled_models_drafters_are_in_the_package():
    checkpoint = open_checkpoint(None)
    assert checkpoint.config.num_mtp_layers == 1
    assert mtp_head_of(checkpoint).config.num_layers == 1
    assert open_bundled_draft(checkpoint).config.num_layers == 2
