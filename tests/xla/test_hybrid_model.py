"""Models whose layers have recurrent states, on a runner: their logits, and that no cut changes a
bit. Slots are chosen by hand; `tests/engine` has their life."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cadenza.backends.xla.reference_model import ReferenceModel
from cadenza.backends.xla.runner import XlaRunner
from cadenza.batch.step_schema import StepOutput
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineConfig, SpeculativeConfig
from cadenza.errors import ConfigError, RunnerError
from cadenza.loading.build import plan_model
from tests.by_day import by_day
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.checkpoint.gguf_models import HYBRIDS, convert
from tests.contract.steps import Draw, Geometry, Stream, run_step
from tests.xla.harness import Lab, Variant

SHAPES = ["tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-lfm2", "tiny-granite4", "tiny-granite4-moe"]
BY_DAY = {"tiny-qwen3.5", "tiny-lfm2", "tiny-granite4"}
NUM_TOKENS = 150
GEOMETRY = Geometry(bucket=64, num_rows=8, page_size=16)
NUM_SLOTS = 12


def runner_of(lab: Lab, shape: str) -> XlaRunner:
    variant = Variant(shape=shape)
    limits = replace(variant.limits, num_state_slots=NUM_SLOTS)
    setup = replace(variant.setup, limits=limits, capabilities=frozenset({"page_copies"}))
    runner = XlaRunner(variant.config, lab.weights(shape), setup, variant.ops)
    runner.warmup()
    return runner


def tokens_of(shape: str, seed: int, lab: Lab) -> list[int]:
    random = np.random.default_rng(seed)
    return random.integers(3, Variant(shape=shape).config.vocab_size, NUM_TOKENS).tolist()


def stream_of(row: int, first_page: int, slots: tuple[int, int]) -> Stream:
    pages = list(range(first_page, first_page + 10))
    return Stream(row=row, pages=pages, draw=Draw(num_logprobs=4), state_slots=slots)


def play(
    runner: XlaRunner, rows: list[tuple[Stream, list[int]]], cuts: list[int]
) -> list[list[tuple[int, bytes]]]:
    found: list[list[tuple[int, bytes]]] = [[] for _ in rows]
    start = 0
    for stop in cuts:
        chunks = [row.chunk(ids[start:stop], samples=True) for row, ids in rows]
        output = run_step(runner, chunks, GEOMETRY)
        for place in range(len(rows)):
            found[place].append(bits_of(output, place))
        start = stop
    return found


def bits_of(output: StepOutput, place: int) -> tuple[int, bytes]:
    return int(output.token_ids[place]), output.top_logprobs[place].tobytes()


@pytest.mark.native
@pytest.mark.parametrize("shape", by_day(SHAPES, BY_DAY))
def test_a_hybrid_has_the_logits_of_the_witness_and_no_cut_or_neighbour_changes_a_bit(
    lab: Lab, shape: str
):
    runner, ids = runner_of(lab, shape), tokens_of(shape, 1, lab)
    ends = [60, 61, 62, 90, 91, 120, NUM_TOKENS]
    alone = dict(zip(ends, play(runner, [(stream_of(0, 0, (0, 1)), ids)], ends)[0], strict=True))
    witness = lab.reference_model(Variant(shape=shape))
    witness.start()
    start = 0
    for end in ends:
        logits = witness.append(ids[start:end]).astype(np.float64)
        start = end
        token, logprobs = alone[end]
        expected = np.sort(logits - np.logaddexp.reduce(logits))[::-1][:4]
        assert token == int(np.argmax(logits))
        np.testing.assert_allclose(np.frombuffer(logprobs, np.float32)[:4], expected, atol=2e-4)

    others = [tokens_of(shape, seed, lab) for seed in (2, 3)]
    for cuts in ([20, 40, 60, 75, 90, 105, 120, 130, 140, 150], [*range(1, 21), 41, 61, 81, 90]):
        runner.reset()
        rows = [stream_of(1, 50, (5, 9)), stream_of(3, 0, (4, 2)), stream_of(6, 20, (7, 3))]
        beside = play(runner, list(zip(rows, [others[0], ids, others[1]], strict=True)), cuts)[1]
        seen = dict(zip(cuts, beside, strict=True))
        assert [seen[end] for end in ends if end in seen] == [
            alone[end] for end in ends if end in seen
        ]
        assert any(end in seen for end in ends)


@pytest.mark.native
def test_a_row_goes_on_from_a_state_and_pages_that_were_on_the_host(lab: Lab):
    shape = SHAPES[0]
    runner, ids = runner_of(lab, shape), tokens_of(shape, 1, lab)
    whole = play(runner, [(stream_of(0, 0, (0, 1)), ids)], [60, 80, 110])[0]
    runner.reset()
    before = stream_of(2, 20, (6, 7))
    assert play(runner, [(before, ids)], [60])[0] == whole[:1]
    state, pages = runner.read_states([6]), runner.read_pages(before.pages[:4])
    assert len(state[0]) == Variant(shape=shape).config.state_bytes("float32")
    runner.reset()
    runner.write_pages([40, 41, 42, 43], pages)
    runner.write_states([9], state)
    after = stream_of(5, 40, (3, 4))
    after.num_computed, after.state_start = 60, 9
    other = stream_of(1, 60, (0, 1))
    play(runner, [(other, ids)], [10])
    with pytest.raises(RunnerError, match="an item has"):
        runner.write_states([9], [state[0][:-1]])
    found: list[tuple[int, bytes]] = []
    for start, stop in ((60, 80), (80, 110)):
        output = run_step(runner, [after.chunk(ids[start:stop], samples=True)], GEOMETRY)
        found.append(bits_of(output, 0))
    assert found == whole[1:]


def test_a_draft_model_with_recurrent_layers_is_refused(tmp_path: Path):
    write_random_checkpoint(named_shape(SHAPES[0]), tmp_path / "model", seed=1, dtype="float32")
    speculation = SpeculativeConfig(method="quantised", num_speculative_tokens=2)
    config = EngineConfig(speculative_config=speculation, max_model_len=256)
    with pytest.raises(ConfigError, match="has recurrent layers, and drafts of such a model are"):
        plan_model(open_checkpoint(tmp_path / "model"), config)


def logits_of(checkpoint: Checkpoint, token_ids: list[int]) -> np.ndarray:
    model = ReferenceModel(checkpoint.config, checkpoint.weights, 64)
    model.start()
    return model.append(token_ids)


@pytest.mark.parametrize("shape", by_day(list(HYBRIDS), {"qwen3.5"}))
def test_a_file_has_the_logits_of_its_folder(tmp_path: Path, shape: str):
    conversion = convert(shape, tmp_path / "folder")
    path = conversion.write(tmp_path / "model.gguf")
    folder, file = open_checkpoint(conversion.original), open_checkpoint(path)
    assert file.config.kv_groups == folder.config.kv_groups
    assert file.config.recurrent_layers == folder.config.recurrent_layers
    ids = np.random.default_rng(0).integers(3, folder.config.vocab_size, 50).tolist()
    np.testing.assert_allclose(logits_of(file, ids), logits_of(folder, ids), atol=1e-4)
