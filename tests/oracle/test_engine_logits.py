"""Our engine against transformers in float32: logits of prompts and decodes, and greedy streams.

The logits come through `TappedEngine`: the real runner and op table, hostile steps, NaN in every
slot that nobody has written. The greedy streams come through `LLM`, as a user would ask for them.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cadenza import LLM, SamplingParams
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.models.model_config import ModelConfig
from cadenza.models.rope_config import LongRopeScaling
from tests.oracle.hf import Float32Array, decode_greedily
from tests.oracle.tapped_engine import TABLES, TappedEngine

FIXTURES = Path(__file__).parent.parent / "fixtures"
FOLDERS = sorted(path.parent for path in FIXTURES.glob("*/config.json"))
OPS = [
    pytest.param(name, marks=[pytest.mark.native] if name == "native" else []) for name in TABLES
]
PROMPT_LENGTHS = (96, 17, 1, 80, 33)
NUM_DECODES = 32
NUM_GREEDY = 256
TOLERANCE = 1e-4
"""Of the range of transformers' logits."""

HEAD_TOLERANCE = 2e-5
"""Of a top log probability against the one that the step's own hidden state gives."""

pytestmark = pytest.mark.oracle


@dataclass(frozen=True, slots=True)
class Theirs:
    """transformers' greedy stream of one prompt: row i of the logits predicts token i + 1."""

    token_ids: list[int]
    logits: Float32Array
    num_prompt_tokens: int


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> None:
    """Over matrices this small a second thread only waits."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda path: path.name)
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def theirs(folder: Path) -> list[Theirs]:
    """Streams of prompts that end with the same number of decodes."""
    config = open_checkpoint(folder).config
    vocab_size = config.vocab_size
    rng = np.random.default_rng(11)
    streams = []
    for length in PROMPT_LENGTHS:
        if length < shortest_prompt(config):
            continue
        prompt = rng.integers(0, vocab_size, length).tolist()
        streams.append(Theirs(*decode_greedily(folder, prompt, NUM_DECODES), length))
    return streams


def shortest_prompt(config: ModelConfig) -> int:
    """transformers changes a LongRoPE's factors when a stream outgrows the original length, and
    keeps the keys that it made with the old ones; only streams that begin beyond it are right.
    """
    scaling = config.rope.scaling
    if not isinstance(scaling, LongRopeScaling):
        return 1
    original = scaling.original_max_position_embeddings
    return 1 if original >= config.max_position_embeddings // 2 else original + 1


def worst_error(engine: TappedEngine, theirs: list[Theirs]) -> tuple[float, float]:
    """The largest logit error over the range, and the head's largest error."""
    sequences = [each.token_ids[:-1] for each in theirs]
    forced = engine.force(sequences, [each.num_prompt_tokens for each in theirs])
    errors: list[float] = []
    for ours, each in zip(forced, theirs, strict=True):
        assert ours.logits.shape == each.logits.shape
        errors.append(np.abs(ours.logits - each.logits).max() / np.ptp(each.logits))
    return float(max(errors)), max(each.head_error for each in forced)


@pytest.mark.parametrize("ops", OPS)
def test_logits_of_prompts_and_decodes_are_those_of_transformers(
    folder: Path, theirs: list[Theirs], ops: str, capsys: pytest.CaptureFixture[str]
):
    engine = TappedEngine(folder, ops=ops, dtype="float32")
    error, head_error = worst_error(engine, theirs)
    with capsys.disabled():
        print(f"\n{folder.name}, {ops}: logits off by {error:.2e} of their range", end="")
    assert error <= TOLERANCE
    assert head_error <= HEAD_TOLERANCE


@pytest.fixture(scope="module")
def long_stream(folder: Path) -> Theirs:
    vocab_size = open_checkpoint(folder).config.vocab_size
    prompt = np.random.default_rng(12).integers(0, vocab_size, 40).tolist()
    return Theirs(*decode_greedily(folder, prompt, NUM_GREEDY), len(prompt))


@pytest.mark.parametrize("ops", OPS)
def test_greedy_streams_are_those_of_transformers(
    folder: Path, long_stream: Theirs, ops: str, capsys: pytest.CaptureFixture[str]
):
    """A near tie, where rounding decides, is shown; the stream then goes on from their token."""
    with LLM(folder, ops=ops, dtype="float32", max_num_seqs=4, max_model_len=384) as llm:
        gaps = near_tie_gaps(llm, long_stream)
    if gaps:
        with capsys.disabled():
            print(f"\n{folder.name}, {ops}: near ties, of the range: {gaps}", end="")
    assert all(gap <= TOLERANCE for gap in gaps)
    assert len(gaps) <= 1


def near_tie_gaps(llm: LLM, theirs: Theirs) -> list[float]:
    """For each token that we chose otherwise: how far transformers' logits are apart."""
    gaps: list[float] = []
    start = theirs.num_prompt_tokens
    while start < len(theirs.token_ids):
        expected = theirs.token_ids[start:]
        params = SamplingParams(temperature=0.0, max_tokens=len(expected), ignore_eos=True)
        output = llm.generate(theirs.token_ids[:start], params)[0].outputs[0]
        other = [i for i, id in enumerate(expected) if output.token_ids[i] != id]
        if not other:
            break
        row = theirs.logits[start + other[0] - 1]
        gaps.append(float((row.max() - row[output.token_ids[other[0]]]) / np.ptp(theirs.logits)))
        start += other[0] + 1
    return gaps


@pytest.mark.parametrize("ops", OPS)
def test_a_slightly_wrong_rope_is_noticed(theirs: list[Theirs], folder: Path, ops: str):
    """The negative control: another 1 % on every rotary base is beyond the tolerance; 10 % where
    few layers have attention."""
    config = open_checkpoint(folder).config
    if config.ropes == (None,):
        pytest.skip("no layer has rotary positions")
    factor = 1.01 if config.recurrence is None else 1.1
    wrong = replace(config, rope=replace(config.rope, theta=config.rope.theta * factor))
    if config.window_rope is not None:
        theta = config.window_rope.theta * factor
        wrong = replace(wrong, window_rope=replace(config.window_rope, theta=theta))
    engine = TappedEngine(folder, ops=ops, dtype="float32", config=wrong)
    assert worst_error(engine, theirs)[0] > 10 * TOLERANCE
