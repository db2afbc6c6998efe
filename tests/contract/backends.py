"""The backends that the contract suite tests; to add one, add an entry to `BACKENDS`."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cadenza.backends.base import Runner, RunnerSetup
from cadenza.backends.fake import FakeRunner
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineLimits
from cadenza.models.model_config import ModelConfig
from cadenza.weights.weights import open_weights
from tests.checkpoint.config_writer import write_random_checkpoint

LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=96,
    page_size=16,
    num_pages=24,
    max_num_queued_reqs=100,
)

# A page is a slot for a complete sequence.
DENSE_LIMITS = replace(LIMITS, page_size=LIMITS.max_model_len)

# Modules have as many slots as rows, 8 at most.
COMPILED_LIMITS = replace(DENSE_LIMITS, num_pages=8)

MakeRunner = Callable[[EngineLimits, Path], Runner]


def make_fake(
    limits: EngineLimits, folder: Path | None = None, *, kind: type[FakeRunner] = FakeRunner
) -> FakeRunner:
    return kind(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
    )


def write_hostile(folder: Path) -> tuple[ModelConfig, Path]:
    from tests.xla.harness import HOSTILE

    checkpoint = folder / "hostile"
    if not checkpoint.exists():
        write_random_checkpoint(HOSTILE, checkpoint, seed=0, dtype="float32")
    return HOSTILE, checkpoint


def make_xla(limits: EngineLimits, folder: Path, ops: Any = None, **options: Any) -> Runner:
    """On the op table that serves here if `ops` is None; unwritten KV is NaN."""
    from cadenza.backends.xla.runner import XlaRunner

    setup = RunnerSetup(
        limits=limits, fill=float("nan"), capabilities=frozenset({"page_copies"}), **options
    )
    model, checkpoint = write_hostile(folder)
    return XlaRunner(model, open_weights(checkpoint), setup, ops)


def make_reference(limits: EngineLimits, folder: Path) -> Runner:
    from cadenza.backends.xla.ops.reference import OpTable

    return make_xla(limits, folder, OpTable)


def make_mlx(limits: EngineLimits, folder: Path) -> Runner:
    """Unwritten KV is a large number."""
    from cadenza.backends.mlx.backend import UNWRITTEN_FILL
    from cadenza.backends.mlx.runner import MlxRunner

    setup = RunnerSetup(
        limits=limits, device="cpu", ops="auto", dtype="float32", fill=UNWRITTEN_FILL
    )
    model, checkpoint = write_hostile(folder)
    return MlxRunner(checkpoint, model.vocab_size, setup)


def make_iree(limits: EngineLimits, _: Path) -> Runner:
    """Over the modules of the bundled model; unwritten KV is NaN."""
    from cadenza.backends.iree.manifest import read_manifest
    from cadenza.backends.iree.runner import IreeRunner

    checkpoint = open_checkpoint(None)
    setup = RunnerSetup(limits=limits, fill=float("nan"))
    return IreeRunner(checkpoint, read_manifest(checkpoint.folder), setup)


BACKENDS: dict[str, MakeRunner] = {
    "fake": make_fake,
    "xla": make_xla,
    "mlx": make_mlx,
    "iree": make_iree,
}
LIMITS_OF = {"fake": LIMITS, "xla": LIMITS, "mlx": DENSE_LIMITS, "iree": COMPILED_LIMITS}
COMPILING_BACKENDS = ("xla", "iree")  # those that must be warmed up before the first launch

needs_mlx = pytest.mark.skipif(
    not all(map(find_spec, ("mlx", "mlx_lm"))), reason="MLX is not installed: pip install '.[mlx]'"
)
needs_iree = pytest.mark.skipif(
    find_spec("iree") is None or find_spec("iree.runtime") is None,
    reason="IREE's runtime is not installed: pip install '.[iree]'",
)
_NEEDS = {"mlx": (needs_mlx,), "iree": (needs_iree,)}
BACKEND_PARAMS = [pytest.param(name, marks=_NEEDS.get(name, ())) for name in BACKENDS]
