"""Which op table `--ops` chooses, on devices that only tell what they are."""

import ctypes
from dataclasses import dataclass, replace

import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.backend import XlaBackend
from cadenza.backends.xla.ops.cuda import CudaOps
from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.native_library import load_native_library
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.tables import (
    CUDA_WORKSPACE_BYTES,
    TABLES,
    CudaTable,
    NativeTable,
    ReferenceTable,
    choose_table,
)
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.config import EngineConfig, EngineLimits, Ops
from cadenza.errors import ConfigError
from cadenza.loading.plan import make_plan

MODEL = named_shape("tiny-llama")
LIMITS = EngineLimits(
    max_num_seqs=2,
    max_num_batched_tokens=64,
    max_model_len=64,
    page_size=16,
    num_pages=8,
    max_num_queued_reqs=4,
)


@dataclass(frozen=True)
class Client:
    platform_version: str = "cuda 13000"


@dataclass(frozen=True)
class Card:
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"
    compute_capability: str = "9.0"
    client: Client = Client()


def loaded() -> CudaLibrary:
    """Any library does: nothing is called."""
    return CudaLibrary(ctypes.CDLL(load_native_library().handle._name), "CUDA")


def absent() -> CudaLibrary:
    raise ConfigError("the kernels for NVIDIA GPUs are not built")


BUILT = (NativeTable(), CudaTable(load=loaded), ReferenceTable())
NOT_BUILT = (NativeTable(), CudaTable(load=absent), ReferenceTable())


@pytest.mark.native
def test_a_card_takes_its_kernels() -> None:
    chosen = choose_table("auto", Card(), MODEL, BUILT)
    assert (chosen.table.name, chosen.note) == ("cuda", None)
    assert choose_table("cuda", Card(), MODEL, BUILT).table.name == "cuda"
    assert choose_table("reference", Card(), MODEL, BUILT).table.name == "reference"


OLD = Card(device_kind="Tesla T4", compute_capability="7.5")
OTHER = Card(device_kind="AMD Instinct MI300X", compute_capability="gfx942")
ODD_HEADS = replace(MODEL, head_dim=24)


@pytest.mark.native
@pytest.mark.parametrize(
    ("card", "model", "tables", "said"),
    [
        (Card(), MODEL, NOT_BUILT, "are not built"),
        (OLD, MODEL, BUILT, "Tesla T4 has compute capability 7.5, and its kernels need 8.0"),
        (OTHER, MODEL, BUILT, "are for NVIDIA GPUs, not for AMD Instinct MI300X"),
        (Card(), ODD_HEADS, BUILT, "heads of 24 values are not a multiple of 16"),
    ],
)
def test_without_its_kernels_a_card_takes_the_plain_operations_and_says_why(
    card: Card, model: object, tables: object, said: str
) -> None:
    chosen = choose_table("auto", card, model, tables)
    assert chosen.table.name == "reference"
    assert chosen.note is not None
    assert chosen.note.startswith("the cuda operations do not serve: ")
    assert said in chosen.note
    with pytest.raises(ConfigError, match=f"^--ops cuda: .*{said}.*; use --ops auto$"):
        choose_table("cuda", card, model, tables)


def test_a_tpu_takes_the_plain_operations_without_a_word() -> None:
    chosen = choose_table("auto", Card(platform="tpu"), MODEL, TABLES)
    assert (chosen.table.name, chosen.note) == ("reference", None)


@pytest.mark.parametrize("ops", ["cuda"])
def test_kernels_of_another_device_are_refused_with_the_device(ops: Ops) -> None:
    with pytest.raises(ConfigError, match=r"^--ops cuda: its kernels run on cuda, not on cpu; use"):
        XlaBackend().describe("cpu", ops, open_checkpoint(None))


@pytest.mark.native
def test_the_cuda_table_has_traits_of_its_own_and_tells_cards_apart() -> None:
    checkpoint, table = open_checkpoint(None), CudaTable(load=loaded)
    common = XlaBackend().describe("cpu", "reference", checkpoint)
    traits = table.add_traits(common, checkpoint.config)
    assert (traits.ops, traits.max_num_batched_tokens) == ("cuda", 2048)
    assert traits.dtype_for["bfloat16"] == "bfloat16"
    assert (traits.fills_kv, traits.keeps_packed_weights, traits.logit_copies) == (False, False, 1)
    assert traits.arithmetics == ("fast",)
    setup, ada = RunnerSetup(limits=LIMITS), Card(compute_capability="8.9")
    names = [table.name_class(card, checkpoint, setup) for card in (Card(), ada)]
    assert names == ["cuda_9.0", "cuda_8.9"]
    described = table.describe_arithmetic(Card())
    digest = load_native_library().digest
    assert described == ("cuda", "9.0", "cuda 13000", digest)


def test_a_plan_has_what_a_step_on_a_card_needs_beside_its_arrays() -> None:
    """Of the bundled model gate and up, of 640 columns each, are the widest product."""
    traits = XlaBackend().describe("cpu", "reference", open_checkpoint(None))
    on_card = CudaTable(load=loaded).add_traits(traits, MODEL)
    config = EngineConfig(max_num_seqs=2, max_model_len=64)
    found, without = (
        make_plan(config, open_checkpoint(None), each, 4 << 30).footprint
        for each in (on_card, replace(on_card, workspace_bytes=0, has_float_results=False))
    )
    assert found.fixed_bytes - without.fixed_bytes == CUDA_WORKSPACE_BYTES
    assert found.step_token_bytes - without.step_token_bytes == 4 * 2 * 640


def test_a_table_of_programs_leaves_no_operation_to_the_definition() -> None:
    """Else a new operation would run in plain jnp within a step, in another order of sums."""
    composed = {"take_logit_rows", "linear_norm_add", "loading"}
    public = {name for name, each in vars(OpTable).items() if not name.startswith("_")}
    for base in OpTable.__mro__[1:-1]:
        public |= {name for name in vars(base) if not name.startswith("_")}
    operations = {name for name in public if callable(getattr(OpTable, name))} - composed
    assert {"linear", "rope_append_attend", "short_conv", "layer_norm"} <= operations
    for table in (NativeOps, CudaOps):
        inherited = {name for name in operations if getattr(table, name) is getattr(OpTable, name)}
        assert not inherited, f"{table.__name__} computes these in plain jnp: {inherited}"
