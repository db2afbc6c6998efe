"""The recording of streams that changes of structure are held against."""

from dataclasses import fields

from cadenza.request import SamplingParams
from tools.record_bits import all_cases, compare, make_requests

# What changes no token: text front ends do with it, or it chooses how tokens are computed.
TEXT_OPTIONS = {
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spec_prefill",
    "speculative",
    "stop",
    "structured",
    "truncate_prompt_tokens",
}


def test_the_requests_of_a_recording_vary_every_option_that_reaches_the_engine() -> None:
    requests = make_requests(vocab_size=97, context=80)
    values = {
        field.name: {repr(getattr(request.params, field.name)) for request in requests}
        for field in fields(SamplingParams)
    }
    constant = {name for name, found in values.items() if len(found) == 1}
    assert constant == TEXT_OPTIONS
    assert len({request.bad_word_token_ids for request in requests}) > 1


def test_a_recording_covers_both_op_tables_for_every_family() -> None:
    tables = {(case.ops, case.dtype) for case in all_cases()}
    assert tables == {("native", "float32"), ("native", "bfloat16"), ("reference", "float32")}
    assert len({case.shape for case in all_cases()}) * len(tables) == len(list(all_cases()))


def test_a_stream_that_changed_is_named() -> None:
    before = {"tiny native": {"cold/0/0": "a", "cold/1/0": "b"}}
    after = {"tiny native": {"cold/0/0": "a", "cold/1/0": "c"}}
    assert compare(before, before) == []
    assert compare(before, after) == ["tiny native: cold/1/0"]


def test_a_stream_that_is_missing_or_new_is_named() -> None:
    before = {"tiny native": {"cold/0/0": "a"}}
    after = {"other native": {"cold/0/0": "a"}}
    assert compare(before, after) == ["other native: cold/0/0", "tiny native: cold/0/0"]
