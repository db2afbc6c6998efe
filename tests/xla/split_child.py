"""Streams of one model on several numbers of devices, for a process that has as many of a CPU.

Run as `python -m tests.xla.split_child FOLDER TREE COUNTS`, where TREE is `tree`, or what stands in
its place: `psum`, and COUNTS are numbers of devices. Prints a JSON object: by number of devices the
streams' tokens with the bits of their log probabilities, and the operations of the compiled step
that exchange anything.
"""

import json
import re
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from cadenza.backends.xla.ops.split import AXIS, SplitOps
from cadenza.backends.xla.ops.table import DecoderSpec, Linear
from cadenza.backends.xla.runner import XlaRunner
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from tests.xla.harness import BASE, Mode, random_requests, serve

VARIANT = replace(BASE, bucket=16, num_rows=4, num_pages=48)


class SummedOps(SplitOps):
    """Adds the devices' products as they come."""

    def _spans(self, x: jax.Array, weight: Linear) -> jax.Array:
        return jax.lax.psum(x.astype("float32") @ weight.weight.T.astype("float32"), AXIS)


TABLES: dict[str, Callable[[DecoderSpec], SplitOps]] = {"tree": SplitOps, "psum": SummedOps}


def streams_on(checkpoint: Checkpoint, num_devices: int, tree: str) -> dict[str, Any]:
    setup = replace(VARIANT.setup, ops="split", num_devices=num_devices)
    runner = XlaRunner(checkpoint.config, checkpoint.weights, setup, TABLES[tree])
    with closing(runner):
        runner.warmup()
        requests = random_requests(5, 4, VARIANT)
        streams = serve(runner, VARIANT, requests, Mode(arrival_seed=3)).streams
        (step,) = runner.programs.step.values()
        found: Any = step
        exchanges = re.findall(r" (all-[a-z]+|collective-[a-z]+|reduce-scatter)\(", found.as_text())
    tokens = [[(each.token_id, repr(each.logprobs)) for each in s.tokens] for s in streams]
    return {"streams": tokens, "exchanges": sorted({*exchanges})}


def main(folder: str, tree: str, *counts: str) -> None:
    checkpoint = open_checkpoint(Path(folder))
    print(json.dumps({each: streams_on(checkpoint, int(each), tree) for each in counts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
