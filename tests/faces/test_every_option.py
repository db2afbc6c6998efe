"""Every field of `SamplingParams` through the public face: it does what it says.

The table has a row for each field, so that none is accepted and ignored.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields

import pytest

from cadenza import LLM, CompletionOutput, RequestOutput, SamplingParams, StructuredOutput
from cadenza.errors import InvalidRequestError

PROMPT = [9, 30, 200, 31, 9, 30]
LENGTH = 40
EOS, SPECIALS = 0, (1, 2, 3)
SEEDS = range(6)
VARIED = {"temperature": 1.5, "seed": 8}
"""The greedy stream of random weights soon repeats one token; this one does not."""


def ask(llm: LLM, **options: object) -> RequestOutput:
    settings = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True, **options}
    return llm.generate([PROMPT], SamplingParams(**settings))[0]  # type: ignore[arg-type]


def answer(llm: LLM, **options: object) -> CompletionOutput:
    return ask(llm, **options).outputs[0]


def greedy_ids(llm: LLM) -> tuple[int, ...]:
    return answer(llm).token_ids


def any_token_runs(llm: LLM, **options: object) -> list[CompletionOutput]:
    """Nearly uniform draws: every token comes up sooner or later."""
    flat = {"temperature": 100.0, "max_tokens": 200}
    return [answer(llm, **{**flat, "seed": seed, **options}) for seed in SEEDS]


def check_max_tokens(llm: LLM) -> None:
    assert len(answer(llm, max_tokens=3).token_ids) == 3
    none = answer(llm, max_tokens=0)
    assert (none.token_ids, none.text, none.finish_reason) == ((), "", "length")
    rest = answer(llm, max_tokens=None)
    assert len(rest.token_ids) == 256 - len(PROMPT)
    assert rest.finish_reason == "length"


def check_min_tokens(llm: LLM) -> None:
    first = greedy_ids(llm)[0]
    assert answer(llm, stop_token_ids=[first]).token_ids == ()
    later = answer(llm, stop_token_ids=[first], min_tokens=5)
    assert len(later.token_ids) >= 5
    assert first not in later.token_ids


def check_temperature(llm: LLM) -> None:
    hot = {answer(llm, temperature=1.5, seed=seed).token_ids for seed in SEEDS}
    assert len(hot) == len(SEEDS)
    assert {answer(llm, seed=seed).token_ids for seed in SEEDS} == {greedy_ids(llm)}


def check_top_k(llm: LLM) -> None:
    assert answer(llm, temperature=1.0, seed=3, top_k=1).token_ids == greedy_ids(llm)


def check_top_p(llm: LLM) -> None:
    assert answer(llm, temperature=1.0, seed=3, top_p=1e-6).token_ids == greedy_ids(llm)


def check_min_p(llm: LLM) -> None:
    assert answer(llm, temperature=1.0, seed=3, min_p=1.0).token_ids == greedy_ids(llm)


def check_top_n_sigma(llm: LLM) -> None:
    narrow = answer(llm, temperature=1.5, seed=3, top_n_sigma=1e-3)
    assert narrow.token_ids == greedy_ids(llm)
    off = answer(llm, temperature=1.5, seed=3, top_n_sigma=-1.0)
    assert off.token_ids == answer(llm, temperature=1.5, seed=3).token_ids != narrow.token_ids


def check_seed(llm: LLM) -> None:
    streams = [answer(llm, temperature=1.5, seed=seed).token_ids for seed in (3, 3, 4)]
    assert streams[0] == streams[1] != streams[2]


def check_presence_penalty(llm: LLM) -> None:
    def num_kinds(penalty: float) -> int:
        runs = any_token_runs(llm, presence_penalty=penalty, temperature=2.0, max_tokens=30)
        return sum(len(set(run.token_ids)) for run in runs)

    assert num_kinds(2.0) > num_kinds(0.0) > num_kinds(-2.0)


def check_frequency_penalty(llm: LLM) -> None:
    fewer = Counter(answer(llm, frequency_penalty=2.0).token_ids)
    more = Counter(answer(llm, frequency_penalty=-2.0).token_ids)
    assert max(fewer.values()) < max(more.values())


def check_repetition_penalty(llm: LLM) -> None:
    once = answer(llm, repetition_penalty=100.0).token_ids
    assert max(Counter(once).values()) == 1
    assert not set(once) & set(PROMPT)


def check_logit_bias(llm: LLM) -> None:
    assert set(answer(llm, logit_bias={77: 100.0}).token_ids) == {77}
    first = greedy_ids(llm)[0]
    assert first not in answer(llm, logit_bias={first: -100.0}).token_ids


def check_allowed_token_ids(llm: LLM) -> None:
    allowed = (40, 41, 42)
    assert set(answer(llm, allowed_token_ids=allowed).token_ids) <= set(allowed)
    runs = any_token_runs(llm, allowed_token_ids=allowed)
    assert {token_id for run in runs for token_id in run.token_ids} == set(allowed)


def check_bad_words(llm: LLM) -> None:
    runs = any_token_runs(llm)
    word = " the"
    assert any(word in run.text for run in runs)
    assert not any(word in run.text for run in any_token_runs(llm, bad_words=["the"]))


def check_n(llm: LLM) -> None:
    together = ask(llm, n=3, temperature=1.5, seed=5)
    assert [each.index for each in together.outputs] == [0, 1, 2]
    assert together.finished
    assert together.outputs[0].token_ids == answer(llm, temperature=1.5, seed=5).token_ids
    assert len({each.token_ids for each in together.outputs}) == 3


def check_ignore_eos(llm: LLM) -> None:
    stopped = any_token_runs(llm, ignore_eos=False)
    assert "stop" in {run.finish_reason for run in stopped}
    for run, on in zip(stopped, any_token_runs(llm, ignore_eos=True), strict=True):
        assert on.finish_reason == "length"
        assert on.token_ids[: len(run.token_ids)] == run.token_ids
        if run.finish_reason == "stop":
            assert on.token_ids[len(run.token_ids)] == EOS


def check_stop_token_ids(llm: LLM) -> None:
    ids = answer(llm, **VARIED).token_ids
    place = next(place for place in range(3, len(ids)) if ids[place] not in ids[:place])
    found = answer(llm, stop_token_ids=[ids[place]], **VARIED)
    assert (found.finish_reason, found.stop_reason) == ("stop", ids[place])
    assert found.token_ids == ids[:place]
    assert found.text == answer(llm, max_tokens=place, **VARIED).text
    assert found.num_generated_tokens == place + 1


def stop_text(llm: LLM) -> tuple[str, str]:
    """A text across token borders, and what the stream has before it."""
    whole = answer(llm, **VARIED).text
    start = next(at for at in range(5, len(whole)) if whole.find(whole[at : at + 6]) == at)
    return whole[start : start + 6], whole[:start]


def check_stop(llm: LLM) -> None:
    text, before = stop_text(llm)
    found = answer(llm, stop=[text], **VARIED)
    assert (found.text, found.finish_reason, found.stop_reason) == (before, "stop", text)
    assert found.num_generated_tokens == len(found.token_ids) < LENGTH


def check_include_stop_str_in_output(llm: LLM) -> None:
    text, before = stop_text(llm)
    found = answer(llm, stop=[text], include_stop_str_in_output=True, **VARIED)
    assert found.text == before + text


def check_skip_special_tokens(llm: LLM) -> None:
    skipped = any_token_runs(llm)
    shown = any_token_runs(llm, skip_special_tokens=False)
    assert any(set(SPECIALS) & set(run.token_ids) for run in skipped)
    assert not any("<|user|>" in run.text for run in skipped)
    assert any("<|user|>" in run.text for run in shown)
    assert [run.token_ids for run in shown] == [run.token_ids for run in skipped]


def check_logprobs(llm: LLM) -> None:
    plain, told = answer(llm), answer(llm, logprobs=3)
    assert plain.logprobs is None
    assert plain.token_ids == told.token_ids
    assert told.logprobs is not None
    assert all(3 <= len(found) <= 4 for found in told.logprobs)
    assert all(found[token_id].rank == 1 for found, token_id in zip_tokens(told))


def zip_tokens(completion: CompletionOutput):
    return zip(completion.logprobs or (), completion.token_ids, strict=True)


def check_prompt_logprobs(llm: LLM) -> None:
    output = ask(llm, prompt_logprobs=2)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert output.prompt_logprobs[0] is None
    for found, token_id in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True):
        assert found is not None
        assert token_id in found
        assert 2 <= len(found) <= 3
    assert output.outputs[0].token_ids == greedy_ids(llm)


def check_truncate_prompt_tokens(llm: LLM) -> None:
    output = ask(llm, truncate_prompt_tokens=2)
    assert output.prompt_token_ids == tuple(PROMPT[-2:])
    alone = llm.generate([PROMPT[-2:]], {"max_tokens": LENGTH, "temperature": 0.0})
    assert output.outputs[0].token_ids[:1] == alone[0].outputs[0].token_ids[:1]


def check_structured(llm: LLM) -> None:
    for structured, regex in (
        (StructuredOutput(regex="[ab]{3}"), "[ab]{3}"),
        (StructuredOutput(choice=["ba", "ab"]), "ba|ab"),
    ):
        found = answer(llm, structured=structured, temperature=1.0, seed=1)
        assert re.fullmatch(regex, found.text)
        assert found.finish_reason == "stop"


def check_speculative(llm: LLM) -> None:
    plain, drafted = answer(llm), answer(llm, speculative=True)
    assert plain.num_accepted_drafts == 0 < drafted.num_accepted_drafts
    assert drafted.token_ids == plain.token_ids
    assert answer(llm, speculative=False) == plain


def check_spec_prefill(llm: LLM) -> None:
    uses = [ask(llm, spec_prefill=each).prompt_use for each in (None, True, False)]
    assert [use and use.whole_because for use in uses] == [None, "off", None]
    assert answer(llm, spec_prefill=True).token_ids == greedy_ids(llm)


CHECKS: dict[str, Callable[[LLM], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


def test_the_table_has_every_field():
    assert set(CHECKS) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_an_option_does_what_it_says(worded: LLM, name: str):
    CHECKS[name](worded)


def test_an_option_that_does_not_exist_is_refused(worded: LLM):
    with pytest.raises(InvalidRequestError, match="top_q"):
        worded.generate([PROMPT], {"top_q": 1})
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=1)  # type: ignore[call-arg]
