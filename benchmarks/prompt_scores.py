"""What a token that scores a prompt costs beside its own step, by the length of the prompt.

    .venv/bin/python benchmarks/prompt_scores.py [--shape smollm2-135m] [--lengths 8192,32768]

A step of one token over KV of zeros, which takes as long as any other, with the token's scores and
without, by turns; the operation's own time and bytes are those of the kernels' counters.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from cadenza.backends import find_backend
from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.runner import XlaRunner
from cadenza.batch.step_schema import ModelInputs
from cadenza.checkpoint.random_checkpoint import read_shape, write_random_checkpoint
from cadenza.config import EngineLimits
from cadenza.weights.weights import open_weights

PAGE_SIZE, BUCKET = 16, 64


def step_of(length: int, *, scores: bool, has_pages: bool) -> ModelInputs:
    """The last token of a prompt, whose pages are sent if the device has them not."""
    inputs = ModelInputs.empty(bucket=BUCKET, num_rows=1)
    inputs.tokens.ids[0], inputs.tokens.positions[0] = 5, length - 1
    inputs.tokens.slots[0] = length - 1
    inputs.rows.query_starts[1:], inputs.rows.kv_lens[0] = 1, length
    inputs.rows.score_lens[0] = length * scores
    inputs.groups.counts.num_tokens[0] = inputs.groups.counts.num_logits[0] = 1
    inputs.logits.token_indices[0], inputs.logits.positions[0] = 0, length
    pages = [] if has_pages else [(0, page, page) for page in range(length // PAGE_SIZE)]
    return replace(inputs, page_updates=np.array(pages, np.int32).reshape(-1, 3))


def seconds_of(runner: XlaRunner, inputs: ModelInputs) -> float:
    start = time.perf_counter()
    runner.launch(inputs).result()
    return time.perf_counter() - start


def measure(runner: XlaRunner, length: int, repeats: int) -> str:
    runner.reset()
    runner.launch(step_of(length, scores=True, has_pages=False)).result()
    steps = [step_of(length, scores=scores, has_pages=True) for scores in (False, True)]
    times = [[seconds_of(runner, step) for step in steps] for _ in range(repeats)]
    plain, scored = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
    instruments = find_backend("auto").open_instruments()
    assert instruments is not None, "the kernels are built"
    instruments.start_profile()
    for _ in range(repeats):
        seconds_of(runner, steps[1])
    totals = {each.name: each for each in instruments.stop_profile()}
    own, attention = totals["score_keys"], totals["rope_append_attend"]
    rate = own.read_bytes / own.elapsed_s / 1e9
    own_ms, attention_ms = (1e3 * each.elapsed_s / repeats for each in (own, attention))
    return (
        f"{length:7} keys: step {plain:.2f} ms, with scores {scored:.2f} ms; "
        f"score_keys {own_ms:.2f} ms, {rate:.1f} GB/s of keys; attention {attention_ms:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    lengths = [int(each) for each in options.lengths.split(",")]
    limits = EngineLimits(
        max_num_seqs=1,
        max_num_batched_tokens=BUCKET,
        max_model_len=max(lengths),
        page_size=PAGE_SIZE,
        num_pages=max(lengths) // PAGE_SIZE,
        max_num_queued_reqs=1,
    )
    shape = read_shape(options.shape)
    model = replace(shape.config, max_position_embeddings=max(lengths))
    setup = RunnerSetup(
        limits=limits, dtype="bfloat16", fill=0.0, capabilities=frozenset({"scores"})
    )
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(shape, Path(folder) / "model", seed=0, dtype="bfloat16")
        runner = XlaRunner(model, open_weights(Path(folder) / "model"), setup, NativeOps)
    runner.warmup()
    for length in lengths:
        print(measure(runner, length, options.repeats))
    runner.close()


if __name__ == "__main__":
    main()
