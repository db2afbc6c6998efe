"""What mlx-lm's own `generate_step` makes of prompts, greedily, one after the other.

A program of its own, because it imports mlx-lm's package, and with it transformers. Reads
`{"folder", "dtype", "prompts", "max_tokens"}` as JSON and prints, for each prompt, a list of
`[token id, gap]`, where the gap is that between the two largest logits.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model


def main() -> None:
    wanted = json.load(sys.stdin)
    model, _ = load_model(Path(wanted["folder"]))
    if wanted["dtype"] is not None:
        model.set_dtype(getattr(mx, wanted["dtype"]))
    streams: list[list[tuple[int, float]]] = []
    for prompt in wanted["prompts"]:
        steps = generate_step(mx.array(prompt), model, max_tokens=wanted["max_tokens"])
        streams.append([(int(token), gap_of(logprobs)) for token, logprobs in steps])
    json.dump(streams, sys.stdout)


def gap_of(logprobs: mx.array) -> float:
    second, first = np.sort(np.array(logprobs.astype(mx.float32)))[-2:]
    return float(first - second)


if __name__ == "__main__":
    main()
