"""The tasks, the baselines and the figures of `cadenza bench spec-prefill`."""

import json
from collections.abc import Sequence
from math import exp, inf, log
from typing import Any

import pytest

from cadenza.cli.report import Shown
from cadenza.errors import ConfigError
from cadenza.events import TokenLogprobs
from cadenza.sparse_prefill import CHUNK, KeptTokens, kept_of_mask
from cadenza_bench.spec_prefill.measure import (
    WAYS,
    LengthResult,
    Likeness,
    SpecPrefillResult,
    TaskResult,
)
from cadenza_bench.spec_prefill.options import ROOM, SpecPrefillOptions
from cadenza_bench.spec_prefill.report import spec_prefill_charts, spec_prefill_result
from cadenza_bench.spec_prefill.runs import (
    BASELINES,
    bm25_scores,
    chosen,
    divergence,
    end_scores,
    forced_requests,
    random_scores,
)
from cadenza_bench.spec_prefill.tasks import KINDS, make_prompt, make_text


def by_characters(text: str) -> list[int]:
    return [ord(each) for each in text]


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_task_fits_its_length_and_says_where_its_answer_is(kind: Any, depth: float):
    prompt = make_prompt(kind, 3000, depth, 7, by_characters)
    assert 2800 < len(prompt.token_ids) <= 3000
    sought = [text_of(prompt.token_ids[start:stop]) for start, stop in prompt.sought]
    if kind == "count":
        assert len(sought) == int(prompt.answer)
        assert prompt.depth is None
    else:
        assert prompt.depth == depth
        assert [prompt.answer in each for each in sought] == [True]
        place = prompt.sought[0].start / len(prompt.token_ids)
        assert place == pytest.approx(depth, abs=0.15)
    whole = text_of(prompt.token_ids)
    assert whole.count("Question:") == {"asked_before": 2, "quote": 0}.get(kind, 1)
    assert prompt == make_prompt(kind, 3000, depth, 7, by_characters)
    assert prompt.token_ids != make_prompt(kind, 3000, depth, 8, by_characters).token_ids
    assert prompt.is_right(f" {prompt.answer}.")
    assert not prompt.is_right(f" not {prompt.answer}")


def test_a_task_too_long_for_its_length_is_refused():
    with pytest.raises(ConfigError, match="--input-len 300 is too short for the task key_value"):
        make_prompt("key_value", 300, 0.5, 1, by_characters)


def test_a_text_has_its_length():
    assert len(make_text(777, 3, by_characters)) == 777
    assert make_text(777, 3, by_characters) != make_text(777, 4, by_characters)


PROMPT = tuple(range(1000, 1000 + 20 * CHUNK))


def test_every_baseline_keeps_as_much_and_what_is_forced():
    for name, scores in BASELINES.items():
        kept = chosen(PROMPT, 0.3, scores)
        assert len(kept.chunks) == 6, name
        assert {0, 18, 19} <= {*kept.chunks}


def test_both_ends_are_kept_alike_and_chance_is_the_prompts_own():
    assert chosen(PROMPT, 0.3, end_scores).chunks == (0, 1, 2, 17, 18, 19)
    assert random_scores(PROMPT) == random_scores(PROMPT) != random_scores((*PROMPT[1:], 5))


def test_bm25_finds_the_chunk_with_the_rare_tokens_of_the_prompts_end():
    prompt = [7] * len(PROMPT)
    prompt[9 * CHUNK + 3] = prompt[-2] = 4242
    prompt[5 * CHUNK : 5 * CHUNK + 9] = [8] * 9  # not asked for
    scores = bm25_scores(prompt)
    assert max(scores[:18]) == scores[9] > 2 * sorted(scores[:18])[-2]
    assert scores[5] < scores[4]


def test_an_answer_is_forced_token_by_token_on_the_same_kept_tokens():
    kept = KeptTokens(num_prompt_tokens=70, chunks=(0, 2))
    prompt, answer = tuple(range(70)), [900 + place for place in range(40)]
    requests = forced_requests(prompt, answer, kept)
    assert [len(each.prompt_token_ids) for each in requests] == list(range(70, 110))
    for place, each in enumerate(requests):
        assert each.sparse_prefill is not None
        assert each.sparse_prefill.kept is not None
        found = kept_of_mask(each.sparse_prefill.kept, 70 + place)
        assert found.of_prompt(each.prompt_token_ids) == (
            *prompt[:32],
            *prompt[64:],
            *answer[:place],
        )


def logprobs_of(shares: Sequence[float], top: int) -> TokenLogprobs:
    ids = sorted(range(len(shares)), key=lambda place: -shares[place])[:top]
    tops = tuple(log(shares[each]) if shares[each] else -inf for each in ids)
    return TokenLogprobs(logprob=tops[0], rank=1, top_ids=tuple(ids), top_logprobs=tops)


def test_the_divergence_is_a_lower_bound_and_exact_where_all_tokens_are_named():
    one, other = [0.5, 0.3, 0.1, 0.06, 0.04], [0.2, 0.1, 0.4, 0.2, 0.1]
    exact = sum(p * log(p / q) for p, q in zip(one, other, strict=True))
    assert divergence(logprobs_of(one, 5), logprobs_of(other, 5)) == pytest.approx(exact)
    found = [divergence(logprobs_of(one, top), logprobs_of(other, top)) for top in (1, 2, 3, 4)]
    assert all(0.0 <= each <= exact + 1e-12 for each in found)
    assert found[3] > 0.5 * exact
    assert divergence(logprobs_of(one, 3), logprobs_of(one, 3)) == pytest.approx(0.0)
    assert divergence(logprobs_of([1.0, 0.0], 2), logprobs_of([exp(-1), 1 - exp(-1)], 2)) == 1.0


def test_lengths_are_a_half_and_all_of_the_context_and_given_ones_must_fit():
    assert SpecPrefillOptions().lengths(2048) == ((2048 - ROOM) // 2, 2048 - ROOM)
    assert SpecPrefillOptions(input_len=(200,)).lengths(2048) == (200,)
    with pytest.raises(ConfigError, match="--input-len 2040 is longer than the 2000 tokens"):
        SpecPrefillOptions(input_len=(2040,)).lengths(2048)
    for wrong in ({"input_len": (5,)}, {"keep": (0.0,)}, {"samples": -1}, {"keep": ()}):
        with pytest.raises(ConfigError):
            SpecPrefillOptions(**wrong)


def result(right: dict[str, float], whole: float = 1.0) -> SpecPrefillResult:
    likeness = {way: Likeness(kl=0.25, top_1=0.5) for way in WAYS}
    tasks = [
        TaskResult(
            task="needle",
            input_len=512,
            keep=0.3,
            way=way,
            samples=4,
            whole=whole,
            recall=0.5,
            right=right[way],
            by_depth={"0": (0.5, right[way]), "1": (0.5, right[way])},
        )
        for way in WAYS
    ]
    length = LengthResult(
        input_len=512,
        keep=0.3,
        kept_tokens=160,
        whole_s=0.3,
        thinned_s=0.15,
        predicted_ratio=2.5,
        likeness=likeness,
    )
    setting: dict[str, object] = {"model": "m", "dtype": "bfloat16", "ops": "native", "draft": "d"}
    return SpecPrefillResult(machine=MACHINE, workload=setting, results=(length,), tasks=(*tasks,))


MACHINE: dict[str, object] = {
    "cpu": "c",
    "isa": "avx512",
    "threads": 2,
    "cores": 2,
    "load_average": 0.5,
}
RIGHT = {"draft": 0.8, "random": 0.3, "first_last": 0.2, "bm25": 0.7}


def test_the_report_has_ratios_by_keep_and_length_and_says_which_baselines_are_as_good(
    capsys: pytest.CaptureFixture[str],
):
    facts = spec_prefill_result(result(RIGHT)).object
    row = facts["results"][0]
    assert (row["keep"], row["input_len"], row["ttft_ratio"]) == (0.3, 512, 2.0)
    assert facts["beaten_by"] == []
    found = result({**RIGHT, "bm25": 0.8})
    spec_prefill_result(found).show(Shown(json=True))
    assert json.loads(capsys.readouterr().out)["beaten_by"] == ["bm25"]
    spec_prefill_result(found).show(Shown())
    assert "the draft model is no better than bm25 here" in capsys.readouterr().out


def test_a_task_that_whole_prompts_fail_counts_for_nothing(capsys: pytest.CaptureFixture[str]):
    found = result({**RIGHT, "bm25": 1.0}, whole=0.7)
    assert spec_prefill_result(found).object["beaten_by"] is None
    assert [chart.name for chart in spec_prefill_charts(found)] == ["ttft_ratio"]
    spec_prefill_result(found).show(Shown())
    assert "right at every length: needle" in capsys.readouterr().out
