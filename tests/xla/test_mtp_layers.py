"""MTP layers over the hidden states that a target's steps keep, against numpy. Unwritten KV is NaN.

MiMo's is a fixture: its log probabilities are held to `mtp_logits`, and its drafts to
`NumpyDecoder.mtp_drafts`. The other layouts have random weights, of shapes of which the decoder
knows the arithmetic: what the blocks of Qwen3-Next and GLM-4.5 have beside Qwen3's is among them
where the decoder has it (norms that add one, partly rotated heads, biases of q, k and v, mixtures).
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from cadenza.backends.base import Capability, LateStepHandle, RunnerSetup
from cadenza.backends.token_choice import NUM_TOP
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.runner import XlaRunner
from cadenza.backends.xla.tables import MakeOps
from cadenza.batch.sequence import PageCopy
from cadenza.batch.step_schema import StepOutput
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.mtp_head import mtp_head_of
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineLimits
from cadenza.models.model_config import ModelConfig
from cadenza.models.mtp_layout import DEEPSEEK_MTP, QWEN_MTP, MTPLayout
from cadenza.models.rope_config import RopeConfig
from cadenza.weights.weight_format import WeightDType
from cadenza.weights.weights import open_weights
from tests.by_day import by_day
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.contract.steps import Draw, Geometry, Stream, build_inputs, run_step
from tests.oracle.numpy_decoder import NumpyDecoder
from tests.oracle.numpy_mtp import QWEN_NAMES, HeadNames, NumpyMTP, deepseek_names, numpy_mtp
from tests.xla.harness import NAN, slots_of

FOLDER = Path(__file__).parent.parent / "fixtures" / "mimo-untied-bias"
LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=112,
    page_size=16,
    num_pages=30,
    max_num_queued_reqs=4,
)
GEOMETRY = Geometry(bucket=32, num_rows=4, page_size=16)
PAGES, OTHER_PAGES = [9, 3, 4, 8, 1, 20, 21], [2, 5, 6, 7, 10, 11, 12]
DRAW = Draw(num_logprobs=NUM_TOP)
TOLERANCE = 1e-4

Pair = tuple[XlaRunner, XlaRunner]  # a target and its head

with np.load(FOLDER / "expected.npz", allow_pickle=False) as _expected:
    TOKEN_IDS: list[int] = _expected["token_ids"].tolist()
    MTP_LOGITS: np.ndarray = _expected["mtp_logits"]


@pytest.fixture(scope="module")
def numpy_decoder() -> NumpyDecoder:
    return NumpyDecoder.open(FOLDER)


WarmPair = Callable[[MakeOps, WeightDType], Pair]


@pytest.fixture(scope="module")
def warm_pair() -> Iterator[WarmPair]:
    made: dict[tuple[MakeOps, WeightDType], Pair] = {}

    def pair_of(make_ops: MakeOps, dtype: WeightDType) -> Pair:
        key = (make_ops, dtype)
        if key not in made:
            also: set[Capability] = {"page_copies"} if make_ops is NativeOps else set()
            made[key] = make_pair(open_checkpoint(FOLDER), make_ops, dtype, also)
        for runner in made[key]:
            runner.reset()
        return made[key]

    yield pair_of
    for target, head in made.values():
        head.close()
        target.close()


def make_pair(
    checkpoint: Checkpoint,
    make_ops: MakeOps,
    dtype: WeightDType = "float32",
    also: Collection[Capability] = (),
) -> Pair:
    head = mtp_head_of(checkpoint)
    setup = RunnerSetup(limits=LIMITS, dtype=dtype, fill=NAN)
    own = replace(setup, capabilities=frozenset({"hidden_states", *also}))
    target = XlaRunner(checkpoint.config, checkpoint.weights, own, make_ops)
    drafter = XlaRunner(head.config, head.weights, replace(setup, hidden_of=target), make_ops)
    target.warmup()
    drafter.warmup()
    return target, drafter


@pytest.fixture(
    params=[
        pytest.param(NativeOps, id="native", marks=pytest.mark.native),
        pytest.param(OpTable, id="reference", marks=pytest.mark.soak),
    ]
)
def pair(warm_pair: WarmPair, request: Any) -> Pair:
    """Engines refuse the method over the reference table, which takes long to compile."""
    return warm_pair(request.param, "float32")


@pytest.fixture(params=by_day(["float32", "bfloat16"], {"float32"}))
def dtype(request: Any) -> WeightDType:
    return request.param


@pytest.fixture
def native_pair(warm_pair: WarmPair, dtype: WeightDType) -> Pair:
    return warm_pair(NativeOps, dtype)


def compute_target(target: XlaRunner, token_ids: list[int], chunk: int, pages: list[int]) -> None:
    stream = Stream(row=1, pages=pages)
    for start in range(0, len(token_ids), chunk):
        run_step(target, [stream.chunk(token_ids[start : start + chunk], samples=True)], GEOMETRY)


def head_stream(row: int, pages: list[int]) -> Stream:
    return Stream(row=row, pages=pages, draw=DRAW, num_computed=1)


def error_of(output: StepOutput, logits: np.ndarray) -> float:
    exact = log_softmax(logits.astype(np.float64))
    errors = np.abs(output.top_logprobs[0] - exact[output.top_ids[0]])
    return float(errors.max() / np.ptp(logits))


def head_errors(
    head: XlaRunner,
    chunk: int,
    logits: np.ndarray = MTP_LOGITS,
    token_ids: Sequence[int] = TOKEN_IDS,
) -> list[float]:
    stream, errors = head_stream(2, PAGES), list[float]()
    for start in range(1, len(token_ids), chunk):
        tokens = token_ids[start : start + chunk]
        output = run_step(head, [stream.chunk(tokens, samples=True)], GEOMETRY)
        errors.append(error_of(output, logits[start + len(tokens) - 2]))
    return errors


@pytest.mark.parametrize(("of_target", "of_head"), [(32, 1), (7, 7), (1, 32)])
def test_the_heads_log_probabilities_are_those_of_its_definition(
    pair: Pair, of_target: int, of_head: int
):
    target, head = pair
    compute_target(target, TOKEN_IDS, of_target, PAGES)
    assert max(head_errors(head, of_head)) <= TOLERANCE


def test_another_hidden_state_would_be_noticed(pair: Pair, numpy_decoder: NumpyDecoder):
    """That after the final norm, or that of the token itself, as far as it is known."""
    target, head = pair
    compute_target(target, TOKEN_IDS, 32, PAGES)
    hidden = numpy_decoder.hidden_states(TOKEN_IDS)
    normed = numpy_decoder._norm("model.norm", hidden)
    for wrong in (normed[:-1], hidden[1:]):
        logits = numpy_decoder._head(numpy_decoder.mtp_states(wrong, TOKEN_IDS[1:]))
        assert max(head_errors(head, 32, logits)) > 10 * TOLERANCE
        head.reset()


def test_drafts_behind_the_first_follow_from_the_heads_own_output(
    pair: Pair, numpy_decoder: NumpyDecoder
):
    """With the rows of other streams beside it, from which nothing follows."""
    target, head = pair
    known = TOKEN_IDS[:50]
    compute_target(target, known[:-1], 32, PAGES)
    other = TOKEN_IDS[40:71]
    compute_target(target, other, 32, OTHER_PAGES)
    stream, beside = head_stream(3, PAGES), head_stream(0, OTHER_PAGES)
    run_step(head, [stream.chunk(known[1:30], samples=False)], GEOMETRY)
    run_step(head, [beside.chunk(other[1:21], samples=True)], GEOMETRY)
    drafts: list[int] = []
    for count in (None, 2, 5):
        chunk = stream.chunk(known[30:], samples=True) if count is None else stream.next_token()
        neighbours = [] if count is None else [beside.chunk(other[21:][:count], samples=count > 2)]
        output = run_step(head, [chunk, *neighbours], GEOMETRY)
        drafts.append(int(output.token_ids[-1]))
    assert drafts == numpy_decoder.mtp_drafts(known, 3)


def test_hidden_states_are_copied_with_their_pages(pair: Pair):
    target, head = pair
    compute_target(target, TOKEN_IDS[:30], 32, PAGES)
    copied = Stream(row=2, pages=[PAGES[0], OTHER_PAGES[0]], num_computed=29)
    copied.copies.append(PageCopy(PAGES[1], OTHER_PAGES[0], 14))
    run_step(target, [copied.chunk(TOKEN_IDS[29:30], samples=True)], GEOMETRY)
    stream = head_stream(2, copied.pages)
    output = run_step(head, [stream.chunk(TOKEN_IDS[1:30], samples=True)], GEOMETRY)
    assert error_of(output, MTP_LOGITS[28]) <= TOLERANCE


@pytest.mark.native
def test_hidden_states_are_kept_by_steps_whose_masks_follow(native_pair: Pair, dtype: str):
    target, head = native_pair
    assert "late_masks" in target.capabilities
    assert "late_masks" not in head.capabilities
    stream = Stream(row=1, pages=PAGES)
    for start in range(0, len(TOKEN_IDS), 32):
        chunk = stream.chunk(TOKEN_IDS[start : start + 32], samples=True)
        handle = target.launch(replace(build_inputs([chunk], GEOMETRY), masks_follow=True))
        assert isinstance(handle, LateStepHandle)
        handle.choose(())
        handle.result()
    assert max(head_errors(head, 32)) <= tolerance_of(dtype)


def tolerance_of(dtype: str) -> float:
    return TOLERANCE if dtype == "float32" else 0.01


@pytest.mark.native
def test_pages_that_were_copied_to_the_host_have_their_hidden_states(native_pair: Pair, dtype: str):
    target, head = native_pair
    compute_target(target, TOKEN_IDS, 32, PAGES)
    contents = target.read_pages(PAGES)
    target.reset()
    target.write_pages(PAGES, contents)
    assert max(head_errors(head, 32)) <= tolerance_of(dtype)


def outputs_of(target: XlaRunner) -> list[StepOutput]:
    stream, outputs = Stream(row=1, pages=PAGES, draw=DRAW), list[StepOutput]()
    for start, count in ((0, 32), (32, 9), (41, 1), (42, 20)):
        chunk = stream.chunk(TOKEN_IDS[start : start + count], samples=True)
        outputs.append(run_step(target, [chunk], GEOMETRY))
    return outputs


@pytest.mark.native
def test_keeping_hidden_states_changes_no_bit_of_the_target(native_pair: Pair, dtype: str):
    checkpoint = open_checkpoint(FOLDER)
    setup = RunnerSetup(limits=LIMITS, dtype=dtype, fill=NAN)
    plain_target = XlaRunner(checkpoint.config, checkpoint.weights, setup, NativeOps)
    plain_target.warmup()
    for plain, keeping in zip(outputs_of(plain_target), outputs_of(native_pair[0]), strict=True):
        assert np.array_equal(plain.top_logprobs, keeping.top_logprobs)
        assert np.array_equal(plain.token_ids, keeping.token_ids)


@pytest.mark.native
@pytest.mark.soak
def test_a_head_in_bfloat16_is_close_to_the_definition(warm_pair: WarmPair):
    """Its hidden states are stored in 16 bits."""
    target, head = warm_pair(NativeOps, "bfloat16")
    assert target.kept_hidden.dtype == np.uint16
    compute_target(target, TOKEN_IDS, 32, PAGES)
    assert max(head_errors(head, 16)) < 0.01


def stored_states(runner: XlaRunner, operations: str) -> list[str]:
    num_slots, width = LIMITS.num_pages * LIMITS.page_size, runner.hidden_size
    pattern = re.compile(rf"= \w+\[{num_slots},{width}\]\S* ({operations})\(")
    texts = [program.as_text() for program in runner.programs.step.values()]
    return [line.strip() for text in texts for line in text.splitlines() if pattern.search(line)]


@pytest.mark.native
def test_hidden_states_are_written_in_place(native_pair: Pair):
    target, head = native_pair
    for runner in (target, head):
        assert stored_states(runner, "parameter")
        assert not stored_states(runner, "copy|convert")
    place = target.kept_hidden.unsafe_buffer_pointer()
    compute_target(target, TOKEN_IDS, 32, PAGES)
    assert target.kept_hidden.unsafe_buffer_pointer() == place


VOCAB_SIZE = 211
NUM_TOKENS = 70
LAYOUT_TOKENS: list[int] = np.random.default_rng(5).integers(0, VOCAB_SIZE, NUM_TOKENS).tolist()


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


# Both layouts, with and without experts; the fixture has biases.
BY_DAY = {"qwen-next", "deepseek"}


def params() -> Iterator[Any]:
    for name in CASES:
        soak = [] if name in BY_DAY else [pytest.mark.soak]
        marks = [pytest.mark.native, *soak]
        yield pytest.param((NativeOps, name), id=f"native-{name}", marks=marks)
    for name in ("qwen-next", "glm"):
        yield pytest.param((OpTable, name), id=f"reference-{name}", marks=pytest.mark.soak)


@pytest.fixture(scope="module", params=params())
def warm_layout(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    make_ops, name = request.param
    checkpoint = checkpoint_of(CASES[name].config, tmp_path_factory.mktemp("mtp") / name)
    target, head = make_pair(checkpoint, make_ops)
    yield Opened(target, head, definition_of(CASES[name], checkpoint))
    head.close()
    target.close()


@pytest.fixture
def opened(warm_layout: Opened) -> Opened:
    warm_layout.head.reset()
    warm_layout.target.reset()
    return warm_layout


def write_states(target: XlaRunner, hidden: np.ndarray) -> None:
    assert target._state is not None
    kept = np.array(target.kept_hidden)
    kept[slots_of(PAGES, len(hidden), LIMITS.page_size)] = hidden
    placed = jax.device_put(kept, target.kept_hidden.sharding)
    target._state = target._state._replace(kept_hidden=placed)


def kept_states(target: XlaRunner) -> np.ndarray:
    return np.asarray(target.kept_hidden)[slots_of(PAGES, NUM_TOKENS, LIMITS.page_size)]


def errors_of(head: XlaRunner, logits: np.ndarray, chunk: int = 11) -> list[float]:
    return head_errors(head, chunk, logits, LAYOUT_TOKENS)


def random_states(opened: Opened) -> np.ndarray:
    size = (NUM_TOKENS, opened.target.hidden_size)
    return np.random.default_rng(11).standard_normal(size, dtype=np.float32)


def test_the_layer_alone_gives_the_logits_of_its_definition(opened: Opened):
    hidden = random_states(opened)
    write_states(opened.target, hidden)
    logits = opened.definition.logits_of(hidden.astype(np.float64), LAYOUT_TOKENS)
    assert max(errors_of(opened.head, logits)) <= TOLERANCE
    opened.head.reset()
    assert max(errors_of(opened.head, logits, chunk=1)) <= TOLERANCE


def test_a_fault_of_the_definition_would_be_noticed(opened: Opened):
    hidden = random_states(opened)
    write_states(opened.target, hidden)
    for fault in ("order", *(["keeps_first"] if opened.definition.names.zeroes_first else [])):
        logits = opened.with_fault(fault).logits_of(hidden.astype(np.float64), LAYOUT_TOKENS)
        assert max(errors_of(opened.head, logits, chunk=1)) > 100 * TOLERANCE
        opened.head.reset()


def test_hidden_states_are_taken_where_the_definition_takes_them(opened: Opened):
    compute_target(opened.target, LAYOUT_TOKENS, 32, PAGES)
    kept = kept_states(opened.target)
    right, wrong = (
        each.taken_states(LAYOUT_TOKENS)
        for each in (opened.definition, opened.with_fault("before_norm"))
    )
    assert np.abs(kept - right).max() <= TOLERANCE * np.abs(right).max()
    assert np.abs(kept - wrong).max() > 100 * TOLERANCE * np.abs(wrong).max()
    assert max(errors_of(opened.head, opened.definition.mtp_logits(LAYOUT_TOKENS))) <= TOLERANCE


def test_drafts_behind_the_first_follow_from_the_layers_own_output_in_each_layout(opened: Opened):
    known = LAYOUT_TOKENS[:40]
    compute_target(opened.target, known[:-1], 32, PAGES)
    stream = head_stream(3, PAGES)
    run_step(opened.head, [stream.chunk(known[1:30], samples=False)], GEOMETRY)
    drafts = list[int]()
    for chunk in (lambda: stream.chunk(known[30:], samples=True), *[stream.next_token] * 2):
        drafts.append(int(run_step(opened.head, [chunk()], GEOMETRY).token_ids[-1]))
    assert drafts == opened.definition.mtp_drafts(known, 3)
