"""Streams of one model on several numbers of devices, for a process that has as many of a CPU.

Run as `python -m tests.xla.split_child FOLDER OPTIONS COUNTS`, where OPTIONS are those of `Options`
as a JSON object, and COUNTS numbers of devices. Prints a JSON object: by number of devices the
streams' tokens with the bits of their log probabilities, and the operations of the compiled step
that exchange anything.
"""

import json
import re
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.split import AXIS, SplitOps
from cadenza.backends.xla.ops.table import DecoderSpec, Linear
from cadenza.backends.xla.runner import XlaRunner
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import KVCacheDType
from tests.xla.harness import BASE, Mode, random_requests, serve

VARIANT = replace(BASE, bucket=16, num_rows=4, num_pages=48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`tree` names the op table: `tree`, or one with a fault."""

    tree: str = "tree"
    kv_cache_dtype: KVCacheDType = "auto"


class SummedOps(SplitOps):
    def _spans(self, x: jax.Array, weight: Linear) -> jax.Array:
        return jax.lax.psum(x.astype("float32") @ weight.weight.T.astype("float32"), AXIS)


class AllHeadsOps(SplitOps):
    def _attend_loaded(self, *given: Any) -> tuple[jax.Array, ...]:
        return OpTable._attend_loaded(self, *given)


TABLES: dict[str, Callable[[DecoderSpec], SplitOps]] = {
    "tree": SplitOps,
    "psum": SummedOps,
    "heads": AllHeadsOps,
}


def streams_on(checkpoint: Checkpoint, num_devices: int, options: Options) -> dict[str, Any]:
    variant = replace(VARIANT, kv_cache_dtype=options.kv_cache_dtype)
    setup = replace(variant.setup, ops="split", num_devices=num_devices)
    runner = XlaRunner(checkpoint.config, checkpoint.weights, setup, TABLES[options.tree])
    with closing(runner):
        runner.warmup()
        requests = random_requests(5, 4, VARIANT)
        streams = serve(runner, variant, requests, Mode(arrival_seed=3)).streams
        (step,) = runner.programs.step.values()
        found: Any = step
        exchanges = re.findall(r" (all-[a-z]+|collective-[a-z]+|reduce-scatter)\(", found.as_text())
    tokens = [[(each.token_id, repr(each.logprobs)) for each in s.tokens] for s in streams]
    return {"streams": tokens, "exchanges": sorted({*exchanges})}


def main(folder: str, options: str, *counts: str) -> None:
    checkpoint, given = open_checkpoint(Path(folder)), Options(**json.loads(options))
    print(json.dumps({each: streams_on(checkpoint, int(each), given) for each in counts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
