"""Time to the first token of a long prompt: computed, from memory, and from disk after a restart.

    python benchmarks/prefix_disk.py [--shape smollm2-135m] [--input-len 1000] [--repeats 5]

Each repeat has a prompt of its own. The engine is loaded twice on one folder, then a second one
beside it, which reads what the first one stores meanwhile; the times are of one request to an idle
engine, in the median.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from random import Random

from cadenza import LLM, SamplingParams
from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.loading.build import cache_folder

STORING_CALLS = 8
"""An engine in this process copies pages between its steps only."""

STORED_S = 3.0
"""Within which a page is written, and others have looked."""

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def seconds_of(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Of a request for one token, and how many tokens were cached."""
    start_s = time.perf_counter()
    (output,) = llm.generate([prompt], ONE_TOKEN)
    return time.perf_counter() - start_s, output.num_cached_tokens or 0


def load(model: Path, folder: str, input_len: int, num_prompts: int) -> LLM:
    """With pages for all prompts at once."""
    return LLM(
        model,
        dtype="bfloat16",
        max_num_seqs=num_prompts + 1,
        max_model_len=input_len + 64,
        prefix_cache_disk=folder,
    )


def show(name: str, times: list[float], cold_s: float) -> None:
    median_s = statistics.median(times)
    print(f"{name:16}{1000 * median_s:9.1f} ms {cold_s / median_s:7.1f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--input-len", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    model = cached_checkpoint(asked.shape, cache_folder(), print)
    rng = Random(1)
    drawn = [rng.choices(range(300, 20_000), k=asked.input_len) for _ in range(2 * asked.repeats)]
    prompts, others = drawn[: asked.repeats], drawn[asked.repeats :]
    with tempfile.TemporaryDirectory() as folder:
        with load(model, folder, asked.input_len, asked.repeats) as llm:
            seconds_of(llm, [5] * 40)
            cold = [seconds_of(llm, prompt) for prompt in prompts]
            memory = [seconds_of(llm, prompt) for prompt in prompts]
        with load(model, folder, asked.input_len, asked.repeats) as llm:
            seconds_of(llm, [6] * 40)
            disk = [seconds_of(llm, prompt) for prompt in prompts]
            with load(model, folder, asked.input_len, asked.repeats) as beside:
                seconds_of(beside, [7] * 40)
                for prompt in others:
                    seconds_of(llm, prompt)
                for _ in range(STORING_CALLS):
                    seconds_of(llm, [5] * 40)
                time.sleep(STORED_S)
                shared = [seconds_of(beside, prompt) for prompt in others]
    assert {cached for _, cached in cold} == {0}
    assert min(cached for _, cached in memory + disk + shared) >= asked.input_len - 16
    cold_s = statistics.median(seconds for seconds, _ in cold)
    rows = {"computed": cold, "from memory": memory, "from disk": disk, "of one beside": shared}
    for name, found in rows.items():
        show(name, [seconds for seconds, _ in found], cold_s)


if __name__ == "__main__":
    main()
