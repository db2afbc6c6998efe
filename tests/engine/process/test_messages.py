"""The wire: every message survives it, in pieces of any size, and nothing else is let in."""

import random
from dataclasses import fields
from typing import get_args

import msgspec
import pytest

from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.new_sequences import ResumedSample, Resumption
from cadenza.engine.process.messages import (
    Cancel,
    EngineOutputs,
    Failed,
    FrameBuffer,
    FromEngine,
    Loading,
    Ready,
    Resume,
    Start,
    Stop,
    Submit,
    ToEngine,
    WireError,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from cadenza.engine.request_check import RequestCheck
from cadenza.engine.stats import STEP_SECONDS_BOUNDS, EngineStats
from cadenza.engine.step_watch import RowSummary, StepSummary, Watch
from cadenza.events import (
    CacheMiss,
    Event,
    Finished,
    Preparing,
    PromptLogprobs,
    Started,
    Token,
    TokenLogprobs,
)
from cadenza.figures import Distribution
from cadenza.request import Attachment, Request, SamplingParams
from cadenza.sparse_prefill import PromptSpan, SparsePrefill, SpecPrefillChoice
from cadenza.structured import ConstraintSpec, StructuredOutput

PARAMS = SamplingParams(
    max_tokens=7,
    min_tokens=1,
    temperature=0.3,
    top_k=4,
    top_p=0.9,
    min_p=0.1,
    top_n_sigma=1.25,
    seed=(1 << 63) - 1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.5,
    logit_bias={5: -100.0, 3: 0.5},
    allowed_token_ids=(1, 2, 3),
    bad_words=("a", "b c"),
    n=3,
    ignore_eos=True,
    stop_token_ids=(9, 8),
    stop=("x", "y\u00fc\U0001f3bb"),
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    logprobs=2,
    prompt_logprobs=1,
    truncate_prompt_tokens=5,
    structured=StructuredOutput(choice=("a", "b")),
    speculative=3,
    spec_prefill=SpecPrefillChoice(keep=0.5, when="cold", spans=(PromptSpan(1, 4),)),
)
REQUEST = Request(
    prompt_token_ids=tuple(range(300)),
    params=PARAMS,
    bad_word_token_ids=((1, 2), (3,)),
    attachments=(Attachment(start=4, length=2, digest=b"\x00cat", payload=b"\xff\x00"),),
    cache_salt="salt",
    constraint=ConstraintSpec(grammar="a grammar"),
    prediction=(4, 5),
    sparse_prefill=SparsePrefill(keep=0.25, forced=(PromptSpan(0, 70),), kept=b"\x07"),
)
LOGPROBS = TokenLogprobs(logprob=float("-inf"), rank=3, top_ids=(1, 2), top_logprobs=(-0.1, -2.5))
TOKEN = Token(
    request_id=1 << 40,
    token_id=5,
    index=2,
    sample=1,
    logprobs=LOGPROBS,
    cache_miss=CacheMiss(shared_tokens=3, reason="differs"),
    is_draft=True,
    num_rejected_drafts=2,
)
PROMPT_LOGPROBS = PromptLogprobs(request_id=3, start=1, entries=(LOGPROBS, LOGPROBS))
FINISHED = Finished(
    request_id=1,
    finish_reason="error",
    stop_token_id=None,
    num_prompt_tokens=1,
    num_generated_tokens=2,
    num_cached_tokens=3,
    sample=2,
    error="why",
    error_kind="step_failed",
)
STARTED = Started(request_id=5)
PREPARING = Preparing(request_id=6)
RESUMPTION = Resumption(
    samples=(
        ResumedSample(sample=0, token_ids=(5, 6), num_cached_tokens=16),
        ResumedSample(sample=2),
    ),
    num_prompt_logprobs=299,
)
STATS = EngineStats(
    numbers={"num_requests_running": 1, "queued_seconds": 0.5},
    by_label={"pages": {"live": 3, "cached": 4, "free": 5}, "drafts_on": {"ngram,5-8": 0}},
    histograms={
        "step_seconds": Distribution.empty(STEP_SECONDS_BOUNDS),
        "iteration_tokens_total": Distribution(bounds=(1.0,), counts=(2, 3), total=4.5),
    },
)
CHECK = RequestCheck(
    limits=EngineLimits(
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=64,
        page_size=16,
        num_pages=8,
        max_num_queued_reqs=3,
    ),
    vocab_size=97,
    backend="fake",
    capabilities=frozenset({"logprobs"}),
)
OUTPUTS = EngineOutputs(
    num_steps=1,
    is_idle=False,
    predicted_s=0.5,
    events=(STARTED, PREPARING, PROMPT_LOGPROBS, TOKEN, FINISHED, TOKEN),
    stats=STATS,
    summary=StepSummary(
        num_steps=3,
        seconds=0.1,
        longest_s=0.05,
        num_tokens=40,
        num_sampled=2,
        num_running=1,
        num_waiting=0,
        pages_live=3,
        pages_cached=4,
        pages_free=5,
        tenants=("", "a"),
        rows=(RowSummary(1, 1, "prompt", 32, 50, 16, 0, 0, 1),),
    ),
)
TO_ENGINE: list[ToEngine] = [
    Start(model="a folder", config=EngineConfig(num_pages=5), log_level=20),
    Submit(1 << 62, REQUEST),
    Resume(7, REQUEST, RESUMPTION),
    Cancel(3, None),
    Cancel(3, 1),
    Watch(7),
    Watch(None),
    Stop(),
]
FROM_ENGINE: list[FromEngine] = [
    Loading("load"),
    Ready(
        request_check=CHECK,
        identity="a",
        startup_s={"load": 0.5},
        stats=STATS,
    ),
    Failed("ConfigError", "no"),
    OUTPUTS,
    EngineOutputs(num_steps=1, is_idle=True, predicted_s=0.0),
]


def payloads(data: bytes) -> list[bytes]:
    return list(FrameBuffer().feed(data))


def test_every_message_survives_the_wire():
    assert {type(each) for each in TO_ENGINE} == set(get_args(ToEngine))
    assert {type(each) for each in FROM_ENGINE} == set(get_args(FromEngine))
    sent = payloads(b"".join(map(encode, TO_ENGINE)))
    assert list(map(decode_to_engine, sent)) == TO_ENGINE
    sent = payloads(b"".join(map(encode, FROM_ENGINE)))
    assert list(map(decode_from_engine, sent)) == FROM_ENGINE


def test_every_option_of_a_request_was_sent_with_another_value_than_its_default():
    default = SamplingParams()
    same = [
        each.name
        for each in fields(SamplingParams)
        if getattr(PARAMS, each.name) == getattr(default, each.name)
    ]
    assert not same


def test_every_kind_of_event_has_its_place_in_a_report():
    assert {type(event) for event in OUTPUTS.events} == {*get_args(Event), Preparing}


def test_frames_survive_pieces_of_any_size():
    sent = b"".join(encode(each) for _ in range(5) for each in FROM_ENGINE)
    for seed in range(20):
        rng, buffer, data = random.Random(seed), FrameBuffer(), sent
        found: list[FromEngine] = []
        while data:
            size = rng.choice([1, 2, 3, 4, 5, 100, 4000])
            found += map(decode_from_engine, buffer.feed(data[:size]))
            data = data[size:]
        assert found == FROM_ENGINE * 5


def test_a_length_above_the_cap_is_refused_before_its_bytes_come():
    with pytest.raises(WireError, match="4294967295 bytes"):
        list(FrameBuffer().feed(b"\xff\xff\xff\xff"))
    assert list(FrameBuffer(max_bytes=2).feed(b"\x02\0\0\0ab")) == [b"ab"]
    with pytest.raises(WireError):
        list(FrameBuffer(max_bytes=1).feed(b"\x02\0\0\0ab"))


NO_MESSAGES: list[object] = [
    {"type": "Unknown"},
    {"type": "Submit", "request_id": "1"},
    {"type": "Submit", "request_id": 1, "request": {"prompt_token_ids": [1, "a"]}},
]


def test_what_is_no_message_is_a_wire_error():
    for payload in (b"", b"\xc1", *map(msgspec.msgpack.encode, NO_MESSAGES)):
        for decode in (decode_to_engine, decode_from_engine):
            with pytest.raises(WireError):
                decode(payload)


def test_a_request_out_of_bounds_is_no_message():
    payload = encode(Submit(1, REQUEST))[4:]
    value = msgspec.msgpack.decode(payload)
    value["request"]["params"]["temperature"] = -1.0
    with pytest.raises(WireError):
        decode_to_engine(msgspec.msgpack.encode(value))
