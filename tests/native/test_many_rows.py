"""More rows than a server usually has: each stream has the bits that it has alone."""

import pytest

from cadenza import LLM, SamplingParams

pytestmark = [pytest.mark.native, pytest.mark.soak]

NUM_ROWS = 2048
SIZES = {"max_model_len": 64, "num_pages": 4200}
LOOKED_AT = (0, 1, 1023, 1024, 1025, 1500, 2046, 2047)


def test_two_thousand_streams_at_the_same_time_have_the_bits_that_each_has_alone() -> None:
    prompts = [[3 + at % 2000, 5 + at % 37, 9] for at in range(NUM_ROWS)]
    params = [
        SamplingParams(
            max_tokens=3,
            ignore_eos=True,
            temperature=float(at % 2),
            seed=at,
            logprobs=3 if at % 3 == 0 else None,
            frequency_penalty=0.5 if at % 5 == 0 else 0.0,
        )
        for at in range(NUM_ROWS)
    ]
    with LLM(max_num_seqs=NUM_ROWS, **SIZES) as many:
        found = many.generate(prompts, params)
    with LLM(max_num_seqs=1, **SIZES) as alone:
        for at in LOOKED_AT:
            (only,) = alone.generate([prompts[at]], [params[at]])
            own, other = only.outputs[0], found[at].outputs[0]
            assert own.token_ids == other.token_ids
            assert own.logprobs == other.logprobs
