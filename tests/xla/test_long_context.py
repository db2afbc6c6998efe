"""Native attention over rows of up to 2,100 tokens: more than four spans, more than 130 pages.

Rows of 600, 1,100 and 2,100 tokens are served together with short ones: bitwise what each is alone,
and in float32 what the independent reference computes. Alone, a decoding row is split over spans
where there is more than one thread; among eight rows it is not. One shape sees its whole context in
every layer, the other only a window of it in most.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cadenza.backends.xla.ops.native import NativeOps
from cadenza.request import Request, SamplingParams
from tests.by_day import by_day
from tests.xla.harness import Lab, Mode, Stream, Variant, serve, serve_alone

pytestmark = pytest.mark.native

LENGTHS = (600, 1100, 2100, 3, 17, 40, 9, 25)  # of the prompts; there are as many rows
NUM_OUTPUT_TOKENS = 40
FULL = Variant(ops=NativeOps, num_rows=len(LENGTHS), bucket=256, max_model_len=2144, num_pages=400)
VARIANTS = {
    "full": FULL,
    "full, bfloat16": replace(FULL, dtype="bfloat16"),
    "windows": replace(FULL, shape="tiny-gemma3"),
    "full, bfloat16, KV in int8": replace(FULL, dtype="bfloat16", kv_cache_dtype="int8"),
    "windows, KV in int8": replace(FULL, shape="tiny-gemma3", kv_cache_dtype="int8"),
}

MODES = {
    "at once": Mode(caching=False),
    "joining, in odd chunks": Mode(caching=False, budget=101, arrival_seed=4, loop="plain"),
    "preempted": Mode(caching=False, num_pages=252, reserved_output=0.0),
}
# Every mode, and every variant but windows over KV in int8, which each come beside another.
BY_DAY = {
    ("full", "at once"),
    ("full", "preempted"),
    ("full, bfloat16", "joining, in odd chunks"),
    ("windows", "at once"),
    ("full, bfloat16, KV in int8", "joining, in odd chunks"),
}

TOLERANCE = 1e-4


def request_of(length: int, variant: Variant, *, seed: int = 0) -> Request:
    rng = np.random.default_rng([length, seed])
    prompt = rng.integers(3, variant.config.vocab_size, length)
    params = SamplingParams(
        max_tokens=NUM_OUTPUT_TOKENS, temperature=1.0, seed=length, ignore_eos=True, logprobs=20
    )
    return Request(prompt_token_ids=tuple(prompt.tolist()), params=params)


def requests_of(variant: Variant) -> list[Request]:
    return [request_of(length, variant) for length in LENGTHS]


def check_alone(lab: Lab, variant: Variant, requests: list[Request], streams: list[Stream]) -> None:
    for request, stream in zip(requests, streams, strict=True):
        difference = stream.difference(serve_alone(lab, variant, request))
        assert difference is None, f"{len(request.prompt_token_ids)} tokens: {difference}"


@pytest.mark.parametrize("case", by_day(product(VARIANTS, MODES), BY_DAY), ids="-".join)
def test_long_rows_together_are_bitwise_those_alone(lab: Lab, case: tuple[str, str]):
    variant, mode = VARIANTS[case[0]], case[1]
    requests = requests_of(variant)
    served = serve(lab.runner(variant), variant, requests, MODES[mode])
    check_alone(lab, variant, requests, served.streams)
    assert bool(served.num_preemptions) == (mode == "preempted")


@pytest.mark.parametrize("name", by_day(VARIANTS, {"full", "windows"}))
def test_a_long_prefix_from_the_cache_changes_no_bit(lab: Lab, name: str):
    """Hits of up to 2,096 tokens, and of 1,600 with another end."""
    variant = VARIANTS[name]
    first = requests_of(variant)
    longest = first[2].prompt_token_ids
    branch = replace(first[2], prompt_token_ids=(*longest[:1600], *longest[:300]))
    requests = [*first, branch, *first[:3]]
    served = serve(lab.runner(variant), variant, requests, Mode(arrival_seed=8, budget=200))
    check_alone(lab, variant, requests, served.streams)
    cached = [stream.finished.num_cached_tokens for stream in served.streams if stream.finished]
    assert cached[8] == 1600
    assert cached[9:] == [592, 1088, 2096]


@pytest.mark.parametrize("name", by_day(["full", "windows"], {"full"}))
def test_long_rows_together_are_the_references(lab: Lab, name: str):
    variant = VARIANTS[name]
    requests = requests_of(variant)
    streams = serve(lab.runner(variant), variant, requests, MODES["at once"]).streams
    reference = lab.reference(variant)
    for request, stream in zip(requests, streams, strict=True):
        expected = reference.run(request)
        logprobs = [token.logprobs.logprob for token in stream.tokens if token.logprobs]
        assert stream.token_ids == expected.token_ids
        assert np.abs(np.array(logprobs) - np.array(expected.logprobs)).max() < TOLERANCE


@pytest.mark.parametrize("place", [5, 530, 1030, 1600])
def test_any_token_of_a_long_prompt_moves_the_log_probabilities(lab: Lab, place: int):
    """The negative control of the comparison with the reference: one token differs."""
    request = request_of(2100, FULL)
    prompt = list(request.prompt_token_ids)
    prompt[place] = prompt[place] % 200 + 5
    other = replace(request, prompt_token_ids=tuple(prompt))
    streams = (serve_alone(lab, FULL, each) for each in (request, other))
    first, second = (stream.tokens[0].logprobs for stream in streams)
    assert first is not None
    assert second is not None
    assert np.abs(np.array(first.top_logprobs) - second.top_logprobs).max() > 2 * TOLERANCE
