"""Bar 19: after warm-up nothing compiles, whatever shape the requests have.

Counts JAX's own compile events; a program called with another shape raises instead of compiling.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.backend import CompileCount
from cadenza.batch.step_schema import ModelInputs
from cadenza.errors import RunnerError
from tests.xla.harness import BASE, Lab, Mode, random_requests, replay, serve

COMPILE_EVENT = "backend_compile"
BATCH = 50


@contextmanager
def compile_count() -> Iterator[list[str]]:
    seen: list[str] = []
    is_open = True

    def listen(event: str, duration: float, **_: object) -> None:
        if is_open and COMPILE_EVENT in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        is_open = False


def serve_random_shapes(lab: Lab, num_requests: int) -> int:
    runner = lab.runner()
    with compile_count() as seen:
        for seed in range(num_requests // BATCH):
            rng = np.random.default_rng(seed)
            requests = random_requests(seed, BATCH, BASE)
            mode = Mode(
                arrival_seed=seed,
                budget=int(rng.integers(BASE.num_rows, BASE.bucket + 1)),
                num_pages=int(rng.integers(22, BASE.num_pages + 1)),
                loop=rng.choice(["plain", "overlap"]),
                caching=bool(rng.integers(2)),
                reserved_output=float(rng.random()),
            )
            serve(runner, BASE, requests, mode)
            runner.reset()
    return len(seen)


def test_the_metric_counts_a_program_that_is_compiled():
    count = CompileCount()
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(17)).block_until_ready()
    seen = count()
    assert seen > 0
    jax.jit(lambda x: x * 5 - 1)(jnp.ones(17)).block_until_ready()
    assert count() > seen


def test_hundreds_of_random_request_shapes_compile_nothing_after_warm_up(lab: Lab):
    replay("300 requests, seeds 0 to 5")
    assert serve_random_shapes(lab, 300) == 0


@pytest.mark.soak
def test_ten_thousand_random_request_shapes_compile_nothing_after_warm_up(lab: Lab):
    replay("10,000 requests, seeds 0 to 199")
    assert serve_random_shapes(lab, 10_000) == 0


def test_the_count_sees_a_compile():
    with compile_count() as seen:
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(17)).block_until_ready()
    assert seen


@pytest.mark.parametrize(
    "sizes",
    [{"bucket": BASE.bucket + 1}, {"num_rows": BASE.num_rows + 1}],
    ids=["another_bucket", "another_number_of_rows"],
)
def test_a_step_of_another_shape_raises_instead_of_compiling(lab: Lab, sizes: dict[str, int]):
    inputs = ModelInputs.empty(**({"bucket": BASE.bucket, "num_rows": BASE.num_rows} | sizes))
    runner = lab.runner()
    with compile_count() as seen, pytest.raises((RunnerError, TypeError)):
        runner.launch(inputs)
    assert not seen


def test_another_type_of_input_raises_instead_of_compiling(lab: Lab):
    inputs = ModelInputs.empty(bucket=BASE.bucket, num_rows=BASE.num_rows)
    other = replace(inputs, words=inputs.words.astype(np.float32))
    runner = lab.runner()
    with compile_count() as seen, pytest.raises(TypeError):
        runner.launch(other)
    assert not seen
