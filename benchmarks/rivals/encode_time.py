"""The time that Cadenza's runner takes to encode an image part, without a server around it.

    python -m benchmarks.rivals.encode_time FOLDER/model.gguf WIDTH HEIGHT [--repeats 3]

Pixels are random. Prints a JSON object: the part, and the milliseconds of each repeat.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.runner import XlaRunner
from cadenza.batch.step_schema import ImageCall, ModelInputs
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineLimits
from cadenza.request import Attachment
from cadenza.vision.processor import ImagePart

BUCKET, ROWS = 64, 2
LIMITS = EngineLimits(
    max_num_seqs=ROWS,
    max_num_batched_tokens=BUCKET,
    max_model_len=256,
    page_size=16,
    num_pages=40,
    max_num_queued_reqs=1,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("width", type=int)
    parser.add_argument("height", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    checkpoint = open_checkpoint(given.model)
    vision = checkpoint.config.vision
    assert vision is not None, "the model does not see"
    pixels = np.random.default_rng(0).integers(0, 256, (given.height, given.width, 3), np.uint8)
    part = vision.processor.plan(given.width, given.height).parts[-1]
    payload = vision.processor.prepare(Image.fromarray(pixels))[-1]
    setup = RunnerSetup(limits=LIMITS, dtype="bfloat16", num_image_slots=part.num_tokens)
    runner = XlaRunner(checkpoint.config, checkpoint.weights, setup, NativeOps)
    runner.warmup()
    times = [encode(runner, part_of(payload, part, at)) for at in range(given.repeats)]
    print(
        json.dumps(
            {"width": part.width, "height": part.height, "tokens": part.num_tokens, "ms": times}
        )
    )


def part_of(payload: bytes, part: ImagePart, seed: int) -> Attachment:
    return Attachment(
        start=0,
        length=part.num_tokens,
        digest=bytes([seed]),
        payload=payload,
        width=part.width,
        height=part.height,
        rows=part.rows,
        columns=part.columns,
    )


def encode(runner: XlaRunner, part: Attachment) -> float:
    """Milliseconds of all quanta in one step."""
    slots = np.arange(part.rows * part.columns, dtype=np.int32)
    start, total = time.perf_counter(), len(runner.image_work(part))
    call = ImageCall(attachment=part, start=0, stop=total, slots=slots)
    inputs = replace(ModelInputs.empty(bucket=BUCKET, num_rows=ROWS), image_calls=(call,))
    runner.launch(inputs).result()
    state = runner.state_holder.state
    assert state is not None, "the runner has its memory"
    state.image_rows.block_until_ready()
    return round(1e3 * (time.perf_counter() - start), 1)


if __name__ == "__main__":
    main()
