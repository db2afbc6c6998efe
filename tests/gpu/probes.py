"""What no command of the package measures: attention alone, the host's part of a step, and a
server. Each prints one JSON object.

    python -m tests.gpu.probes attention|host|served
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

CADENZA = (sys.executable, "-c", "import sys; from cadenza.cli import main; sys.exit(main())")
CASES = ((64, 4000), (256, 1024), (8, 1000), (1, 8192))  # rows and tokens of context
CALLS = 20  # attentions of one program: the launch of one takes longer than a short one runs


def probe_attention() -> dict[str, Any]:
    """The time of attention of Llama-3.1-8B's heads, as a share of reading its keys and values."""
    import jax

    from cadenza.backends.xla.ops.cuda_library import CudaInstruments, load_cuda_library

    library = load_cuda_library()
    rate = CudaInstruments(library).read_bytes_per_s(None, repeats=1)  # type: ignore[arg-type]
    times = [time_attention(library, rows, length, trials=7) for rows, length in CASES]
    read_bytes = [rows * length * 2 * 8 * 128 * 2 for rows, length in CASES]
    percent = [100 * each / s / rate for each, s in zip(read_bytes, times, strict=True)]
    return {
        "device": jax.devices()[0].device_kind,
        "read_gb_s": rate / 1e9,
        "at": [f"{rows}×{length}" for rows, length in CASES],
        "us": [round(1e6 * each, 1) for each in times],
        "percent": [round(each, 1) for each in percent],
    }


def time_attention(library: Any, rows: int, length: int, *, trials: int) -> float:
    """Seconds of one decode step's attention of one layer: the median of `trials` programs."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from cadenza.backends.xla.ops.cuda import CudaOps
    from cadenza.backends.xla.ops.table import (
        AttendingLayer,
        DecoderSpec,
        HeadFactors,
        HeadInputs,
        StepArrays,
    )
    from cadenza.batch.step_schema import StepLayout
    from tests.gpu.eight_billion import shape_of_8b

    page_size = 64
    model = shape_of_8b(1)
    ops = CudaOps(DecoderSpec(model=model, dtype=jnp.bfloat16, page_size=page_size), library)
    pages = -(-length // page_size)
    groups = (layout := StepLayout(rows, rows)).views(layout.empty_words())
    page_table = np.random.default_rng(0).permutation(rows * pages).reshape(rows, pages)
    page_table = page_table.astype(np.int32)
    groups.tokens.positions[:] = length - 1
    groups.tokens.slots[:] = page_table[:, -1] * page_size + (length - 1) % page_size
    groups.rows.query_starts[:] = np.arange(rows + 1)
    groups.rows.kv_lens[:] = length
    given: dict[str, Any] = {
        "num_tokens": np.int32(rows),
        "num_logits": np.int32(rows),
        "tokens": groups.tokens,
        "token_rows": np.arange(rows, dtype=np.int32),
        "rows": groups.rows,
        "logits": groups.logits,
        "page_table": page_table,
    }
    arrays = jax.device_put(StepArrays(**given))
    heads = model.heads
    qkv = jnp.ones((rows, heads.query_size + 2 * heads.kv_size), jnp.bfloat16)
    rope = jnp.ones((length, 128), jnp.float32)
    pool = ops.new_kv_pool(model.kv_groups[0], rows * pages, 0.5)

    def attend(pool: Any, qkv: Any, rope: Any, arrays: Any) -> Any:
        factors, layer = HeadFactors(None, rope, arrays.tokens.positions), AttendingLayer(0, heads)
        return ops.compute(
            lambda table: table.rope_append_attend(HeadInputs(qkv), pool, factors, arrays, layer)
        )

    def repeated(pool: Any, out: Any, qkv: Any, rope: Any, arrays: Any) -> Any:
        def again(_: Any, held: Any) -> Any:
            out, pool = attend(held[1], qkv, rope, arrays)
            return out, pool

        return jax.lax.fori_loop(0, CALLS, again, (out, pool))

    kind, _ = jax.eval_shape(attend, pool, qkv, rope, arrays)
    out = jnp.zeros(kind.shape, kind.dtype)
    compiled, times = jax.jit(repeated, donate_argnums=(0, 1)), list[float]()
    for _ in range(2 + trials):
        started = time.perf_counter()
        out, pool = jax.block_until_ready(compiled(pool, out, qkv, rope, arrays))
        times.append((time.perf_counter() - started) / CALLS)
    return statistics.median(times[2:])


def probe_host(
    rows: tuple[int, ...] = (1, 8, 64), shape: str = "smollm2-135m", device: str = "cuda"
) -> dict[str, Any]:
    """The host's time for a decode step of each number of rows, beside the step's own time."""
    import jax

    from cadenza import LLM, SamplingParams
    from cadenza.bench.checkpoints import cached_checkpoint

    folder = cached_checkpoint(shape, Path(os.environ.get("CADENZA_CACHE_DIR", "/tmp")))
    host_ms, step_ms = list[float](), list[float]()
    with LLM(folder, device=device, max_num_seqs=max(rows), max_model_len=512) as llm:
        runner, launches = llm.core.runner, list[float]()
        launch = runner.launch

        class Timed:
            """The runner, whose launches are timed."""

            def __getattr__(self, name: str) -> Any:
                return getattr(runner, name)

            def launch(self, inputs: Any) -> Any:
                started = time.perf_counter()
                handle = launch(inputs)
                launches.append(time.perf_counter() - started)
                return handle

        steps: Any = llm.core.loop._step_runner
        steps._runner = Timed()
        for count in rows:
            launches.clear()
            params = SamplingParams(max_tokens=128, ignore_eos=True)
            started = time.perf_counter()
            llm.generate([[3 + index] * 16 for index in range(count)], params)
            elapsed = time.perf_counter() - started
            host_ms.append(round(1000 * sorted(launches)[len(launches) // 2], 3))
            step_ms.append(round(1000 * elapsed / max(1, len(launches)), 3))
    return {
        "device": jax.devices()[0].device_kind,
        "rows": [str(each) for each in rows],
        "host_ms": host_ms,
        "step_ms": step_ms,
    }


def probe_served(
    clients: tuple[int, ...] = (1, 8, 64), shape: str = "smollm2-135m", device: str = "cuda"
) -> dict[str, Any]:
    """Tokens a second of a served shape, 128 tokens in and 64 out."""
    from cadenza.bench.checkpoints import cached_checkpoint

    folder = cached_checkpoint(shape, Path(os.environ.get("CADENZA_CACHE_DIR", "/tmp")))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ("--device", device, "--max-num-seqs", "64", "--max-model-len", "1024")
    server = subprocess.Popen((*CADENZA, "serve", str(folder), *flags, "--port", str(port)))
    url = f"http://127.0.0.1:{port}"
    try:
        started = time.monotonic()
        while time.monotonic() < started + 60:
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/ready", timeout=1)
                break
            time.sleep(0.5)
        ready_s = time.monotonic() - started
        counts = ",".join(map(str, clients))
        prompts = ("--prompts", "ids", "--vocab-size", "256", "--input-len", "128")
        load = ("--concurrency", counts, *prompts, "--output-len", "64", "--json")
        command = (*CADENZA, "bench", "serve", url, *load)
        # Its status also tells of a client that took too much, which is in `void`.
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        found = json.loads(ran.stdout.strip().splitlines()[-1])
        rates = [round(each["output_tok_s"], 1) for each in found["results"]]
    finally:
        server.terminate()
        server.wait(timeout=20)
    assert all(rates), f"requests failed: {ran.stderr[-500:]}"
    void = found["void"]
    return {"clients": list(clients), "tok_s": rates, "ready_s": round(ready_s, 1), "void": void}


PROBES = {"attention": probe_attention, "host": probe_host, "served": probe_served}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
