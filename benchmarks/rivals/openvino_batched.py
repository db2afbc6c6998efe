"""Decode and prefill rates of OpenVINO GenAI's continuous batching, for comparison with Cadenza.

    pip install openvino-genai==2026.4 optimum-intel nncf
    optimum-cli export openvino -m FOLDER --task text-generation-with-past --weight-format int8 OUT
    python benchmarks/rivals/openvino_batched.py OUT [--rows 1,4,8,32] [--kv u8]

Prompts of equal length are random ids, none twice. Prefill is measured by answers of one token,
decode by the time that further tokens take beyond it; each figure is the median of `--repeats`.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    options = parse_arguments()
    settings = {} if options.kv is None else {"KV_CACHE_PRECISION": getattr(ov.Type, options.kv)}
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 64
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = False
    engine = genai.ContinuousBatchingPipeline(
        str(options.folder), scheduler, "CPU", properties=settings
    )
    ids = np.random.default_rng(0)
    for rows in map(int, options.rows.split(",")):
        rates = [measure(engine, ids, rows, options) for _ in range(1 + options.repeats)][1:]
        decode, prefill = (statistics.median(each) for each in zip(*rates, strict=True))
        figures = f"decode {decode:8.1f} tok/s, prefill {prefill:8.1f} tok/s"
        print(f"{rows:3} rows: {figures}", flush=True)


def measure(
    engine: Any, ids: np.random.Generator, rows: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Tokens a second of decode and of prefill."""
    first = answer(engine, ids, rows, options.prompt_tokens, 1)
    whole = answer(engine, ids, rows, options.prompt_tokens, 1 + options.new_tokens)
    return rows * options.new_tokens / (whole - first), rows * options.prompt_tokens / first


def answer(
    engine: Any, ids: np.random.Generator, rows: int, num_tokens: int, new_tokens: int
) -> float:
    """The seconds until all prompts are answered."""
    prompts = [ov.Tensor(ids.integers(10, 2000, (1, num_tokens))) for _ in range(rows)]
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
    started = time.perf_counter()
    results = engine.generate(prompts, [config] * rows)
    taken = time.perf_counter() - started
    assert all(len(each.m_generation_ids[0]) == new_tokens for each in results)
    return taken


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", default="1,4,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--kv", choices=("u8", "bf16", "f32", "f16"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
