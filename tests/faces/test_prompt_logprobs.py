"""prompt_logprobs of a real model: the same bits in every chunking, and the reference's values."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza import LLM, EngineConfig, RequestOutput, SamplingParams
from cadenza.loading.build import find_checkpoint
from cadenza.verification.reference import build_reference

PROMPT = [(7 + index * 13) % 250 for index in range(150)]
PARAMS = SamplingParams(
    prompt_logprobs=3, logprobs=3, temperature=0.0, max_tokens=4, ignore_eos=True
)


def told(output: RequestOutput) -> list[tuple[float, int | None, tuple[int, ...]]]:
    """Of each position but the first: the token's log probability and rank, and who else is told
    of."""
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    found: list[tuple[float, int | None, tuple[int, ...]]] = []
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    for token_id, entry in pairs:
        assert entry is not None
        found.append((entry[token_id].logprob, entry[token_id].rank, tuple(entry)))
    return found


def scored(folder: Path, **options: Any) -> LLM:
    return LLM(folder, max_num_seqs=4, max_model_len=256, **options)


@pytest.fixture(scope="module")
def whole(llm: LLM) -> RequestOutput:
    return llm.generate([PROMPT], PARAMS)[0]


def chunked(folder: Path, budget: int, others: Sequence[list[int]]) -> RequestOutput:
    with scored(folder, max_num_batched_tokens=budget) as llm:
        return llm.generate([*others, PROMPT], PARAMS)[-1]


@pytest.mark.parametrize("budget", [7, 33])
def test_another_chunking_and_company_change_no_bit(
    tiny_folder: Path, whole: RequestOutput, budget: int
) -> None:
    output = chunked(tiny_folder, budget, [PROMPT[:40], PROMPT[::-1], PROMPT])
    assert told(output) == told(whole)
    assert output.outputs[0] == whole.outputs[0]


def test_a_cached_prompt_is_described_with_the_same_bits(llm: LLM, whole: RequestOutput) -> None:
    silent = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    first, second = (llm.generate([PROMPT], params)[0] for params in (silent, PARAMS))
    assert told(second) == told(whole)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_prompt_is_described_as_its_tokens_would_be_when_generated(llm: LLM) -> None:
    answer = llm.generate([PROMPT[:20]], PARAMS)[0]
    tokens = answer.outputs[0].token_ids
    again = llm.generate([[*PROMPT[:20], *tokens]], PARAMS)[0]
    assert answer.outputs[0].logprobs is not None
    generated = [
        (entry[token_id].logprob, entry[token_id].rank, tuple(entry))
        for token_id, entry in zip(tokens, answer.outputs[0].logprobs, strict=True)
    ]
    assert told(again)[19:] == generated


def test_the_values_are_those_of_the_reference(tiny_folder: Path, whole: RequestOutput) -> None:
    reference = build_reference(find_checkpoint(tiny_folder), EngineConfig(), max_model_len=256)
    expected = reference.score(PROMPT)
    assert np.allclose([logprob for logprob, _, _ in told(whole)], expected, atol=1e-4)
