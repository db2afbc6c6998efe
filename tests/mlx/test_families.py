"""The families that came with layers of several kinds: through mlx-lm, as XLA computes them."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import PAGE_SIZE_UNIT, EngineConfig, EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.errors import CheckpointError
from cadenza.loading.build import plan_model
from cadenza.request import Request, SamplingParams
from cadenza.verification.run import VerifyOptions, verify
from tests.by_day import by_day
from tests.mlx.family_folders import FAMILIES, FamilyFolder, write_family
from tests.mlx.test_kinds import streams, token_ids

# The families that `make test` compares with XLA's; `make soak` compares all.
QUICK_FAMILIES = frozenset({"qwen3.5", "gpt-oss", "deepseek-v3"})

# Longer than the windows of the shapes, and than a chunk.
PROMPT = tuple(np.random.default_rng(4).integers(3, 331, 70).tolist())

NUM_TOKENS = 4
CONFIG = EngineConfig(backend="mlx", dtype="float32", max_num_seqs=3, max_model_len=128)


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")

    def folder_of(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else write_family(FAMILIES[name], folder)

    return folder_of


@pytest.mark.parametrize("name", by_day(FAMILIES, QUICK_FAMILIES))
def test_a_familys_tokens_and_logits_are_those_of_xlas_reference(
    family_folder: Callable[[str], Path], name: str
):
    import mlx.core as mx

    from cadenza.backends.mlx.zoo import load_zoo_model
    from cadenza.backends.xla.backend import XlaBackend

    folder = family_folder(name)
    witness = XlaBackend().load_reference(open_checkpoint(folder), 128)
    assert witness is not None
    witness.start()
    theirs = [witness.append(list(PROMPT))]
    chosen = [int(theirs[-1].argmax())]
    for _ in range(NUM_TOKENS - 1):
        theirs.append(witness.append(chosen[-1:]))
        chosen.append(int(theirs[-1].argmax()))
    zoo = load_zoo_model(folder)
    tokens = mx.array([[*PROMPT, *chosen[:-1]]])
    ours = np.array(zoo.model(tokens, cache=zoo.new_caches())[0, -NUM_TOKENS:])
    np.testing.assert_allclose(ours, np.array(theirs), atol=2e-4)
    assert served(folder) == chosen


def served(folder: Path) -> list[int]:
    from cadenza.backends.mlx.runner import MlxRunner

    limits = EngineLimits(
        max_num_seqs=2,
        max_num_batched_tokens=48,
        max_model_len=96,
        page_size=96,
        num_pages=2,
        max_num_queued_reqs=4,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    first = Request(prompt_token_ids=PROMPT, params=params)
    setup = RunnerSetup(limits=limits, device="cpu", ops="auto", dtype="float32", fill=1000.0)
    vocab_size = open_checkpoint(folder).outline.vocab_size
    with closing(MlxRunner(folder, vocab_size, setup)) as runner:
        runner.warmup()
        core = EngineCore(runner, limits, CoreOptions(eos_token_ids=frozenset()))
        both = streams(core, [first, replace(first, prompt_token_ids=PROMPT[:9])], at_once=True)
    return token_ids(both[0])


@pytest.mark.soak
@pytest.mark.parametrize("name", FAMILIES)
def test_the_gate_passes_on_mlx_for_each_family(family_folder: Callable[[str], Path], name: str):
    folder = str(family_folder(name))
    options = VerifyOptions(model=folder, num_requests=8, max_tokens=8, config=CONFIG)
    result, plan = verify(options, lambda _: None)
    assert result.passed, result.last_line
    assert result.last_line.startswith("REFERENCE-EXACT PASS bitwise")
    assert plan.limits.num_state_slots == 0


def test_a_rows_slot_holds_its_state_and_the_plan_has_no_slots_of_state(
    family_folder: Callable[[str], Path],
):
    """The row's bytes are those of a state and of its two snapshots, and of the logits."""
    from cadenza.backends.mlx.probe import LOGIT_COPIES

    checkpoint = open_checkpoint(family_folder("qwen3.5"))
    plan = plan_model(checkpoint, CONFIG)
    assert plan.limits.num_state_slots == 0
    assert plan.state_bytes == plan.state_bytes_per_slot == 0
    assert plan.traits.memory is not None
    model, memory = checkpoint.config, plan.traits.memory["float32"]
    assert memory.kv_bytes_per_token == model.kv_bytes_per_token("float32", "auto")
    logit_bytes = LOGIT_COPIES * model.vocab_size * 4
    held = memory.row_bytes - logit_bytes - PAGE_SIZE_UNIT * memory.kv_bytes_per_token
    assert held == 3 * model.state_bytes("float32")


@pytest.mark.parametrize(("name", "unit"), [("qwen3.5", 64), ("deepseek-v3", 64), ("gpt-oss", 1)])
def test_prompts_are_continued_where_the_cuts_of_their_calls_change_no_bits(
    family_folder: Callable[[str], Path], name: str, unit: int
):
    assert plan_model(open_checkpoint(family_folder(name)), CONFIG).limits.slot_unit == unit


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (FamilyFolder(shape="tiny-lfm2", wrapper="lfm2_vl"), "lfm2_vl', which mlx-lm does not"),
        # Its layers with attention are at no interval.
        (FamilyFolder(shape="tiny-qwen3.5-moe"), "mlx-lm cannot load the model"),
        # It has no layer with full attention, of whose cache mlx-lm makes the mask.
        (FamilyFolder(shape="tiny-gemma3", num_layers=3), "mlx-lm cannot compute the model"),
        (FamilyFolder(shape="tiny-gpt-oss"), "mlx-lm cannot load the model"),
    ],
    ids=lambda value: value.shape if isinstance(value, FamilyFolder) else "",
)
def test_what_mlx_lm_does_not_have_of_a_family_is_refused(
    tmp_path: Path, family: FamilyFolder, reason: str
):
    folder = write_family(family, tmp_path / "model")
    with pytest.raises(CheckpointError, match=reason):
        plan_model(open_checkpoint(folder), CONFIG)
