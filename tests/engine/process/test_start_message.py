"""Every option makes the trip to the engine process unchanged."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import given
from hypothesis import strategies as st

from cadenza.config import (
    MAX_GUARD_S,
    MAX_HEADROOM_GB,
    MAX_IMAGE_MAX_TOKENS,
    MAX_MAX_ITL_MS,
    MAX_MODEL_LEN_BOUND,
    MAX_NUM_QUEUED_TOKENS_BOUND,
    MAX_NUM_SEQS_BOUND,
    MAX_SEED,
    MIN_DISK_BYTES,
    MIN_GUARD_S,
    MIN_IMAGE_MAX_TOKENS,
    MIN_MAX_ITL_MS,
    MIN_UTILIZATION,
    EngineConfig,
)
from cadenza.engine.process.messages import Start, decode_to_engine, encode
from cadenza.sparse_prefill import LEAST_KEEP, MAX_THRESHOLD, MOST_KEEP, SpecPrefillConfig, When
from cadenza.speculative_config import (
    MAX_LOOKUP_TOKENS,
    MAX_SPECULATIVE_TOKENS,
    DraftQuantization,
    SpeculativeConfig,
    SpeculativeMethod,
)


class Text(str):
    """As a library's own strings may be."""

    __slots__ = ()


NAMES = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


def whole(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


def choice_of(literal: Any) -> st.SearchStrategy[str]:
    values = get_args(literal)
    return st.sampled_from([*values, *map(Text, values)])


@st.composite
def speculative_configs(draw: st.DrawFn) -> SpeculativeConfig:
    """Of each method, with all that it takes."""
    method: Any = draw(choice_of(SpeculativeMethod))
    quantizations = {
        "draft_model": get_args(DraftQuantization),
        "quantised": ("int8", "int4"),
    }.get(method, ("none",))
    quantization: Any = draw(
        st.none() | st.sampled_from([*quantizations, *map(Text, quantizations)])
    )
    longest = draw(whole(1, MAX_LOOKUP_TOKENS))
    return SpeculativeConfig(
        method=method,
        num_speculative_tokens=draw(whole(1, MAX_SPECULATIVE_TOKENS)),
        model=draw(st.none() | NAMES | NAMES.map(Text)) if method == "draft_model" else None,
        quantization=quantization,
        prompt_lookup_max=longest,
        prompt_lookup_min=draw(whole(1, longest)),
    )


def spec_prefill_configs() -> st.SearchStrategy[SpecPrefillConfig]:
    return st.builds(
        SpecPrefillConfig,
        model=st.none() | NAMES | NAMES.map(Text),
        quantization=choice_of(DraftQuantization),
        keep=st.floats(LEAST_KEEP, MOST_KEEP) | st.just(1),
        threshold=whole(0, MAX_THRESHOLD),
        head=whole(0, MAX_THRESHOLD),
        when=choice_of(When),
        allow_request=st.booleans(),
        force=st.booleans(),
    )


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "backend": NAMES | NAMES.map(Text),
    "device": st.sampled_from(["auto", "cpu", "cuda:3", "tpu", Text("metal")]),
    "revision": st.none() | NAMES | NAMES.map(Text),
    "weight_cache_bytes": st.none() | whole(0, 1 << 60),
    "max_model_len": st.none() | whole(1, MAX_MODEL_LEN_BOUND),
    "max_num_seqs": st.none() | whole(1, MAX_NUM_SEQS_BOUND),
    "max_num_batched_tokens": st.none() | whole(1, MAX_MODEL_LEN_BOUND),
    "kv_cache_memory_bytes": st.none() | whole(1, 1 << 60),
    "num_pages": st.none() | whole(1, 1 << 31),
    "tensor_parallel_size": st.none(),  # is for one choice of `ops`
    "gpu_memory_utilization": st.none() | st.floats(MIN_UTILIZATION, 1.0) | st.just(1),
    "scheduler_headroom_gb": st.floats(0.0, MAX_HEADROOM_GB) | whole(0, 9),
    "page_size": whole(1, (1 << 16) // 16).map(lambda units: 16 * units),
    "enable_prefix_caching": st.booleans(),
    "prefix_cache_memory_share": st.floats(0.0, 1.0) | whole(0, 1),
    "prefix_cache_disk": st.none() | NAMES | NAMES.map(Text),
    "images": st.booleans(),
    "mmproj": st.none() | NAMES | NAMES.map(Text),
    "image_cache_bytes": whole(1, 1 << 60),
    "image_max_tokens": whole(MIN_IMAGE_MAX_TOKENS, MAX_IMAGE_MAX_TOKENS),
    "prefix_cache_disk_bytes": st.none() | whole(MIN_DISK_BYTES, 1 << 60),
    "max_state_snapshots": st.none() | whole(0, 1 << 24),
    "state_snapshot_interval": whole(16, MAX_MODEL_LEN_BOUND),
    "max_num_queued_reqs": st.none() | whole(1, 1 << 31),
    "max_num_queued_tokens": st.none() | whole(1, MAX_NUM_QUEUED_TOKENS_BOUND),
    "max_consecutive_step_errors": whole(1, 1 << 31),
    "max_itl_ms": st.sampled_from(["auto", "none"])
    | st.floats(MIN_MAX_ITL_MS, MAX_MAX_ITL_MS)
    | whole(1, 1000),
    "starvation_guard": st.floats(MIN_GUARD_S, MAX_GUARD_S) | whole(1, 1000),
    "seed": whole(0, MAX_SEED),
    "chat_template": st.none() | TEXTS.filter(str.strip) | TEXTS.filter(str.strip).map(Text),
    "speculative_config": st.none() | st.just("none") | speculative_configs(),
    "spec_prefill": st.none() | st.just("none") | spec_prefill_configs(),
}


def options() -> st.SearchStrategy[dict[str, Any]]:
    """Some of all options, each within its bounds."""
    hints = get_type_hints(EngineConfig)
    known = {
        field.name: choice_of(hints[field.name])
        if get_origin(hints[field.name]) is Literal
        else VALUES[field.name]
        for field in fields(EngineConfig)
    }
    return st.fixed_dictionaries({}, optional=known)


@given(options())
def test_every_configuration_reaches_the_engine_process_as_it_is(given_options: Any) -> None:
    config = EngineConfig(**given_options)
    start = Start(model=None, config=config, log_level=20)
    received = decode_to_engine(encode(start)[4:])
    assert received == start
    assert repr(received) == repr(start), "an int is not a float"


@given(speculative_configs())
def test_every_way_to_draft_reaches_the_engine_process_as_it_is(drafts: Any) -> None:
    start = Start(model=None, config=EngineConfig(speculative_config=drafts), log_level=20)
    assert decode_to_engine(encode(start)[4:]) == start
