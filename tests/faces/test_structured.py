"""Structured outputs through the public face: constrained rows among free ones have the bits that
each has alone, also when they are preempted, and log probabilities are those without the mask.
"""

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from cadenza import LLM, CompletionOutput, SamplingParams, StructuredOutput
from cadenza.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FORMS = (
    StructuredOutput(regex="[a-z ]{5,30}!"),
    None,
    StructuredOutput(json=SCHEMA),
    StructuredOutput(choice=["the fox", "the dog", "a"]),
    None,
    StructuredOutput(json_object=True),
)


def questions(seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    asked: list[tuple[list[int], SamplingParams]] = []
    for place, form in enumerate(FORMS):
        params = SamplingParams(
            max_tokens=24,
            temperature=rng.choice([0.0, 1.0, 1.5]),
            top_k=rng.choice([0, 20]),
            seed=seed + place,
            presence_penalty=rng.choice([0.0, 0.5]),
            logprobs=2,
            n=1 + place % 2,
            structured=form,
        )
        asked.append((rng.choices(range(5, 200), k=rng.randint(3, 30)), params))
    return asked


def bits(outputs: tuple[CompletionOutput, ...]) -> object:
    return [(each.token_ids, each.text, each.finish_reason, each.logprobs) for each in outputs]


@pytest.mark.parametrize("seed", [1, 2])
def test_constrained_and_free_rows_together_have_the_bits_of_each_alone(worded: LLM, seed: int):
    asked = questions(seed)
    prompts, params = [each[0] for each in asked], [each[1] for each in asked]
    together = worded.generate(prompts, params)
    for (prompt, own), output in zip(asked, together, strict=True):
        alone = worded.generate([prompt], own)[0]
        assert bits(output.outputs) == bits(alone.outputs)


PERSON = {
    "type": "object",
    "properties": {
        "name_in_the_passport": {"type": "string", "maxLength": 4},
        "is_at_least_eighteen_years_old": {"const": True},
    },
    "required": ["name_in_the_passport", "is_at_least_eighteen_years_old"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("form", [{"json": PERSON}, {"choice": ["the quick brown fox", "a dog"]}])
def test_tokens_that_must_follow_are_those_that_are_sampled_where_each_must_be(
    worded: LLM, form: dict[str, Any]
):
    """Log probabilities need every token's logits."""
    counts: list[int] = []
    found: list[object] = []
    prompts = [[7, 8, 9], [10, 11]]
    for logprobs in (None, 0):
        params = SamplingParams(
            max_tokens=80,
            temperature=1.0,
            seed=3,
            presence_penalty=0.5,
            n=2,
            logprobs=logprobs,
            structured=StructuredOutput(**form),
        )
        before = worded.core.num_steps
        outputs = worded.generate(prompts, params)
        counts.append(worded.core.num_steps - before)
        found.append(
            [(each.token_ids, each.text, each.finish_reason) for o in outputs for each in o.outputs]
        )
        alone = [worded.generate([prompt], params)[0] for prompt in prompts]
        assert [bits(each.outputs) for each in alone] == [bits(each.outputs) for each in outputs]
    assert found[0] == found[1]
    assert counts[0] < 0.9 * counts[1], counts


def test_preempted_rows_go_on_with_their_constraints(worded_folder: Path, worded: LLM):
    asked = questions(3)
    prompts, params = [each[0] for each in asked], [each[1] for each in asked]
    with LLM(worded_folder, max_num_seqs=4, max_model_len=64, num_pages=7) as small:
        squeezed = small.generate(prompts, params)
        assert small.core.scheduler.num_preemptions > 0
    for output, expected in zip(squeezed, worded.generate(prompts, params), strict=True):
        assert bits(output.outputs) == bits(expected.outputs)


def test_log_probabilities_are_those_before_the_mask(worded: LLM):
    params = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=20, structured=StructuredOutput(regex="[b-y]")
    )
    (constrained,) = worded.generate([[9, 30, 200]], params)[0].outputs
    free = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    (unconstrained,) = worded.generate([[9, 30, 200]], free)[0].outputs
    assert constrained.logprobs is not None
    assert unconstrained.logprobs is not None
    for token_id, found in unconstrained.logprobs[0].items():
        assert constrained.logprobs[0][token_id] == found
    chosen = constrained.logprobs[0][constrained.token_ids[0]]
    assert math.exp(chosen.logprob) <= 1
    assert re.fullmatch("[b-y]", constrained.text)


def test_a_form_that_cannot_be_followed_is_refused_before_anything_starts(worded: LLM):
    form = StructuredOutput(json={"not": {}}, strict=True)
    with pytest.raises(InvalidRequestError, match="uses not"):
        worded.generate([[5]], SamplingParams(structured=form))
    with pytest.raises(InvalidRequestError, match="must be a StructuredOutput"):
        SamplingParams(structured={"json": {}})  # type: ignore[arg-type]


def test_a_model_without_a_tokenizer_refuses_forms(llm: LLM):
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json") as refused:
        llm.generate([[5]], SamplingParams(structured=StructuredOutput(regex="a")))
    assert refused.value.param == "structured"
