"""Every family's step over the native table: what the compiled program leaves to XLA itself.

The program's text is read instead of a clock: an operation of XLA's own on an array as large as
the residual stream would be one that no kernel computes. Only OLMo 2, whose layers take the stream
without a norm, rounds it to the activations' type, and only where that is not float32.
"""

import re
from pathlib import Path

import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.runner import XlaRunner
from cadenza.checkpoint import named_shape, open_weights, write_random_checkpoint
from cadenza.checkpoint.families import FAMILIES
from cadenza.config import EngineLimits

pytestmark = pytest.mark.native

BUCKET = 64
LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=BUCKET,
    max_model_len=128,
    page_size=16,
    num_pages=32,
    max_num_queued_reqs=4,
)
_RESULT = re.compile(r"= (\w+)\[([\d,]*)\]\S* ([\w-]+)\(")
_MOVES_NOTHING = {"parameter", "get-tuple-element", "bitcast", "custom-call", "tuple"}


def own_operations(text: str, num_elements: int) -> list[str]:
    """XLA's operations in a compiled program with results of at least so many elements."""
    entry = text[text.index("\nENTRY") :]
    found: list[str] = []
    for kind, sizes, operation in _RESULT.findall(entry):
        count = 1
        for size in filter(None, sizes.split(",")):
            count *= int(size)
        if count >= num_elements and operation not in _MOVES_NOTHING:
            found.append(f"{operation} {kind}[{sizes}]")
    return found


def program_text(shape: str, folder: Path, dtype: str) -> str:
    model = named_shape(shape)
    write_random_checkpoint(model, folder, seed=0, dtype="float32")
    setup = RunnerSetup(limits=LIMITS, dtype=dtype)
    runner = XlaRunner(model, open_weights(folder), setup, NativeOps)
    runner.warmup()
    return runner.programs.step[BUCKET].as_text()


SHAPE_OF_FAMILY = {
    family: f"tiny-{family.removesuffix('_text').replace('_', '-')}" for family in FAMILIES
}


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_heavy_is_left_to_xla(family: str, tmp_path: Path):
    shape = SHAPE_OF_FAMILY[family]
    num_elements = BUCKET * named_shape(shape).hidden_size
    found = own_operations(program_text(shape, tmp_path, "bfloat16"), num_elements)
    allowed = 2 * named_shape(shape).num_layers if family == "olmo2" else 0
    assert len(found) <= allowed, found
    assert all("bf16" in operation for operation in found), found


def test_an_operation_of_xlas_own_would_be_noticed():
    """The negative control, in the form that XLA writes: a fusion over the residual stream."""
    text = (
        "HloModule step\n\nENTRY %main (p: f32[64,40]) -> f32[64,40] {\n"
        "  %p = f32[64,40]{1,0} parameter(0)\n"
        "  %call = f32[64,40]{1,0} custom-call(%p)\n"
        "  ROOT %fused = f32[64,40]{1,0} fusion(%call), kind=kLoop\n}\n"
    )
    assert own_operations(text, 64 * 40) == ["fusion f32[64,40]"]
