"""Times whole steps of a Llama shape through the FFI targets, with XLA only sequencing them.

    python csrc/bench/step.py [--shape 135m|1b|qwen3-0.6b] [--rows 1,4,8,32,64] [--context 128]
                              [--prefill 512] [--page-size 16] [--repeats 5] [--sampled]

Random weights; nothing is read by the host within a run, as in the prototype's loop.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from cadenza.backends.xla.ops.native_library import (
    PackLayout,
    empty_packed,
    load_native_library,
)

BF16 = jnp.bfloat16
SHAPES = {
    # layers, hidden, heads, KV heads, head size, intermediate, vocabulary
    "135m": (30, 576, 9, 3, 64, 1536, 49152),
    "1b": (16, 2048, 32, 8, 64, 8192, 128256),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151936),
}
READ_BYTES_PER_S, OPS_PER_S = 45e9, 0.97e12
EMPTY = np.zeros(0, np.float32)


def call(name: str, out: Any, *args: Any, aliases: Any = None, **attrs: Any) -> Any:
    return jax.ffi.ffi_call(f"cadenza_{name}", out, input_output_aliases=aliases)(*args, **attrs)


def sds(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


class Model:
    def __init__(self, shape: str) -> None:
        self.library = load_native_library()
        self.layers, self.hidden, self.heads, self.kv_heads, self.size, self.ffn, self.vocab = (
            SHAPES[shape]
        )
        self.random = np.random.default_rng(0)
        self.bytes = self.ops = 0
        width = (self.heads + 2 * self.kv_heads) * self.size
        self.blocks = [
            {
                "qkv": self.packed(width, self.hidden),
                "o": self.packed(self.hidden, self.heads * self.size),
                "gate_up": self.gated(self.ffn, self.hidden),
                "down": self.packed(self.hidden, self.ffn),
                "norm": jnp.ones(self.hidden),
            }
            for _ in range(self.layers)
        ]
        self.layer_bytes = self.bytes
        self.head = self.packed(self.vocab, self.hidden)
        angles = np.arange(4096)[:, None] / 1e4 ** (np.arange(0, self.size, 2) / self.size)
        self.rope = jnp.array(np.concatenate([np.cos(angles), np.sin(angles)], 1), jnp.float32)

    def raw(self, n: int, k: int) -> Any:
        self.bytes += 2 * n * k
        return (self.random.standard_normal((n, k), dtype=np.float32) * 0.02).astype(
            ml_dtypes.bfloat16
        )

    def packed(self, n: int, k: int) -> Any:
        out = empty_packed(n, k, BF16)
        self.library.pack(self.raw(n, k), out, num_columns=n)
        return jnp.asarray(out)

    def gated(self, f: int, k: int) -> Any:
        out = empty_packed(f, k, BF16, is_gated=True)
        self.library.pack(self.raw(f, k), out, num_columns=f, layout=PackLayout.GATE)
        self.library.pack(self.raw(f, k), out, num_columns=f, layout=PackLayout.UP)
        return jnp.asarray(out)

    def weights(self) -> Any:
        return {"blocks": self.blocks, "head": self.head, "rope": self.rope}

    def step(self, weights: Any, pools: Any, batch: Any) -> Any:
        count, tokens = batch["count"], len(batch["tokens"])
        x = call(
            "embed",
            sds((tokens, self.hidden), jnp.float32),
            batch["tokens"],
            weights["head"],
            count,
            vocab=np.int64(self.vocab),
            scale=np.float32(1),
        )
        new_pools = []
        for block, pool in zip(weights["blocks"], pools, strict=True):
            x, pool = self.layer(block, weights["rope"], x, pool, batch)
            new_pools.append(pool)
        rows = len(batch["logit_rows"])
        h = call(
            "rms_norm_rows",
            sds((rows, self.hidden), BF16),
            x,
            weights["blocks"][0]["norm"],
            batch["num_logits"],
            batch["logit_rows"],
            eps=np.float32(1e-5),
            one_plus=False,
        )
        out = call(
            "next_token",
            sds((rows, 44), jnp.int32),
            h,
            weights["head"],
            batch["num_logits"],
            *batch["sampling"],
            EMPTY,
            np.full(rows, -1, np.int32),
            vocab=np.int64(self.vocab),
        )
        return new_pools, out[:, 0]

    def layer(self, block: Any, rope: Any, x: Any, pool: Any, batch: Any) -> Any:
        tokens, count = len(x), batch["count"]
        width = (self.heads + 2 * self.kv_heads) * self.size
        h = self.norm(x, block, count)
        qkv = call(
            "linear", sds((tokens, width), BF16), h, block["qkv"], count, EMPTY, EMPTY
        )
        out, keys, values = call(
            "rope_append_attend",
            (
                sds((tokens, self.heads * self.size), BF16),
                sds(pool[0].shape, BF16),
                sds(pool[1].shape, BF16),
            ),
            qkv,
            batch["positions"],
            batch["slots"],
            batch["query_starts"],
            batch["kv_lens"],
            batch["pages"],
            rope,
            EMPTY,
            EMPTY,
            *pool,
            aliases={9: 1, 10: 2},
            heads=np.int64(self.heads),
            scale=np.float32(self.size**-0.5),
            window=np.int64(0),
            soft_cap=np.float32(0),
            norm_eps=np.float32(1e-6),
            norm_one_plus=False,
        )
        x = self.linear_add(out, block["o"], x, count)
        h = self.norm(x, block, count)
        gated = call(
            "gated_linear",
            sds((tokens, self.ffn), BF16),
            h,
            block["gate_up"],
            count,
            EMPTY,
            activation=np.int64(0),
        )
        return self.linear_add(gated, block["down"], x, count), (keys, values)

    def norm(self, x: Any, block: Any, count: Any) -> Any:
        return call(
            "rms_norm",
            sds(x.shape, BF16),
            x,
            block["norm"],
            count,
            eps=np.float32(1e-5),
            one_plus=False,
        )

    def linear_add(self, x: Any, w: Any, residual: Any, count: Any) -> Any:
        out = sds(residual.shape, jnp.float32)
        return call("linear", out, x, w, count, EMPTY, residual, aliases={4: 0})


def make_batch(rows: int, queries: int, context: int, page_size: int, args: Any) -> Any:
    """`queries` tokens for each row, ending at position context - 1."""
    tokens = rows * queries
    pages_per_row = -(-(context + args.steps) // page_size)
    # Pages of a row lie scattered, as they do in a pool that has been used for a while.
    order = np.random.default_rng(1).permutation(rows * pages_per_row).astype(np.int32)
    pages = order.reshape(rows, pages_per_row)
    positions = np.tile(np.arange(context - queries, context, dtype=np.int32), rows)
    sampled = np.float32(0.8 if args.sampled else 0)
    return {
        "count": np.int32(tokens),
        "num_logits": np.int32(rows),
        "logit_rows": (np.arange(rows, dtype=np.int32) + 1) * queries - 1,
        "tokens": np.zeros(tokens, np.int32),
        "positions": positions,
        "query_starts": np.arange(rows + 1, dtype=np.int32) * queries,
        "kv_lens": np.full(rows, context, np.int32),
        "pages": pages,
        "sampling": (
            np.full(rows, sampled, np.float32),
            np.full(rows, 40 if args.sampled else 0, np.int32),
            np.full(rows, 0.95 if args.sampled else 1, np.float32),
            np.zeros(rows, np.float32),
            np.ones((rows, 2), np.uint32),
            np.full(rows, -1, np.int32),
        ),
    }


def advance(model: Model, page_size: int, queries: int) -> Any:
    """A step that makes its slots from positions and feeds its tokens to the next."""

    def run(weights: Any, pools: Any, batch: Any) -> Any:
        rows = len(batch["kv_lens"])
        positions = batch["positions"].reshape(rows, queries)
        page = jnp.take_along_axis(batch["pages"], positions // page_size, axis=1)
        slots = (page * page_size + positions % page_size).reshape(-1)
        pools, ids = model.step(weights, pools, {**batch, "slots": slots})
        if queries > 1:
            return pools, batch
        following = {
            **batch,
            "tokens": ids,
            "positions": batch["positions"] + 1,
            "kv_lens": batch["kv_lens"] + 1,
        }
        return pools, following

    return jax.jit(run, donate_argnums=1)


def measure(model: Model, rows: int, queries: int, context: int, args: Any) -> float:
    """Best seconds a step over the repeats."""
    batch = jax.device_put(make_batch(rows, queries, context, args.page_size, args))
    shape = (batch["pages"].size, model.kv_heads, args.page_size, model.size)
    pools = [(jnp.zeros(shape, BF16), jnp.zeros(shape, BF16)) for _ in range(model.layers)]
    step = advance(model, args.page_size, queries)
    weights = model.weights()
    pools, _ = step(weights, pools, batch)
    best = float("inf")
    steps = args.steps if queries == 1 else 2
    for _ in range(args.repeats):
        state = batch
        jax.block_until_ready(pools)
        start = time.perf_counter()
        for _ in range(steps):
            pools, state = step(weights, pools, state)
        jax.block_until_ready((pools, state))
        best = min(best, (time.perf_counter() - start) / steps)
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="135m", choices=SHAPES)
    parser.add_argument("--rows", default="1,4,8,32,64")
    parser.add_argument("--context", type=int, default=129)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sampled", action="store_true")
    args = parser.parse_args()
    model = Model(args.shape)
    print(f"isa {model.library.cpu_isa}, {model.library.num_threads} threads")
    for rows in map(int, args.rows.split(",") if args.rows else []):
        seconds = measure(model, rows, 1, args.context, args)
        bound = rows / max(model.bytes / READ_BYTES_PER_S, model.bytes * rows / OPS_PER_S)
        rate = rows / seconds
        print(f"{rows:3} rows: {seconds * 1e3:7.2f} ms {rate:6.0f} tok/s {rate / bound:5.0%} of bound")
    if args.prefill:
        seconds = measure(model, 1, args.prefill, args.prefill, args)
        rate = args.prefill / seconds
        bound = OPS_PER_S / model.layer_bytes
        print(f"prefill {args.prefill}: {seconds * 1e3:7.2f} ms {rate:6.0f} tok/s {rate / bound:5.0%}")


if __name__ == "__main__":
    main()
