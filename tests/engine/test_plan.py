"""`make_plan`: options, a checkpoint and the memory become numbers, or an error with both."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.backends.base import BackendTraits, ModelMemory
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import MAX_NUM_SEQS_BOUND, EngineConfig
from cadenza.errors import ConfigError
from cadenza.loading.engine_plan import (
    EnginePlan,
    ExtraMemory,
    pages_at_once,
    pages_for_batch,
    with_pool,
)
from cadenza.loading.plan import make_plan
from cadenza.loading.planned_engine import PlannedEngine
from cadenza.loading.space import ADVISED_SHARE, EXPECTED_TOKENS
from cadenza.request import Request, SamplingParams
from tests.faces.stub_backend import STUBS

TRAITS = BackendTraits(
    name="test:cpu",
    ops="native",
    exactness="bitwise",
    dtypes=("float32", "bfloat16"),
    dtype_for={"bfloat16": "bfloat16", "float32": "float32"},
    max_num_batched_tokens=48,
    device_memory_bytes=None,
    quantizations=("none", "int8"),
    kv_cache_dtypes=("auto", "int8"),
)
GIB = 1 << 30


def plan(available_bytes: int = 4 * GIB, **options: Any) -> EnginePlan:
    config = EngineConfig(**options)
    return make_plan(config, open_checkpoint(None), TRAITS, available_bytes)


@pytest.mark.parametrize(("rows", "budget"), [(16, 48), (48, 48), (49, 49), (300, 300)])
def test_an_unset_token_budget_is_the_backends_and_never_below_the_rows(rows: int, budget: int):
    assert plan(max_num_seqs=rows).limits.max_num_batched_tokens == budget


def asked(num_prompt_tokens: int, max_tokens: int | None, n: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return Request(prompt_token_ids=(1,) * num_prompt_tokens, params=params)


@pytest.mark.parametrize(
    ("requests", "num_pages"),
    [
        ([], 0),
        ([asked(10, 6)], 1),
        ([asked(10, 7)], 2),
        ([asked(10, 6), asked(100, 100)], 1 + 13),
        ([asked(10, 6, n=3)], 3),
        ([asked(10, 6)] * 9 + [asked(17, 0)] * 9, 4 * 2),
        ([asked(10, None)], 64 // 16),
        ([asked(10, 1 << 20)], 64 // 16),
    ],
)
def test_the_pages_at_once_are_those_of_the_longest_samples_that_have_rows(
    requests: list[Request], num_pages: int
):
    context = 64 if any(each.params.max_tokens in (None, 1 << 20) for each in requests) else None
    limits = plan(max_num_seqs=4, max_model_len=context).limits
    assert pages_at_once(requests, limits) == num_pages


@pytest.mark.parametrize(
    ("num_pages", "page_size", "rounded"),
    [(1, 16, 64), (64, 16, 64), (65, 16, 128), (128, 16, 128), (300, 16, 512), (1, 32, 32)],
)
def test_the_pool_of_a_batch_has_one_of_few_sizes(num_pages: int, page_size: int, rounded: int):
    limits = plan(max_num_seqs=num_pages, page_size=page_size).limits
    assert pages_for_batch([asked(page_size, 0)] * num_pages, limits) == rounded


def test_a_smaller_pool_leaves_every_other_limit_as_it_was():
    whole = plan(max_num_seqs=8)
    small = with_pool(whole, EngineConfig(max_num_seqs=8), 64)
    assert small.limits.num_pages == 64 < whole.limits.num_pages
    assert small.kv_bytes == whole.kv_bytes_per_token * 64 * small.limits.page_size
    assert small == replace(whole, limits=replace(whole.limits, num_pages=64))


@pytest.mark.parametrize("size", [{"num_pages": 300}, {"kv_cache_memory_bytes": 8 << 20}])
def test_a_pool_that_the_user_sized_is_never_changed(size: dict[str, int]):
    chosen = plan(**size)
    assert with_pool(chosen, EngineConfig(**size), 64) == chosen


def test_a_pool_is_never_raised_above_what_fits_the_memory():
    whole = plan()
    assert with_pool(whole, EngineConfig(), 1 << 20) == whole


@pytest.mark.parametrize("changed", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}])
def test_streams_go_on_only_with_the_same_types_of_weights_and_kv(changed: dict[str, Any]):
    same, also_same, other = (
        PlannedEngine(
            checkpoint=open_checkpoint(None),
            plan=plan(num_pages=8, **options),
            config=EngineConfig(**options),
            backends=STUBS,
        )
        .identity()
        .digest("streams")
        for options in ({}, {}, changed)
    )
    assert same == also_same
    assert same != other


def test_weights_that_fit_only_quantised_are_refused_with_how():
    needed = plan().weight_bytes
    wide = make_plan(EngineConfig(dtype="float32"), open_checkpoint(None), TRAITS, GIB)
    assert wide.weight_bytes == 2 * needed
    small = EngineConfig(dtype="float32", max_num_seqs=1, max_model_len=16)
    for available in range(60 << 20, 100 << 20, 1 << 20):
        try:
            make_plan(small, open_checkpoint(None), TRAITS, available)
        except ConfigError as error:
            if "set --quantization int8" in str(error):
                assert make_plan(
                    replace(small, quantization="int8"), open_checkpoint(None), TRAITS, available
                )
                return
    pytest.fail("nothing was said of quantising")


SIZES = st.fixed_dictionaries(
    {},
    optional={
        "max_num_seqs": st.none() | st.integers(1, 4096),
        "max_num_batched_tokens": st.integers(1, 1 << 16),
        "max_model_len": st.integers(1, 4096),
        "page_size": st.sampled_from([16, 32, 128]),
        "kv_layout": st.sampled_from(["paged", "dense"]),
        "num_pages": st.integers(1, 1 << 14),
        "kv_cache_memory_bytes": st.integers(1, 1 << 32),
        "scheduler_headroom_gb": st.floats(0.0, 4.0),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "kv_cache_dtype": st.sampled_from(["auto", "int8"]),
    },
)
NUM_ADVICE = 12
"""More than the flags that can be too large."""


def advised(error: ConfigError, *, takes_last: bool) -> tuple[str, Any] | None:
    """A flag that a message names, and its value; None if it asks for memory."""
    _, is_set, advice = str(error).partition("; set ")
    if not is_set:
        return None
    found = re.findall(r"--([a-z-]+) ([^ ,]+)", advice)
    flag, value = found[-1 if takes_last else 0]
    name = flag.replace("-", "_")
    if name == "quantization":
        return name, value
    return name, float(value) if name == "scheduler_headroom_gb" else int(value)


def outcome(available: int, options: dict[str, Any]) -> EnginePlan | ConfigError:
    try:
        return plan(available, **options)
    except ConfigError as error:
        return error


@settings(deadline=None)
@given(
    options=SIZES,
    available=st.integers(20, 33).flatmap(lambda n: st.integers(1 << n, 2 << n)),
    takes_last=st.booleans(),
)
def test_a_plan_fits_or_says_what_to_set_and_that_fits(
    options: dict[str, Any], available: int, takes_last: bool
):
    for _ in range(NUM_ADVICE):
        planned = outcome(available, options)
        if isinstance(planned, EnginePlan):
            assert planned.planned_bytes + planned.headroom_bytes <= available
            return
        advice = advised(planned, takes_last=takes_last)
        if advice is None:
            missing = re.search(r"; free ([\d.,]+) (bytes|MiB)", str(planned))
            assert missing is not None, planned
            unit = {"bytes": 1, "MiB": 1 << 20}[missing[2]]
            available += ceil(float(missing[1].replace(",", "")) * unit)
        else:
            name, value = advice
            assert options.get(name) != value, planned
            options = {**options, name: value}
    pytest.fail(f"what the messages said did not help: {options}")


ELSEWHERE = {
    *("backend", "device", "ops", "revision", "scheduler", "seed", "generation_config"),
    *("max_itl_ms", "batching", "scheduling_policy", "starvation_guard", "admission"),
    *("arithmetic", "speculative_config", "spec_prefill", "chat_template"),
    *("prefix_cache_disk", "prefix_cache_disk_bytes", "gpu_memory_utilization"),
    *("weight_cache_bytes", "max_state_snapshots", "tensor_parallel_size"),
    *("images", "mmproj", "image_cache_bytes", "image_max_tokens"),
}
"""Options that the plan has no number of; `tests/faces` has them."""

PLANNED: dict[str, Any] = {
    "dtype": "float32",
    "quantization": "int8",
    "kv_cache_dtype": "int8",
    "max_model_len": 64,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 40,
    "kv_cache_memory_bytes": 8 << 20,
    "num_pages": 200,
    "scheduler_headroom_gb": 0.25,
    "kv_layout": "dense",
    "page_size": 32,
    "enable_prefix_caching": False,
    "prefix_cache_memory_share": 0.5,
    "state_snapshot_interval": 64,
    "max_num_queued_reqs": 5,
    "max_num_queued_tokens": 500,
    "max_consecutive_step_errors": 2,
}


def test_every_option_is_one_of_the_plan_or_one_of_the_engines():
    assert set(PLANNED) | ELSEWHERE == {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize("name", PLANNED)
def test_an_option_reaches_the_plan(name: str):
    planned = plan(**{name: PLANNED[name]})
    assert planned != plan()
    kept = getattr(planned.limits, name, getattr(planned, name, PLANNED[name]))
    assert kept == PLANNED[name]


def test_auto_takes_as_many_rows_as_the_pool_has_room_for_at_the_expected_length():
    found = plan(GIB // 6, max_num_seqs=None)
    rows, limits = found.limits.max_num_seqs, found.limits
    assert 1 < rows < TRAITS.max_num_batched_tokens
    assert limits.num_pages * limits.page_size >= rows * EXPECTED_TOKENS
    more = plan(GIB // 6, max_num_seqs=rows + 1).limits
    assert more.num_pages * more.page_size < (rows + 1) * EXPECTED_TOKENS
    reason = f"the KV pool has room for so many requests of {EXPECTED_TOKENS} tokens"
    assert found.rows_reason == reason
    assert f"{rows} rows (auto: {reason}), context of" in found.summary
    assert plan(max_num_seqs=4).rows_reason is None


@pytest.mark.parametrize(("budget", "rows"), [(None, 48), (20, 20)])
def test_auto_takes_no_more_rows_than_a_step_has_tokens(budget: int | None, rows: int):
    found = plan(max_num_seqs=None, max_num_batched_tokens=budget)
    assert found.limits.max_num_seqs == rows
    assert found.rows_reason == f"a step has {rows} tokens"


def test_auto_follows_a_pool_that_was_asked_for_and_a_shorter_context():
    assert plan(max_num_seqs=None, num_pages=5 * 1024 // 16).limits.max_num_seqs == 5
    assert plan(max_num_seqs=None, num_pages=1).limits.max_num_seqs == 1
    short = plan(max_num_seqs=None, num_pages=5 * 1024 // 16, max_model_len=256)
    assert short.limits.max_num_seqs == 20


def test_auto_has_a_block_of_the_whole_context_for_each_dense_row():
    found = plan(max_num_seqs=None, kv_layout="dense", num_pages=7 * 2048 // 16)
    assert (found.limits.max_num_seqs, found.limits.max_model_len) == (7, 2048)


@pytest.mark.parametrize("rows", [10_000, MAX_NUM_SEQS_BOUND])
def test_ten_thousand_rows_are_planned(rows: int):
    assert plan(8 * GIB, max_num_seqs=rows).limits.max_num_seqs == rows


def test_auto_without_room_for_one_request_of_the_expected_length_says_so():
    found = plan(max_num_seqs=None, num_pages=2, max_model_len=33)
    assert found.rows_reason == "the KV pool has no room for a request of 33 tokens"


def long_plan(available_bytes: int, **options: Any) -> EnginePlan:
    """Of a model with many positions, on a backend that gathers keys and values of whole contexts
    for two layers."""
    checkpoint = open_checkpoint(None)
    model = replace(checkpoint.config, max_position_embeddings=1 << 17)
    outline = replace(checkpoint.outline, max_position_embeddings=1 << 17)
    long = replace(checkpoint, outline=outline, known=(model, checkpoint.weights))
    gathering = replace(TRAITS, gathered_layers=2)
    return make_plan(EngineConfig(**options), long, gathering, available_bytes)


def test_a_context_that_was_not_asked_for_is_the_longest_that_can_be_asked_for():
    available = 256 << 20
    limits = long_plan(available, max_num_seqs=1).limits
    assert 4096 < limits.max_model_len < 1 << 17
    longest = limits.max_model_len
    assert long_plan(available, max_num_seqs=1, max_model_len=longest)
    with pytest.raises(ConfigError, match="set --max-model-len"):
        long_plan(available, max_num_seqs=1, max_model_len=longest + 2 * limits.page_size)


def test_rows_and_context_that_were_not_asked_for_fit_together():
    for available in range(100 << 20, 400 << 20, 60 << 20):
        found = long_plan(available, max_num_seqs=None)
        rows, limits = found.limits.max_num_seqs, found.limits
        assert found.planned_bytes <= available
        num_tokens = limits.num_pages * limits.page_size
        assert num_tokens >= max(limits.max_model_len, rows * EXPECTED_TOKENS)


OWN = replace(
    TRAITS,
    device_memory_bytes=1 << 20,
    kv_layouts=("dense",),
    default_max_model_len=96,
    memory={
        "bfloat16": ModelMemory(
            weight_bytes=10_000, kv_bytes_per_token=100, row_bytes=2_000, scratch_bytes=5_000
        )
    },
)


def own_plan(available_bytes: int, **options: Any) -> EnginePlan:
    config = EngineConfig(max_num_seqs=4, **options)
    return make_plan(config, open_checkpoint(None), OWN, available_bytes)


def test_the_memory_that_a_backend_states_is_planned_with():
    planned = own_plan(10_000 + 4 * 2_000 + 5_000 + 4 * 48 * 100 * 2)
    assert (planned.weight_bytes, planned.kv_bytes_per_token) == (10_000, 100)
    assert (planned.limits.max_model_len, planned.limits.num_pages) == (48, 4)
    with pytest.raises(
        ConfigError, match=r"4 rows need 8000 bytes .* leave 8000 bytes; set .*-seqs 1$"
    ):
        own_plan(10_000 + 13_000)


def test_a_backends_arrangement_and_context_are_the_defaults():
    planned = own_plan(1 << 20)
    assert planned.kv_layout == "dense"
    assert planned.limits.max_model_len == 96
    assert own_plan(1 << 20, max_model_len=112).limits.max_model_len == 112
    assert plan().kv_layout == "paged"
    with pytest.raises(ConfigError, match=r"--kv-layout paged is not one of auto, dense on test"):
        own_plan(1 << 20, kv_layout="paged")


def test_prefixes_are_shared_between_slots_only_where_the_backend_says_how():
    shared = make_plan(
        EngineConfig(max_num_seqs=4),
        open_checkpoint(None),
        replace(OWN, slot_unit=64),
        1 << 20,
    )
    assert (shared.limits.enable_prefix_caching, shared.limits.slot_unit) == (True, 64)
    for other in (own_plan(1 << 20), plan(kv_layout="dense")):
        assert not other.limits.enable_prefix_caching
    assert (plan().limits.enable_prefix_caching, plan().limits.slot_unit) == (True, None)


def test_bodies_that_are_read_are_planned_and_left_out_of_the_pool():
    def with_bodies(traits: BackendTraits, bodies_bytes: int) -> EnginePlan:
        beside = ExtraMemory(bodies_bytes=bodies_bytes)
        return make_plan(EngineConfig(max_num_seqs=64), open_checkpoint(None), traits, GIB, beside)

    without, beside = with_bodies(TRAITS, 0), with_bodies(TRAITS, GIB // 2)
    assert beside.footprint.bodies_bytes == GIB // 2
    assert beside.planned_bytes <= GIB
    assert beside.kv_bytes < without.kv_bytes
    own = replace(TRAITS, device_memory_bytes=GIB)
    assert with_bodies(own, GIB // 2).planned_bytes == with_bodies(own, 0).planned_bytes


def recurrent_plan(available_bytes: int, **options: Any) -> EnginePlan:
    memory = ModelMemory(
        weight_bytes=10_000,
        kv_bytes_per_token=100,
        row_bytes=2_000,
        scratch_bytes=5_000,
        state_bytes=1_000_000,
    )
    traits = replace(
        OWN, kv_layouts=("paged", "dense"), memory={"bfloat16": memory, "float32": memory}
    )
    config = EngineConfig(max_num_seqs=4, **options)
    return make_plan(config, open_checkpoint(None), traits, available_bytes)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 2 * 4 + 16),
        ({"max_state_snapshots": 0}, 8),
        ({"max_state_snapshots": 3}, 11),
        ({"max_state_snapshots": 50}, 58),
        ({"enable_prefix_caching": False}, 8),
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}, 24 + 12),
    ],
)
def test_the_number_of_snapshots_can_be_chosen(options: dict[str, Any], expected: int):
    assert recurrent_plan(GIB, **options).limits.num_state_slots == expected


def test_rows_with_two_slots_each_fit_where_no_snapshot_does():
    least = next(size for size in range(8_000_000, GIB, 20_000) if fits(size))
    found = recurrent_plan(least)
    assert found.limits.num_state_slots == 8
    assert found.planned_bytes <= least
    with pytest.raises(ConfigError, match="set --max-num-seqs 3"):
        recurrent_plan(least - 400_000)


def fits(available_bytes: int) -> bool:
    try:
        recurrent_plan(available_bytes)
    except ConfigError:
        return False
    return True


def test_blocks_for_each_row_have_states_and_share_nothing():
    found = recurrent_plan(GIB, kv_layout="dense").limits
    assert (found.num_state_slots, found.enable_prefix_caching) == (8, False)


def bare(traits: BackendTraits, **options: Any) -> EnginePlan:
    return make_plan(EngineConfig(**options), open_checkpoint(None), traits, 4 * GIB)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            lambda: plan(max_num_batched_tokens=17, max_num_seqs=18),
            r"tokens 17 is below --max-num-seqs 18",
        ),
        (
            lambda: bare(replace(TRAITS, quantizations=("none",)), quantization="int8"),
            "--quantization int8 is not one of none on test:cpu",
        ),
        (
            lambda: bare(replace(TRAITS, kv_cache_dtypes=("auto",)), kv_cache_dtype="int8"),
            "--kv-cache-dtype int8 is not one of auto on test:cpu",
        ),
        *[
            (
                lambda name=name: EngineConfig(kv_cache_dtype=name),
                f"'{name}' is not supported: .* less accurate than int8",
            )
            for name in ("fp8", "fp8_e4m3", "fp8_e5m2")
        ],
        *[
            (
                lambda value=value: EngineConfig(scheduler_headroom_gb=value),
                "--scheduler-headroom-gb",
            )
            for value in (-0.1, float("nan"), float("inf"), True, "1", None)
        ],
        (lambda: plan(plan().weight_bytes), r"weights need .* but .* are .*; free"),
        (
            lambda: make_plan(
                EngineConfig(max_num_seqs=64),
                open_checkpoint(None),
                TRAITS,
                GIB,
                ExtraMemory(bodies_bytes=GIB),
            ),
            "are available",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_by_its_flag(
    given: Callable[[], object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        given()


@pytest.mark.parametrize(
    ("make", "available", "option", "given", "step"),
    [
        (plan, plan().planned_bytes - plan().kv_bytes + (1 << 20), "num_pages", 1 << 16, 1),
        (plan, 4 * GIB, "max_num_batched_tokens", 1 << 24, 1),
        (long_plan, 128 << 20, "max_model_len", 1 << 17, 1 << 10),
        (plan, GIB, "scheduler_headroom_gb", 2, 0.002),
    ],
)
def test_what_does_not_fit_is_refused_with_the_most_that_does(
    make: Callable[..., EnginePlan], available: int, option: str, given: int, step: float
) -> None:
    """The number that the message names fits a little less memory, and hardly more does."""
    flag = f"--{option.replace('_', '-')}"
    with pytest.raises(ConfigError, match=rf"{flag} {given} .*; set {flag} ([\d.]+)$") as refused:
        make(available, max_num_seqs=1, **{option: given})
    (most,) = re.findall(rf"set {flag} ([\d.]+)$", str(refused.value))
    most = type(step)(most)
    assert make(available, max_num_seqs=1, **{option: most})
    with pytest.raises(ConfigError, match=flag):
        make(int(available * ADVISED_SHARE), max_num_seqs=1, **{option: most + step})
