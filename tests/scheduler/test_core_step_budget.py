"""`PromptShares`: who gets a step's tokens and time for prompts, whatever was asked in between."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cadenza.batch.image_cost import ImageCost
from cadenza.batch.step_cost import MIN_PROMPT_TOKENS, StepCost
from cadenza.batch.whole_spans import SpanRest, SpanShape, WholeSpan
from cadenza.scheduler.starts import MAX_PARTIAL_PREFILLS
from cadenza.scheduler.step_budget import (
    FINISH_SHARE,
    LEAST_SHARE,
    SHORT_SHARE,
    PromptBudget,
    PromptPart,
    PromptShares,
)
from tests.scheduler.step_builders import COST, costs, load_of, prompt_parts

short_parts = st.builds(
    PromptPart,
    start=st.integers(0, 50),
    num_left=st.integers(1, 12),
    has_logits=st.booleans(),
    is_first=st.booleans(),
)
budgets = st.builds(
    PromptBudget,
    num_tokens=st.integers(0, 512),
    left_ms=st.floats(-50, 500),
    cost=costs,
    may_finish_short=st.booleans(),
)
budgets_of_tokens = st.builds(
    PromptBudget, num_tokens=st.integers(0, 512), may_finish_short=st.booleans()
)


def counts_of(parts: list[PromptPart], budget: PromptBudget) -> list[int]:
    return PromptShares(budget, parts).counts


def share_one_after_another(parts: list[PromptPart], budget: PromptBudget) -> list[int]:
    """The rule itself: all shares from the beginning, in time that grows with the prompts."""
    counts = [0] * len(parts)
    may_finish_short = budget.may_finish_short

    def take(index: int, share: float = 1.0) -> None:
        part, done = parts[index], counts[index]
        rest = replace(part, start=part.start + done, num_left=part.num_left - done)
        counts[index] += budget.take(rest, share)

    oldest = next((index for index, part in enumerate(parts) if not part.is_first), None)
    if oldest is not None and any(part.is_first for part in parts) and budget.num_tokens > 0:
        take(oldest, max(LEAST_SHARE, 1 / budget.num_tokens))
    for is_first in (True, False):
        group = [index for index, part in enumerate(parts) if part.is_first is is_first]
        if len(group) > 1:
            shortest = min(group, key=lambda index: parts[index].num_left)
            if shortest != group[0]:
                part = parts[shortest]
                has_all = budget.copy().take(part, FINISH_SHARE) == part.num_left
                has_most = has_all and may_finish_short and not is_first
                take(shortest, FINISH_SHARE if has_most else SHORT_SHARE)
        for index in group:
            take(index)
    return counts


@given(
    st.one_of(budgets, budgets_of_tokens),
    st.lists(st.one_of(prompt_parts, short_parts), max_size=20),
    st.data(),
)
def test_prompts_added_one_by_one_have_the_shares_of_the_rule(
    budget: PromptBudget, parts: list[PromptPart], data: st.DataObject
) -> None:
    num_given = data.draw(st.integers(0, len(parts)))
    shares = PromptShares(budget.copy(), parts[:num_given])
    for end in range(num_given, len(parts) + 1):
        spent = budget.copy()
        expected = share_one_after_another(parts[:end], spent)
        if end > num_given:
            assert shares.add(parts[end - 1]) == expected[-1]
        for are_first in data.draw(st.lists(st.booleans(), max_size=2)):
            cut = [
                count < part.num_left and part.is_first >= are_first
                for count, part in zip(expected, parts[:end], strict=True)
            ]
            assert shares.num_cut(are_first=are_first) == sum(cut)
        if data.draw(st.booleans()):
            assert shares.counts == expected
            assert shares.left_ms == spent.left_ms


def test_a_prompt_behind_thousands_is_added_without_sharing_among_them_again() -> None:
    taken: list[PromptPart] = []

    class CountedBudget(PromptBudget):
        def copy(self) -> "CountedBudget":
            return CountedBudget(num_tokens=self.num_tokens, left_ms=self.left_ms, cost=self.cost)

        def take(self, part: PromptPart, share: float = 1.0) -> int:
            taken.append(part)
            return super().take(part, share)

    budget = CountedBudget(num_tokens=40_000, left_ms=9_000.0, cost=COST)
    shares = PromptShares(budget)
    while shares.num_cut(are_first=False) < MAX_PARTIAL_PREFILLS:
        shares.add(PromptPart(start=0, num_left=10))
    num_prompts = len(shares.counts)
    assert num_prompts > 2_000
    assert len(taken) <= 6 * num_prompts, "most prompts were shared out more than once"


@given(costs, st.lists(prompt_parts, min_size=1, max_size=5), st.data())
def test_prompts_keep_to_tokens_and_time_and_always_progress(
    cost: StepCost, parts: list[PromptPart], data: st.DataObject
) -> None:
    num_tokens = data.draw(st.integers(1, 512))
    left_ms = data.draw(st.floats(-50, 500))
    budget = PromptBudget(num_tokens=num_tokens, left_ms=left_ms, cost=cost)
    counts = counts_of(parts, budget)
    assert all(0 <= n <= part.num_left for n, part in zip(counts, parts, strict=True))
    assert 0 < sum(counts) <= num_tokens
    used_ms = sum(
        cost.predict_ms(load_of(part, n)) - cost.fixed_ms
        for n, part in zip(counts, parts, strict=True)
    )
    if sum(counts) > MIN_PROMPT_TOKENS:
        grant = sum(
            cost.predict_ms(load_of(part, MIN_PROMPT_TOKENS)) - cost.fixed_ms for part in parts
        )
        assert used_ms <= max(left_ms, 0.0) + grant + 1e-6
    wanted = sum(part.num_left for part in parts)
    assert sum(counts) >= min(MIN_PROMPT_TOKENS, num_tokens, wanted), "the grant was not given"


def test_two_prompts_do_not_both_use_the_time_of_one_step() -> None:
    parts = [PromptPart(start=0, num_left=4000), PromptPart(start=0, num_left=3000)]
    budget = PromptBudget(num_tokens=1000, left_ms=50.0, cost=COST)
    counts = counts_of(parts, budget)
    assert (
        sum(
            COST.predict_ms(load_of(part, n)) - COST.fixed_ms
            for n, part in zip(counts, parts, strict=True)
        )
        <= 50.0
    )
    assert sum(counts) > 150


def test_the_shortest_gets_up_to_half_and_the_oldest_the_rest() -> None:
    def counts(*num_left: int, num_tokens: int = 100) -> list[int]:
        parts = [PromptPart(start=0, num_left=n) for n in num_left]
        return counts_of(parts, PromptBudget(num_tokens=num_tokens))

    assert counts(1000, 30) == [70, 30]
    assert counts(1000, 80) == [50, 50]
    assert counts(30, 1000) == [30, 70]
    assert counts(1000, 80, 70) == [50, 0, 50]
    assert counts(20, 500, 10) == [20, 70, 10]
    assert counts(5, 5, num_tokens=4) == [4, 0]


def test_the_shortest_may_have_more_if_it_is_whole_then() -> None:
    def shares(*num_left: int, may_finish_short: bool = True) -> tuple[list[int], bool]:
        parts = [PromptPart(start=0, num_left=n) for n in num_left]
        budget = PromptBudget(num_tokens=96, may_finish_short=may_finish_short)
        found = PromptShares(budget, parts)
        return found.counts, found.may_finish_short

    assert shares(1000, 80) == ([16, 80], False)
    assert shares(1000, 90) == ([6, 90], False)
    assert shares(1000, 91) == ([48, 48], True)
    assert shares(1000, 40) == ([56, 40], True)
    assert shares(1000, 80, may_finish_short=False) == ([48, 48], False)
    assert shares(1000, 1000, may_finish_short=False) == ([96, 0], True)
    assert shares(1000, may_finish_short=False) == ([96], True)


@given(
    st.one_of(budgets, budgets_of_tokens),
    st.lists(st.lists(st.integers(1, 600), max_size=3), min_size=1, max_size=40),
)
def test_the_oldest_has_half_of_all_steps_whatever_shorter_ones_come(
    budget: PromptBudget, comers: list[list[int]]
) -> None:
    oldest = PromptPart(start=0, num_left=1 << 20)
    alone = PromptShares(budget.copy(), [oldest]).counts[0]
    may_finish_short, num_got = budget.may_finish_short, 0
    for num_lefts in comers:
        parts = [oldest, *[PromptPart(start=0, num_left=count) for count in num_lefts]]
        step = replace(budget, may_finish_short=may_finish_short)
        shares = PromptShares(step, parts)
        num_got += shares.counts[0]
        may_finish_short = shares.may_finish_short
    rounding = len(comers)
    assert num_got >= alone // 2 * (len(comers) - 1) - rounding


@given(costs, st.lists(prompt_parts, min_size=2, max_size=5), st.data())
def test_the_oldest_prompt_beside_those_that_are_first_goes_on(
    cost: StepCost, parts: list[PromptPart], data: st.DataObject
) -> None:
    num_tokens, left_ms = data.draw(st.integers(1, 512)), data.draw(st.floats(-50, 500))
    budget = PromptBudget(num_tokens=num_tokens, left_ms=left_ms, cost=cost)
    counts = counts_of(parts, budget)
    assert all(count <= part.num_left for count, part in zip(counts, parts, strict=True))
    others = [count for count, part in zip(counts, parts, strict=True) if not part.is_first]
    if 0 < len(others) < len(parts):
        assert others[0] >= 1


def test_without_time_a_prompt_gets_the_grant_and_no_more() -> None:
    budget = PromptBudget(num_tokens=256, left_ms=-10.0, cost=COST)
    assert counts_of([PromptPart(start=0, num_left=500)], budget) == [MIN_PROMPT_TOKENS]


@given(
    num_tokens=st.integers(1, 300),
    lengths=st.lists(st.tuples(st.integers(1, 900), st.booleans()), min_size=2, max_size=5),
)
def test_prompts_that_come_first_leave_something_for_the_oldest_of_the_others(
    num_tokens: int, lengths: list[tuple[int, bool]]
) -> None:
    parts = [PromptPart(start=0, num_left=count, is_first=first) for count, first in lengths]
    counts = counts_of(parts, PromptBudget(num_tokens=num_tokens))
    assert sum(counts) == min(num_tokens, sum(count for count, _ in lengths))
    others = [count for count, part in zip(counts, parts, strict=True) if not part.is_first]
    if others:
        assert others[0] >= 1
    if others and any(part.is_first for part in parts):
        firsts = sum(part.num_left for part in parts if part.is_first)
        assert sum(counts) - sum(others) >= min(firsts, num_tokens - max(1, num_tokens // 16))


def rest_of(num_rows: int, *, num_done: int = 0) -> SpanRest:
    """Of a span in blocks of 4 rows and 4 passes, with 1 ms for each quantum."""
    work = SpanShape(num_passes=4, max_rows=64, block_rows=4).work(0, num_rows)
    cost = ImageCost(quantum_ms=1.0, product_ms=1e-9, attention_ms=1e-9)
    return SpanRest(work=work, cost=cost, num_rows=1, num_done=num_done)


def span_part(num_rows: int, rest: SpanRest | None) -> PromptPart:
    spans = (WholeSpan(0, num_rows),)
    return PromptPart(start=0, num_left=num_rows, spans=spans, has_quanta=True, rest=rest)


def quanta_of(left_ms: float, *parts: PromptPart) -> tuple[list[int], list[int]]:
    budget = PromptBudget(num_tokens=512, left_ms=left_ms, cost=COST)
    shares = PromptShares(budget, parts)
    return shares.counts, shares.quanta


def test_a_span_that_does_not_fit_takes_quanta_and_no_tokens() -> None:
    whole_ms = PromptBudget(num_tokens=1, cost=COST).time_ms(span_part(64, None), 64)
    assert quanta_of(whole_ms * 1.01, span_part(64, rest_of(64))) == ([64], [0])
    assert quanta_of(5.5, span_part(64, rest_of(64))) == ([0], [5])


def test_a_span_that_has_begun_takes_no_tokens_although_it_would_fit() -> None:
    assert quanta_of(1e6, span_part(64, rest_of(64, num_done=60))) == ([0], [4])


def test_a_span_goes_on_by_one_quantum_or_without_time_by_what_is_granted() -> None:
    assert quanta_of(0.5, span_part(64, rest_of(64))) == ([0], [1])
    assert quanta_of(-5.0, span_part(64, rest_of(64))) == ([0], [MIN_PROMPT_TOKENS])


def test_a_span_waits_where_its_quanta_are_not_its_own() -> None:
    counts, quanta = quanta_of(5.5, span_part(64, None), span_part(64, rest_of(64)))
    assert (counts, quanta) == ([0, 0], [0, 5])


def test_a_span_shares_the_time_with_a_shorter_prompt() -> None:
    counts, quanta = quanta_of(8.0, span_part(64, rest_of(64)), PromptPart(start=0, num_left=8))
    assert counts[0] == 0
    assert counts[1] > 0
    assert 0 < quanta[0] < 8
