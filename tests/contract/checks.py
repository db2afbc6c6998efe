"""What every runner must do, as functions over a fresh runner that raise AssertionError.

They are functions so that `test_broken_runners` can show that each of them can fail. Outputs are
compared as bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from cadenza.backends.base import (
    Capability,
    LateStepHandle,
    PageCopier,
    PromptScorer,
    Runner,
    StepHandle,
)
from cadenza.batch.sequence import PageCopy
from cadenza.batch.step_schema import LAST_SAMPLED, MaskUpdate, ModelInputs, RuleUpdate, StepOutput
from cadenza.batch.token_rules import RuleLayout
from cadenza.config import MAX_LOGPROBS_BOUND, EngineLimits
from cadenza.errors import RunnerError
from cadenza.request import SamplingParams
from tests.contract.backends import LIMITS
from tests.contract.steps import Chunk, Draw, Geometry, Stream, build_inputs, padding_of, run_step
from tests.scheduler.builders import sequence_of

PROMPT = [11, 7, 3, 90, 23, 42, 5, 5, 61, 17, 8, 70, 33, 2, 19, 54, 6, 88, 29, 31]
OTHER = [40, 41, 42, 43, 44]
SAMPLED = Draw(temperature=1.0, seed=9, num_logprobs=MAX_LOGPROBS_BOUND)


@dataclass(frozen=True, slots=True)
class Bench:
    """A warm runner without any KV, for `limits`."""

    runner: Runner
    limits: EngineLimits = LIMITS

    def geometry(self, *chunks: Chunk) -> Geometry:
        """With the smallest bucket that holds the chunks."""
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        return Geometry(
            bucket=next(each for each in self.runner.token_buckets if each >= num_tokens),
            num_rows=self.limits.max_num_seqs,
            page_size=self.limits.page_size,
            max_pages=self.limits.max_pages_per_seq,
            num_pages=self.limits.num_pages,
        )

    def run(self, *chunks: Chunk) -> StepOutput:
        return run_step(self.runner, chunks, self.geometry(*chunks))

    def inputs(self, *chunks: Chunk) -> ModelInputs:
        return build_inputs(chunks, self.geometry(*chunks))

    def assert_same(self, ours: list[StepOutput], theirs: list[StepOutput], message: str) -> None:
        names = ("token_ids", "is_finite", "logprobs", "ranks", "top_ids", "top_logprobs")
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            for name in names:
                same = np.array_equal(getattr(one, name), getattr(other, name))
                assert same, f"{message}: {name} of step {step} differ"


def stream_on(row: int, pages: list[int], draw: Draw = SAMPLED) -> Stream:
    return Stream(row=row, pages=pages, draw=draw)


def begin(bench: Bench, stream: Stream, *others: Chunk) -> Stream:
    bench.run(stream.chunk(PROMPT[:9], samples=False), *others)
    return stream


def generate(bench: Bench, stream: Stream) -> list[StepOutput]:
    begin(bench, stream)
    outputs = [bench.run(stream.chunk(PROMPT[9:], samples=True))]
    return outputs + [bench.run(stream.next_token()) for _ in range(3)]


def launch_ahead(bench: Bench, stream: Stream) -> list[StepHandle]:
    """The steps of `generate` behind the first, all launched before any is read."""
    begin(bench, stream)
    inputs = [bench.inputs(stream.chunk(PROMPT[9:], samples=True))]
    inputs += [bench.inputs(stream.next_token()) for _ in range(3)]
    return [bench.runner.launch(each) for each in inputs]


def record_of(bench: Bench, prompt: list[int], **params: Any) -> npt.NDArray[np.int32]:
    sequence = sequence_of(0, tuple(prompt), params=SamplingParams(**params))
    record = RuleLayout(bench.runner.vocab_size).encode(sequence)
    assert record is not None
    return record


def masks_of(bench: Bench, *allowed: range) -> list[npt.NDArray[np.int32]]:
    layout = RuleLayout(bench.runner.vocab_size)
    return [layout.mask_of(np.array(each)) for each in allowed]


def row_of(output: StepOutput, index: int) -> StepOutput:
    return StepOutput(
        **{name: getattr(output, name)[index : index + 1] for name in StepOutput.__slots__}
    )


def check_it_describes_itself(bench: Bench) -> None:
    runner = bench.runner
    assert runner.name
    assert runner.vocab_size > 0
    assert runner.capabilities <= set(get_args(Capability))
    for name, kind in (("page_copies", PageCopier), ("scores", PromptScorer)):
        assert name not in runner.capabilities or isinstance(runner, kind), name


def check_its_buckets_rise_to_the_budget(bench: Bench) -> None:
    buckets = bench.runner.token_buckets
    assert list(buckets) == sorted(set(buckets))
    assert buckets[0] > 0
    assert buckets[-1] >= bench.limits.max_num_batched_tokens


def check_its_outputs_have_the_promised_shapes_and_types(bench: Bench) -> None:
    streams = [stream_on(row, [row * 2, row * 2 + 1]) for row in range(4)]
    for num_logits in (0, 1, 4):
        chunks = [s.chunk([s.row + 3], samples=s.row < num_logits) for s in streams]
        output = bench.run(*chunks)
        assert isinstance(output, StepOutput)
        check_output(output, num_logits, bench.runner.vocab_size)
    check_output(bench.run(), 0, bench.runner.vocab_size)


def check_output(output: StepOutput, num_logits: int, vocab_size: int) -> None:
    types = {
        "token_ids": np.int32,
        "is_finite": np.bool_,
        "logprobs": np.float32,
        "ranks": np.int32,
        "top_ids": np.int32,
        "top_logprobs": np.float32,
    }
    for name, kind in types.items():
        array = getattr(output, name)
        assert isinstance(array, np.ndarray), name
        assert array.dtype == kind, f"{name} is {array.dtype}"
        assert len(array) == num_logits, f"{name} has {len(array)} rows for {num_logits}"
    assert output.top_ids.shape == output.top_logprobs.shape
    assert output.top_ids.shape[1] >= MAX_LOGPROBS_BOUND
    assert output.is_finite.all()
    assert ((output.token_ids >= 0) & (output.token_ids < vocab_size)).all()
    assert (output.logprobs <= 0).all()


def check_the_last_sampled_token_needs_no_host(bench: Bench) -> None:
    """Four dependent steps, launched before any is read, give what they give with their tokens."""
    outputs = [handle.result() for handle in launch_ahead(bench, stream_on(2, [4, 5]))]
    given = begin(bench, stream_on(2, [8, 9]))
    expected = [bench.run(given.chunk(PROMPT[9:], samples=True))]
    for _ in range(3):
        last = int(expected[-1].token_ids[0])
        expected.append(bench.run(given.chunk([last], samples=True)))
    bench.assert_same(outputs, expected, "tokens taken from the device")


def check_a_row_keeps_its_last_token_while_others_work(bench: Bench) -> None:
    plain = generate(bench, stream_on(1, [2, 3]))
    stream = begin(bench, stream_on(1, [12, 13]))
    outputs = [bench.run(stream.chunk(PROMPT[9:], samples=True))]
    neighbours = [stream_on(row, [14 + row]) for row in (0, 2, 3)]
    for _ in range(3):
        bench.run(*[s.chunk(OTHER[:2], samples=True) for s in neighbours])
        outputs.append(bench.run(stream.next_token()))
    bench.assert_same(outputs, plain, "a row that sat a step out")


def check_steps_run_in_the_order_of_their_launches(bench: Bench) -> None:
    """Four dependent steps are launched, and read backwards."""
    expected = generate(bench, stream_on(2, [8, 9]))
    handles = launch_ahead(bench, stream_on(2, [4, 5]))
    outputs = [handle.result() for handle in reversed(handles)]
    bench.assert_same(outputs[::-1], expected, "results read backwards")


def check_the_page_table_is_remembered(bench: Bench) -> None:
    """Entries that were sent once are as good as entries that are sent with every step."""
    remembered = generate(bench, stream_on(3, [17, 5]))
    stream = stream_on(0, [0, 1])
    told_anew: list[StepOutput] = []
    for tokens in (PROMPT[:9], PROMPT[9:], [LAST_SAMPLED], [LAST_SAMPLED], [LAST_SAMPLED]):
        stream.num_sent_pages = 0
        told_anew.append(bench.run(stream.chunk(tokens, samples=stream.num_computed > 0)))
    bench.assert_same(remembered, told_anew[1:], "a page table that was sent once")


def check_a_changed_page_table_entry_is_used(bench: Bench) -> None:
    """A row reads the page of its newest entry: two prompts on two pages, one question."""
    for page, tokens in ((3, PROMPT[:16]), (4, [*OTHER, *PROMPT[:11]])):
        bench.run(stream_on(1, [page]).chunk(tokens, samples=False))
    answers: list[StepOutput] = []
    for page in (3, 4, 3):
        asking = stream_on(2, [page, 20])
        asking.num_computed = 16
        answers.append(bench.run(asking.chunk([7], samples=True)))
    bench.assert_same([answers[0]], [answers[2]], "the same page asked twice")
    told_apart = answers[0].logprobs[0] != answers[1].logprobs[0]
    assert told_apart, "a changed page-table entry changed nothing"


def check_a_copied_page_is_as_good_as_its_original(bench: Bench) -> None:
    """A stream that shares one page and starts from a copy of another, which goes on without it."""
    plain = generate(bench, stream_on(1, [2, 3]))
    source = begin(bench, stream_on(1, [12, 13]))
    bench.run(source.chunk(PROMPT[9:], samples=True))
    bench.run(source.next_token())
    num_shared = len(PROMPT) - 1
    is_dense = bench.limits.max_pages_per_seq == 1
    fork = stream_on(2, [19] if is_dense else [12, 19])
    fork.num_computed = num_shared
    fork.copies = [
        PageCopy(12, 19, num_shared)
        if is_dense
        else PageCopy(13, 19, num_shared - bench.limits.page_size)
    ]
    outputs = [bench.run(fork.chunk(PROMPT[-1:], samples=True), source.next_token())]
    outputs = [row_of(outputs[0], 1)]
    for _ in range(3):
        outputs.append(row_of(bench.run(fork.next_token(), source.next_token()), 1))
    bench.assert_same(outputs, plain, "a stream on a copied page")


def check_padding_is_harmless(bench: Bench) -> None:
    """Garbage in every padded place changes no output, now or later."""
    plain = generate(bench, stream_on(1, [2, 3]))
    dirty = stream_on(1, [22, 23])
    steps = [dirty.chunk(PROMPT[:9], samples=False), dirty.chunk(PROMPT[9:], samples=True)]
    steps += [dirty.next_token() for _ in range(3)]
    outputs = [bench.runner.launch(soil(bench.inputs(step))).result() for step in steps]
    bench.assert_same(outputs[1:], plain, "garbage in the padding")


def soil(inputs: ModelInputs) -> ModelInputs:
    padding = padding_of(inputs)
    inputs.tokens.ids[padding] = 13
    inputs.tokens.positions[padding] = 5
    unused = slice(inputs.num_logits, None)
    inputs.logits.rows[unused] = 1
    inputs.logits.temperature[unused] = 3.0
    inputs.logits.top_k[unused] = 2
    inputs.logits.top_p[unused] = 0.3
    inputs.logits.keys[unused] = 77
    return inputs


def check_a_rows_result_is_the_same_in_every_row(bench: Bench) -> None:
    expected = generate(bench, stream_on(0, [0, 1]))
    for row in range(1, 4):
        outputs = generate(bench, stream_on(row, [row * 2, row * 2 + 1]))
        bench.assert_same(outputs, expected, f"row {row}")


def check_a_rows_result_is_the_same_in_company(bench: Bench) -> None:
    alone = generate(bench, stream_on(2, [0, 1]))
    stream = stream_on(2, [10, 11])
    others = [stream_on(0, [12, 13]), stream_on(1, [14, 15], Draw()), stream_on(3, [16, 17])]

    def company(length: int) -> list[Chunk]:
        return [s.chunk(OTHER[:length], samples=s.row != 1) for s in others]

    begin(bench, stream, *company(2))
    crowd = [bench.run(stream.chunk(PROMPT[9:], samples=True), *company(1))]
    crowd += [bench.run(stream.next_token(), *company(2 + step)) for step in range(3)]
    own_index = 1  # rows 0, 2 and 3 sample
    own = [row_of(output, own_index) for output in crowd]
    bench.assert_same(own, alone, "a row in company")


def check_a_prompts_chunks_do_not_matter(bench: Bench) -> None:
    expected = generate(bench, stream_on(0, [0, 1]))
    for page, cuts in ((2, [1, 2, 18]), (4, [16]), (6, list(range(5, 20, 5)))):
        stream = stream_on(1, [page, page + 1])
        bounds = [0, *cuts, len(PROMPT)]
        for begin, end in pairwise(bounds):
            is_last = end == len(PROMPT)
            output = bench.run(stream.chunk(PROMPT[begin:end], samples=is_last))
        outputs = [output, *[bench.run(stream.next_token()) for _ in range(3)]]
        bench.assert_same(outputs, expected, f"cuts {cuts}")


def check_the_key_decides_and_greedy_rows_have_none(bench: Bench) -> None:
    def tokens(draw: Draw) -> list[int]:
        stream = stream_on(0, [0, 1], draw)
        return [int(output.token_ids[0]) for output in generate(bench, stream)]

    assert tokens(SAMPLED) == tokens(SAMPLED)
    others = [tokens(replace(SAMPLED, seed=seed)) for seed in range(20, 28)]
    assert any(other != tokens(SAMPLED) for other in others), "the seed changed nothing"
    assert tokens(Draw(seed=1)) == tokens(Draw(seed=2)), "a greedy row followed its seed"


def check_a_row_can_choose_several_tokens_in_a_step(bench: Bench) -> None:
    """Each choice is what a step of its own would have made, and the last one is remembered."""
    alone: list[StepOutput] = []
    for end in (18, 19, 20):
        short = begin(bench, stream_on(1, [end % 3 * 2, end % 3 * 2 + 1]))
        bench.run(short.chunk(PROMPT[9 : end - 1], samples=False))
        alone.append(bench.run(short.chunk(PROMPT[end - 1 : end], samples=True)))
    following = bench.run(short.next_token())
    neighbour = stream_on(3, [22], Draw())
    stream = begin(bench, stream_on(2, [20, 21]), neighbour.chunk(OTHER, samples=True))
    bench.run(stream.chunk(PROMPT[9:16], samples=False))
    several = bench.run(
        stream.chunk(PROMPT[16:], samples=True, num_choices=3), neighbour.next_token()
    )
    bench.assert_same([row_of(several, index) for index in range(3)], alone, "several choices")
    output = bench.run(stream.next_token(), neighbour.next_token())
    bench.assert_same([row_of(output, 0)], [following], "after several choices")


def check_asking_for_log_probabilities_changes_no_token(bench: Bench) -> None:
    if "logprobs" not in bench.runner.capabilities:
        return
    outputs = [
        generate(bench, stream_on(0, [0, 1], replace(SAMPLED, num_logprobs=count)))
        for count in (-1, 0, MAX_LOGPROBS_BOUND)
    ]
    for other in outputs[1:]:
        for one, two in zip(outputs[0], other, strict=True):
            assert np.array_equal(one.token_ids, two.token_ids)
    assert all((output.ranks >= 1).all() for output in outputs[2])


def check_the_mask_of_a_rows_rules_is_replaced_by_itself(bench: Bench) -> None:
    """Bans, penalties and biases of the row stay; the new mask is of this step and the next."""

    def tokens(first: range, then: range | None) -> list[int]:
        row, stream = 1, stream_on(1, [0, 1])
        prompt, params = PROMPT[:9], {"presence_penalty": 1.5, "logit_bias": {71: 9.0}}
        record = record_of(bench, prompt, allowed_token_ids=first, **params)
        chosen: list[int] = []
        for place in range(3):
            chunk = stream.next_token() if place else stream.chunk(prompt, samples=True)
            inputs = bench.inputs(chunk)
            inputs.logits.rule_record[0] = row
            rules = () if place else (RuleUpdate(row, record),)
            masks = masks_of(bench, then) if then is not None and place == 1 else []
            masks = tuple(MaskUpdate(row, row, mask) for mask in masks)
            inputs = replace(inputs, rule_updates=rules, mask_updates=masks)
            chosen.append(int(bench.runner.launch(inputs).result().token_ids[0]))
        return chosen

    low = range(40)
    narrowed = tokens(low, range(70, 72))
    assert narrowed[0] == tokens(low, None)[0]
    assert narrowed[1:] != tokens(low, None)[1:], "the new mask had no effect"
    assert tokens(low, range(70, 72)) == narrowed


def check_a_tokens_hidden_state_follows_from_its_prefix(bench: Bench) -> None:
    """Those of a prompt, computed whole and alone, and in chunks beside rows that need none."""
    size = bench.runner.hidden_size
    if size is None:
        return

    def states(chunk: Chunk, *others: Chunk) -> np.ndarray:
        inputs = bench.inputs(chunk, *others)
        rows = np.flatnonzero(inputs.logits.rows[: inputs.num_logits] == chunk.stream.row)
        inputs = replace(inputs, hidden_rows=rows.astype(np.int32))
        found = bench.runner.launch(inputs).result().hidden
        assert found.dtype == np.float32
        assert found.shape == (len(rows), size)
        return found

    prompt = PROMPT[:12]
    whole = states(stream_on(0, [0, 1]).chunk(prompt, samples=True, num_choices=12))
    assert len(np.unique(whole, axis=0)) == 12, "different prefixes have the same state"
    stream, before, after = stream_on(2, [4, 5]), stream_on(1, [8]), stream_on(3, [9])
    parts = [
        states(
            stream.chunk(prompt[start:end], samples=True, num_choices=end - start),
            before.chunk(OTHER[:2], samples=True, num_choices=2),
            after.chunk(OTHER[:1], samples=True),
        )
        for start, end in pairwise([0, 1, 5, 12])
    ]
    assert np.array_equal(np.concatenate(parts), whole), "hidden states depend on the batch"
    assert not len(bench.run(stream.next_token()).hidden), "states that were not asked for"


def check_each_choice_is_made_from_the_record_that_it_names(bench: Bench) -> None:
    """Three choices of a row with three masks, of which two are behind all rows' records, are those
    of three steps in which the row's own record has the mask; so is the one of the step after."""
    params = {"allowed_token_ids": range(90), "presence_penalty": 1.5, "logit_bias": {71: 2.0}}
    record = record_of(bench, PROMPT[:9], **params)
    masks = masks_of(bench, range(20), range(30, 60), range(55, 90))
    row, extra = 2, bench.limits.max_num_seqs

    def launch(chunk: Chunk, records: list[int], *updates: MaskUpdate) -> list[int]:
        inputs = bench.inputs(chunk)
        inputs.logits.rule_record[: len(records)] = records
        inputs = replace(inputs, rule_updates=(RuleUpdate(row, record),), mask_updates=updates)
        return bench.runner.launch(inputs).result().token_ids.tolist()

    alone: list[int] = []
    for end, mask in zip((18, 19, 20, 20), (*masks, masks[0]), strict=True):
        short = begin(bench, stream_on(row, [0, 1]))
        bench.run(short.chunk(PROMPT[9 : end - 1], samples=False))
        chunk = short.chunk(PROMPT[end - 1 : end], samples=True)
        alone += launch(chunk, [row], MaskUpdate(row, row, mask))
    stream = begin(bench, stream_on(row, [20, 21]))
    bench.run(stream.chunk(PROMPT[9:16], samples=False))
    updates = [MaskUpdate(row, row, masks[0])]
    updates += [MaskUpdate(extra + 5 * place, row, masks[place]) for place in (2, 1)]
    chunk = stream.chunk(PROMPT[16:], samples=True, num_choices=3)
    several = launch(chunk, [row, extra + 5, extra + 10], *updates)
    assert several == alone[:3], "a choice with a record of its own"
    stream.num_computed = 19
    inputs = bench.inputs(stream.chunk(PROMPT[19:], samples=True))
    inputs.logits.rule_record[0] = row
    after = bench.runner.launch(inputs).result().token_ids.tolist()
    assert after == alone[3:], "the row's own record, after others were made of it"


def check_masks_may_follow_a_launch(bench: Bench) -> None:
    """Steps that are launched while the one before is unread, and get the masks of a row when it is
    read, are those of steps that are launched with them; so is the row beside it."""
    if "late_masks" not in bench.runner.capabilities:
        return
    row = 1
    record = record_of(bench, OTHER, allowed_token_ids=range(90), presence_penalty=1.5)
    masks = masks_of(bench, *(range(16 * place, 16 * place + 16) for place in range(5)))

    def run(place: int, chunks: list[Chunk], unread: list[StepHandle], *, follow: bool) -> None:
        inputs = bench.inputs(*chunks)
        inputs.logits.rule_record[0] = row
        rules = () if place else (RuleUpdate(row, record),)
        updates = (MaskUpdate(row, row, masks[place]),)
        inputs = replace(inputs, rule_updates=rules, masks_follow=follow)
        handle = bench.runner.launch(inputs if follow else replace(inputs, mask_updates=updates))
        outputs.extend(each.result() for each in unread)
        if follow:
            assert isinstance(handle, LateStepHandle)
            handle.choose(updates)
        unread[:] = [handle]

    found: list[list[StepOutput]] = []
    for follows in (False, True):
        streams, unread = [stream_on(row, [2, 3]), stream_on(2, [6, 7])], list[StepHandle]()
        outputs = list[StepOutput]()
        for place in range(len(masks)):
            chunks = [s.next_token() if place else s.chunk(OTHER, samples=True) for s in streams]
            run(place, chunks, unread, follow=follows and place > 0)
        found.append(outputs + [each.result() for each in unread])
    bench.assert_same(found[1], found[0], "masks that follow")


def check_a_step_without_its_masks_cannot_be_read(bench: Bench) -> None:
    """It gets them once, and a reset drops it."""
    if "late_masks" not in bench.runner.capabilities:
        return

    def launch() -> LateStepHandle:
        inputs = bench.inputs(stream_on(1, [2]).chunk(OTHER, samples=True))
        handle = bench.runner.launch(replace(inputs, masks_follow=True))
        assert isinstance(handle, LateStepHandle)
        return handle

    handle = launch()
    assert raises_runner_error(handle.result), "read without its masks"
    handle.choose(())
    assert raises_runner_error(lambda: handle.choose(())), "chosen twice"
    check_output(handle.result(), 1, bench.runner.vocab_size)
    dropped = launch()
    bench.runner.reset()
    assert raises_runner_error(lambda: dropped.choose(())), "chosen after a reset"


def raises_runner_error(act: Callable[[], object]) -> bool:
    try:
        act()
    except RunnerError:
        return True
    return False


def check_reset_forgets_everything(bench: Bench) -> None:
    expected = generate(bench, stream_on(0, [0, 1]))
    bench.runner.reset()
    stale = stream_on(0, [0, 1])
    stale.num_computed = len(PROMPT) - 1
    output = bench.run(stale.chunk(PROMPT[-1:], samples=True))
    remembered = output.is_finite[0] and output.logprobs[0] == expected[0].logprobs[0]
    assert not remembered, "KV outlived a reset"
    bench.runner.reset()
    bench.assert_same(generate(bench, stream_on(0, [0, 1])), expected, "after a reset")


CHECKS: dict[str, Callable[[Bench], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_") and name != "check_output"
}
