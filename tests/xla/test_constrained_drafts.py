"""Streams with grammars, on the XLA runner: drafts, and masks that follow the launch of a step,
give the same tokens and log probabilities."""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from cadenza.backends.xla.runner import XlaLateStepHandle
from cadenza.batch.step_schema import MaskUpdate
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import SchedulerLoop
from cadenza.engine.core import CoreOptions
from cadenza.request import Request, SamplingParams
from cadenza.speculative_config import SpeculativeConfig
from cadenza.structured import CallRule, ConstraintSpec, StructuredOutput, ThinkingBound
from cadenza.text.constraints.token_constraint import ConstraintCompiler
from cadenza.text.schemas.grammar import grammar_of
from cadenza.text.tokens.tokenizer import Tokenizer
from tests.xla.warm_runners import Played, WarmRunners, warm_runners

VOCAB_SIZE = 2560
COPY = SpeculativeConfig(method="quantised", num_speculative_tokens=4)
LOOKUP = SpeculativeConfig(method="ngram", prompt_lookup_min=1, num_speculative_tokens=4)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
EXAMPLE = '{"name": "Anna", "age": 31, "colours": ["red", "green", "red"]}'
# Every vowel begins a call, so that streams go in and out of them.
CALLS = CallRule(
    begin="[aeiou]", grammar=grammar_of(StructuredOutput(regex="[a-z]{1,6} ?(red|blue)[.,]"))
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    source = open_checkpoint(None).tokenizer_source
    assert source is not None
    return Tokenizer(source)


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    source = open_checkpoint(None).tokenizer_source
    assert source is not None
    made = ConstraintCompiler(source, vocab_size=VOCAB_SIZE, eos_token_ids=[0])
    yield made
    made.close()


def requests_of(tokenizer: Tokenizer) -> list[Request]:
    person = grammar_of(StructuredOutput(json=PERSON))
    end = tokenizer.encode("x")[-1]
    cases: list[tuple[ConstraintSpec | None, dict[str, Any]]] = [
        (ConstraintSpec(grammar=person), {"temperature": 0.0}),
        (ConstraintSpec(grammar=person), {"temperature": 1.0, "n": 2, "repetition_penalty": 1.2}),
        (ConstraintSpec(grammar=person), {"temperature": 0.8, "frequency_penalty": 0.4}),
        (None, {"temperature": 0.0}),
        (
            ConstraintSpec(grammar=grammar_of(StructuredOutput(regex="[a-z ]{20,30}x?"))),
            {"temperature": 1.0, "min_tokens": 8, "stop_token_ids": (end,)},
        ),
        (
            ConstraintSpec(grammar=grammar_of(StructuredOutput(choice=["red red red", "blue"]))),
            {"temperature": 1.0, "logit_bias": {end: -5.0}},
        ),
        (
            ConstraintSpec(grammar=None, thinking=ThinkingBound(begin=None, end=end, max_tokens=9)),
            {"temperature": 0.7, "presence_penalty": 0.5},
        ),
        (None, {"temperature": 1.0, "n": 2, "repetition_penalty": 1.3}),
        (ConstraintSpec(calls=CALLS), {"temperature": 0.0}),
        (
            ConstraintSpec(calls=CALLS, thinking=ThinkingBound(begin=None, end=end, max_tokens=9)),
            {"temperature": 1.0, "n": 2},
        ),
    ]
    prompt = tuple(tokenizer.encode(f"Write it again: {EXAMPLE} {EXAMPLE} red red red\n"))
    return [
        Request(
            prompt_token_ids=(*prompt, *tokenizer.encode(str(place))),
            params=SamplingParams(
                **{"max_tokens": 40, "seed": place, "logprobs": 2, "ignore_eos": True, **options}
            ),
            constraint=spec,
            prediction=tuple(tokenizer.encode(EXAMPLE)) if place == 2 else (),
        )
        for place, (spec, options) in enumerate(cases)
    ]


def play(
    runners: WarmRunners,
    compiler: ConstraintCompiler,
    requests: list[Request],
    *,
    loop: SchedulerLoop = "overlap",
    **limits: Any,
) -> Played:
    """Without a `speculation` of the runners there are no drafts at all."""
    if runners.speculation is None:
        requests = [
            replace(each, prediction=(), params=replace(each.params, speculative=False))
            for each in requests
        ]
    options = CoreOptions(compile_constraint=compiler.compile, loop=loop)
    return runners.play(requests, options, **limits)


def warm(
    speculation: SpeculativeConfig | None, **options: Any
) -> AbstractContextManager[WarmRunners]:
    sizes = {"max_num_seqs": 4, "max_model_len": 192, "max_num_batched_tokens": 32, **options}
    return warm_runners(None, speculation, **sizes)


POOLS: dict[str, dict[str, Any]] = {
    "ample": {},
    "too small": {"num_pages": 14, "enable_prefix_caching": False},
}


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"ops": "reference"}, marks=pytest.mark.soak)],
    ids=["native", "reference ops"],
)
def test_drafts_of_constrained_streams_change_no_bit(
    compiler: ConstraintCompiler, tokenizer: Tokenizer, options: dict[str, object]
) -> None:
    requests = requests_of(tokenizer)
    with warm(None, **options) as runners:
        plain = {name: play(runners, compiler, requests, **pool) for name, pool in POOLS.items()}
    for name, played in plain.items():
        assert played.counts.num_drafts == 0
        assert all(stream[-1][1] is None for stream in played.streams.values())
        assert (played.num_preemptions > 0) == (name == "too small")
        ids = [
            entry[0]
            for (request, _), told in played.streams.items()
            if request >= 8
            for entry in told[:-1]
        ]
        assert re.search("red[.,]|blue[.,]", tokenizer.decode(ids)), "some calls have ended"
    for speculation in (LOOKUP, COPY):
        with warm(speculation, **options) as runners:
            for name, pool in POOLS.items():
                drafted = play(runners, compiler, requests, **pool)
                assert drafted.streams == plain[name].streams
                constrained = [
                    at for at, each in enumerate(requests) if each.constraint is not None
                ]
                assert sum(drafted.accepted[at] for at in constrained) > 30


@pytest.mark.native
@pytest.mark.parametrize(
    ("options", "pool"),
    [
        ({}, "ample"),
        ({"dtype": "float32"}, "too small"),
        pytest.param(
            {"quantization": "int4", "kv_cache_dtype": "int8"}, "ample", marks=pytest.mark.soak
        ),
    ],
    ids=["bf16", "preemption", "codes"],
)
def test_masks_that_follow_a_launch_change_no_bit(
    compiler: ConstraintCompiler,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, object],
    pool: str,
) -> None:
    num_masks: list[int] = []
    finish = XlaLateStepHandle.choose

    def choose(handle: XlaLateStepHandle, masks: Sequence[MaskUpdate]) -> None:
        num_masks.append(len(masks))
        finish(handle, masks)

    monkeypatch.setattr(XlaLateStepHandle, "choose", choose)
    requests = requests_of(tokenizer)
    with warm(None, **options) as runners:
        plain = play(runners, compiler, requests, loop="plain", **POOLS[pool])
        assert not any(num_masks), "the plain loop reads each step before the next"
        overlapped = play(runners, compiler, requests, loop="overlap", **POOLS[pool])
    assert sum(map(bool, num_masks)) > 30
    assert overlapped.streams == plain.streams
    assert (overlapped.num_preemptions > 0) == (pool == "too small")
