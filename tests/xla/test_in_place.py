"""In place: the step's program aliases every pool and copies none; its buffers never move.

And admission on the device: a prompt's KV goes straight into its own slots. No other byte of any
pool changes, and no KV passes through the host: one array of the step's inputs goes up, one of its
results comes down.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.backends.xla.runner import XlaLateStepHandle, XlaRunner
from cadenza.backends.xla.step_program import StepProgram
from cadenza.batch.sequence import PageCopy
from cadenza.batch.step_schema import NUM_EXTRA_LOGIT_ROWS, StepLayout
from cadenza.config import PAGE_SIZE_UNIT, KVCacheDType
from cadenza.weights.weight_format import WeightDType
from tests.contract.steps import Geometry, Stream, build_inputs, run_step
from tests.xla.harness import (
    BASE,
    REFERENCE,
    Lab,
    Variant,
    own_operations,
    page_bytes,
    slots_of,
    slots_of_pool,
)

NUM_SIDES = 2  # of the pool: keys and values
GEOMETRY = Geometry(bucket=BASE.bucket, num_rows=BASE.num_rows, page_size=BASE.page_size)
PROMPT = np.random.default_rng(41).integers(3, 211, 50).tolist()


def pool_aliases(program_text: str) -> dict[int, int]:
    header = program_text[: program_text.index("\n")]
    aliases = re.search(r"input_output_alias=\{(.*?)\}, \w+=", header)
    assert aliases is not None, "the program aliases nothing"
    found = re.findall(r"\{(\d+)\}: \((\d+), \{\}", aliases[1])
    return {int(output): int(parameter) for output, parameter in found}


def pool_sized_results(program_text: str, variant: Variant, operation: str) -> list[str]:
    model = variant.config
    num_slots, num_layers = variant.num_pages * variant.page_size, model.num_layers
    shape = f"[{num_slots},{num_layers},{model.num_kv_heads},{model.head_dim}]"
    pattern = re.compile(rf"= \w+{re.escape(shape)}\S* {operation}\(")
    return [line.strip() for line in program_text.splitlines() if pattern.search(line)]


def step_texts(runner: XlaRunner) -> list[str]:
    return [program.as_text() for program in runner.programs.step.values()]


def test_every_pool_of_every_step_program_is_aliased_in_place(lab: Lab):
    runner = lab.runner(REFERENCE)
    num_weights = len(jax.tree.leaves(runner._weights))
    for text in step_texts(runner):
        aliases = pool_aliases(text)
        for index in range(NUM_SIDES + 2):
            assert aliases.get(index) == num_weights + index, f"state leaf {index} is not aliased"


def test_no_step_program_copies_a_pool(lab: Lab):
    for text in step_texts(lab.runner(REFERENCE)):
        assert not pool_sized_results(text, REFERENCE, "copy")


@pytest.mark.native
@pytest.mark.parametrize("part", ["step", "begin", "choose"])
def test_a_native_step_copies_nothing_of_its_state_whole_or_in_two_parts(lab: Lab, part: str):
    """Every buffer of the state stays where it is."""
    runner = lab.runner()
    stream, addresses = Stream(row=1, pages=[2, 8, 0, 11]), list[list[int]]()
    for place in range(3):
        chunk = stream.next_token() if place else stream.chunk(PROMPT, samples=True)
        inputs = build_inputs([chunk], GEOMETRY)
        handle = runner.launch(replace(inputs, masks_follow=part != "step"))
        if part == "choose":
            addresses.append(addresses_of(runner))
        if isinstance(handle, XlaLateStepHandle):
            handle.choose(())
        handle.result()
        addresses.append(addresses_of(runner))
    assert len(set(map(tuple, addresses))) == 1, "a program moved a buffer of the state"


def addresses_of(runner: XlaRunner) -> list[int]:
    state = runner._state
    assert state is not None
    leaves = jax.tree.leaves((state.pools, state.rows.token_history, state.rows.rule_records))
    return [leaf.unsafe_buffer_pointer() for leaf in leaves]


def test_a_step_whose_state_is_not_donated_copies_every_pool(lab: Lab):
    """The parsers can see: the same step, compiled without giving its state away."""
    runner = lab.runner(REFERENCE)
    layout = StepLayout(REFERENCE.bucket, REFERENCE.num_rows)
    step = StepProgram(ops=runner._ops, spec=runner._spec, layout=layout).step
    wire = build_inputs([], GEOMETRY).words
    text = jax.jit(step).lower(runner._weights, runner._state, wire).compile().as_text()
    assert len(pool_sized_results(text, REFERENCE, "copy")) >= NUM_SIDES
    with pytest.raises(AssertionError, match="aliases nothing"):
        pool_aliases(text)


def test_copying_pages_aliases_every_pool_and_copies_none(lab: Lab):
    text = lab.runner(REFERENCE).programs.copy_pages.as_text()  # type: ignore[attr-defined]
    aliases = pool_aliases(text)
    for index in range(NUM_SIDES):
        assert aliases.get(index) == index, f"state leaf {index} is not aliased"
    assert not pool_sized_results(text, REFERENCE, "copy")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "ops", [OpTable, pytest.param(NativeOps, marks=pytest.mark.native)], ids=lambda o: o.name
)
def test_the_pool_takes_the_bytes_that_the_plan_counts(
    ops: type[OpTable], dtype: WeightDType, kv_cache_dtype: KVCacheDType
):
    model, num_pages = BASE.config, 7
    spec = DecoderSpec(
        model=model, dtype=jnp.dtype(dtype).type, page_size=48, kv_cache_dtype=kv_cache_dtype
    )
    pool = jax.eval_shape(lambda: ops(spec).new_kv_pool(model.kv_groups[0], num_pages, 0.0))
    allocated = sum(side.size * side.dtype.itemsize for side in jax.tree.leaves(pool))
    assert allocated == num_pages * 48 * model.kv_bytes_per_token(dtype, kv_cache_dtype)


# A page is a whole row's.
DENSE = replace(BASE, page_size=BASE.max_model_len, num_pages=BASE.num_rows)


def kv_of_page(runner: XlaRunner, page: int) -> np.ndarray:
    sides = np.concatenate(slots_of_pool(runner), axis=1)
    is_bits = sides.dtype == np.uint16
    return np.split(sides.view(ml_dtypes.bfloat16) if is_bits else sides, DENSE.num_pages)[page]


@pytest.mark.parametrize(
    ("ops", "dtype"),
    [
        pytest.param(NativeOps, "float32", marks=pytest.mark.native),
        pytest.param(NativeOps, "bfloat16", marks=pytest.mark.native),
        pytest.param(OpTable, "float32", marks=pytest.mark.soak),
        pytest.param(OpTable, "bfloat16", marks=pytest.mark.soak),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_a_fork_copies_the_blocks_with_its_tokens_and_nothing_behind_them(
    lab: Lab, ops: type[OpTable], dtype: WeightDType
):
    runner = lab.runner(replace(DENSE, ops=ops, dtype=dtype))
    geometry = replace(GEOMETRY, page_size=DENSE.page_size)
    source, num_tokens = Stream(row=0, pages=[2]), len(PROMPT) - 1
    for _ in range(4):
        run_step(runner, [source.chunk(PROMPT, samples=True)], geometry)
    copies = [PageCopy(source=2, destination=5, num_tokens=num_tokens)]
    fork = Stream(row=1, pages=[5], num_computed=num_tokens, copies=copies)
    run_step(runner, [fork.chunk(PROMPT[-1:], samples=True)], geometry)
    original, copy = (kv_of_page(runner, page) for page in (2, 5))
    kept = [page[:num_tokens].view(np.uint8) for page in (copy, original)]
    assert np.array_equal(*kept)
    end = -(-num_tokens // PAGE_SIZE_UNIT) * PAGE_SIZE_UNIT
    assert not np.isnan(original[end : 3 * PAGE_SIZE_UNIT + end]).any()
    assert np.isnan(copy[end:]).all()


@pytest.mark.native
def test_a_native_step_in_bfloat16_leaves_nothing_heavy_to_xla(lab: Lab):
    """In float32 `test_fixtures.py` looks at every family's."""
    runner = lab.runner(replace(BASE, dtype="bfloat16"))
    text = runner.programs.step[BASE.bucket].as_text()
    assert own_operations(text, BASE.bucket * BASE.config.hidden_size) == []


@pytest.mark.native
def test_copies_of_pages_in_bfloat16_convert_no_element(lab: Lab):
    """Where a pool is bfloat16, XLA converts all of it to float32 and back on a CPU."""
    runner = lab.runner(replace(BASE, dtype="bfloat16"))
    text = runner.programs.copy_pages.as_text()  # type: ignore[attr-defined]
    assert "u16[" in text
    assert "bf16[" not in text


def pool_pointers(runner: XlaRunner) -> list[int]:
    assert runner._state is not None
    return [side.unsafe_buffer_pointer() for side in runner._state.pools.kv[0]]


def test_the_pools_stay_where_they_are_from_step_to_step(lab: Lab):
    runner = lab.runner()
    stream = Stream(row=2, pages=[9, 4, 7, 1])
    before = pool_pointers(runner)
    run_step(runner, [stream.chunk(PROMPT, samples=True)], GEOMETRY)
    for _ in range(10):
        run_step(runner, [stream.next_token()], GEOMETRY)
        assert pool_pointers(runner) == before


def test_new_pools_lie_elsewhere(lab: Lab):
    """The comparison of pointers can fail: a state held on to keeps its place for itself."""
    runner = lab.runner()
    before, held = pool_pointers(runner), runner._state
    runner.reset()
    assert pool_pointers(runner) != before
    del held


def test_admitting_a_prompt_changes_no_byte_but_its_own_slots(lab: Lab):
    runner = lab.runner()
    old = Stream(row=0, pages=[5, 6, 7])
    run_step(runner, [old.chunk(PROMPT[:40], samples=True)], GEOMETRY)
    before = page_bytes(runner)
    new = Stream(row=3, pages=[2, 8, 0, 11])
    run_step(runner, [new.chunk(PROMPT, samples=True)], GEOMETRY)
    after = page_bytes(runner)
    changed = np.flatnonzero((before != after).any(axis=1))
    assert sorted(changed) == sorted(slots_of(new.pages, len(PROMPT), BASE.page_size))


@dataclass(slots=True, eq=False)
class Customs:
    program: Any
    num_uploaded_bytes: int = 0
    num_calls: int = 0

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        for leaf in jax.tree.leaves(args):
            if not isinstance(leaf, jax.Array):
                self.num_uploaded_bytes += leaf.nbytes
        results = self.program(*args)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(results))
        return results


def test_only_the_steps_inputs_go_up_and_only_its_results_come_down(lab: Lab):
    runner = lab.runner()
    programs = runner.programs
    step = Customs(programs.step[BASE.bucket])
    table = Customs(programs.rows.write_page_table)
    rows = replace(programs.rows, write_page_table=table)
    runner._programs = replace(programs, step={BASE.bucket: step}, rows=rows)
    try:
        stream = Stream(row=1, pages=[2, 8, 0, 11])
        handle = runner.launch(build_inputs([stream.chunk(PROMPT, samples=True)], GEOMETRY))
        num_read_bytes = handle.rows().nbytes
        for _ in range(3):
            runner.launch(build_inputs([stream.next_token()], GEOMETRY)).result()
    finally:
        runner._programs = programs
    wire_bytes = 4 * StepLayout(BASE.bucket, BASE.num_rows).num_words
    assert step.num_calls == 4
    assert step.num_uploaded_bytes == 4 * wire_bytes
    assert table.num_calls == 1, "the page table was sent again though no page was new"
    assert num_read_bytes < 16 * 1024
    kv_bytes = len(PROMPT) * BASE.config.kv_bytes_per_token("float32")
    assert wire_bytes < kv_bytes, "the bound could not tell KV from inputs"


def test_a_step_runs_under_a_guard_that_forbids_every_transfer(lab: Lab):
    runner = lab.runner()
    stream = Stream(row=1, pages=[2, 8, 0, 11])
    inputs = build_inputs([stream.chunk(PROMPT, samples=True)], GEOMETRY)
    runner.launch(inputs).result()  # pages are known from here on
    wire = jax.device_put(build_inputs([stream.next_token()], GEOMETRY).words)
    program = runner.programs.step[BASE.bucket]
    with jax.transfer_guard("disallow"):
        runner._state, result, _ = program(runner._weights, runner._take_state(), wire)
        result.block_until_ready()
    assert result.shape[0] == BASE.num_rows + NUM_EXTRA_LOGIT_ROWS


def test_the_guard_sees_kv_that_comes_from_the_host(lab: Lab):
    runner = lab.runner()
    state = runner._take_state()
    (pool,) = state.pools.kv
    host_pools = state.pools.with_kv(0, pool._replace(keys=np.asarray(pool.keys)))
    host_state = state._replace(pools=host_pools)
    wire = jax.device_put(build_inputs([], GEOMETRY).words)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match=r"[Dd]isallowed"):
        runner.programs.step[BASE.bucket](runner._weights, host_state, wire)
