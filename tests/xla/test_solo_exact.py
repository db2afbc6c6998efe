"""Bar 10: whatever shares its batch, a stream is what the same request gives alone.

Served together (random arrivals, token budgets, cache hits, preemption, both loops) against served
alone, bitwise in tokens and in twenty log probabilities a token; and against `ReferenceEngine` in
tokens. Within one compiled T, since another T is another program.
"""

from dataclasses import replace

import numpy as np
import pytest

from cadenza.batch.step_schema import LAST_SAMPLED
from cadenza.config import SchedulerLoop
from cadenza.request import Request
from cadenza.verification.reference import choose_token
from tests.by_day import by_day
from tests.xla.harness import (
    BASE,
    REFERENCE,
    Lab,
    Mode,
    Variant,
    random_requests,
    replay,
    serve,
    serve_alone,
    shout,
)
from tests.xla.recording import RecordingRunner

MODES = {
    "ample": Mode(arrival_seed=1),
    "plain_loop": Mode(arrival_seed=2, loop="plain"),
    "without_cache": Mode(arrival_seed=3, caching=False),
    "smallest_chunks": Mode(arrival_seed=4, budget=8),
    "odd_chunks": Mode(arrival_seed=5, budget=23),
    "tiny_pool": Mode(arrival_seed=6, num_pages=22, reserved_output=0.0),
    "tiny_pool_plain_small_chunks": Mode(
        budget=17, num_pages=22, loop="plain", reserved_output=0.0
    ),
}
VARIANTS = {
    "t_64": BASE,
    "qwen3": Variant(shape="tiny-qwen3", bucket=32, num_rows=5),
    "bfloat16": replace(BASE, dtype="bfloat16"),
    "kv_int8": replace(BASE, kv_cache_dtype="int8"),
    "reference": REFERENCE,
    "reference_bfloat16_kv_int8": replace(REFERENCE, dtype="bfloat16", kv_cache_dtype="int8"),
    "t_8": replace(BASE, bucket=8),
    "t_33": replace(BASE, bucket=33),
}
NEAR_TIE = 5e-5


def check_solo_exact(lab: Lab, variant: Variant, requests: list[Request], mode: Mode):
    served = serve(lab.runner(variant), variant, requests, mode)
    for index, request in enumerate(requests):
        difference = served.streams[index].difference(serve_alone(lab, variant, request))
        assert difference is None, f"request {index} in {mode}: {difference}"
    return served


@pytest.mark.parametrize("name", MODES)
def test_streams_served_together_are_bitwise_those_served_alone(lab: Lab, name: str):
    replay("seed 7, 60 requests")
    mode = MODES[name]
    requests = [shout(r) for r in random_requests(7, 60, BASE, longest_output=40)]
    served = check_solo_exact(lab, BASE, requests, mode)
    assert served.num_admitted_midstream, "nobody was admitted while others decoded"
    assert bool(served.num_cached_tokens) == mode.caching, "the cache was not hit, or was off"
    if mode.num_pages:
        assert served.num_preemptions > 5, "the tiny pool preempted next to nobody"


@pytest.mark.parametrize("name", by_day(list(VARIANTS)[1:], {*VARIANTS} - {"t_8", "t_33"}))
def test_streams_are_solo_exact_at_other_sizes_shapes_types_and_operations(lab: Lab, name: str):
    replay("seed 8, 16 requests")
    variant = VARIANTS[name]
    requests = [shout(r) for r in random_requests(8, 16, variant)]
    check_solo_exact(lab, variant, requests, Mode(arrival_seed=9))


@pytest.mark.parametrize(
    "name", by_day(["t_64", "qwen3", "reference", "t_8", "t_33"], {"t_64", "qwen3"})
)
def test_tokens_equal_the_reference_engines(lab: Lab, name: str):
    replay("seed 10, 24 requests")
    variant = VARIANTS[name]
    requests = random_requests(10, 24, variant)
    served = serve(lab.runner(variant), variant, requests, Mode(arrival_seed=11))
    reference = lab.reference(variant)
    for index, request in enumerate(requests):
        expected = reference.run(request)
        stream = served.streams[index]
        assert stream.token_ids == expected.token_ids, f"request {index}: {request.params}"
        assert stream.finish_reason == expected.finish_reason
        if request.params.logprobs is not None:
            logprobs = [token.logprobs.logprob for token in stream.tokens if token.logprobs]
            assert np.allclose(logprobs, expected.logprobs, rtol=0, atol=1e-4)


def test_asking_for_log_probabilities_changes_no_token_of_anybody(lab: Lab):
    replay("seed 12, 24 requests")
    requests = random_requests(12, 24, BASE)
    silent = [replace(r, params=replace(r.params, logprobs=None)) for r in requests]
    runs = [
        serve(lab.runner(), BASE, workload, Mode(arrival_seed=13)).streams
        for workload in (silent, [shout(r) for r in requests])
    ]
    assert [s.token_ids for s in runs[0]] == [s.token_ids for s in runs[1]]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_requests_are_solo_exact_in_every_mode(lab: Lab, seed: int):
    requests = [shout(r) for r in random_requests(100 + seed, 250, BASE, longest_output=60)]
    replay(f"seed {100 + seed}, 250 requests")
    for mode in MODES.values():
        check_solo_exact(lab, BASE, requests, replace(mode, arrival_seed=seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_requests_equal_the_reference_engines_tokens(lab: Lab, seed: int):
    """Two roundings may choose differently only where the reference's own choice is a near tie."""
    replay(f"seed {200 + seed}, 250 requests")
    requests = random_requests(200 + seed, 250, BASE)
    served = serve(lab.runner(), BASE, requests, Mode(arrival_seed=seed))
    reference = lab.reference()
    near_ties = 0
    for index, request in enumerate(requests):
        ours, theirs = served.streams[index].token_ids, reference.run(request).token_ids
        if ours != theirs:
            near_ties += 1
            assert diverges_in_a_near_tie(lab, request, ours, theirs), f"request {index}"
    assert near_ties <= 2, f"{near_ties} of 250 requests diverge in near ties"


def diverges_in_a_near_tie(
    lab: Lab, request: Request, ours: tuple[int, ...], theirs: tuple[int, ...]
) -> bool:
    """Whether logits within NEAR_TIE of the reference's make it choose our first other token."""
    eos = BASE.config.eos_token_ids[0]
    pairs = zip((*ours, eos), (*theirs, eos), strict=False)
    index = next(i for i, (our, their) in enumerate(pairs) if our != their)
    model = lab.reference_model()
    model.start()
    prompt = list(request.prompt_token_ids)
    logits = model.append(prompt + list(theirs[:index]))
    position = len(prompt) + index
    seed = request.params.seed or 0
    rng = np.random.default_rng(0)
    shakes = rng.choice([-NEAR_TIE, NEAR_TIE], (256, len(logits))).astype(np.float32)
    choices = {
        choose_token(logits + shake, request.params, seed=seed, position=position)
        for shake in shakes
    }
    return (*ours, eos)[index] in choices


def test_a_true_divergence_is_not_taken_for_a_near_tie(lab: Lab):
    request = random_requests(10, 1, BASE)[0]
    theirs = lab.reference().run(request).token_ids
    wrong = ((theirs[0] + 1) % BASE.config.vocab_size, *theirs[1:])
    assert not diverges_in_a_near_tie(lab, request, wrong, theirs)


def record(lab: Lab, requests: list[Request], loop: SchedulerLoop) -> RecordingRunner:
    runner = RecordingRunner(lab.runner())
    serve(runner, BASE, requests, Mode(loop=loop, arrival_seed=61))
    return runner


def launched_ahead(trace: list[tuple[str, int]]) -> list[int]:
    order = {event: index for index, event in enumerate(trace)}
    return [
        step
        for kind, step in trace
        if kind == "launch"
        and ("launch", step - 1) in order
        and order["launch", step] < order["read", step - 1]
    ]


@pytest.mark.parametrize("seed", range(62, 66))
def test_the_overlapped_loop_gives_the_plain_loops_streams(lab: Lab, seed: int):
    replay(f"seed {seed}, 12 requests")
    requests = [shout(r) for r in random_requests(seed, 12, BASE)]
    streams = [
        serve(lab.runner(), BASE, requests, Mode(loop=loop, arrival_seed=seed)).streams
        for loop in ("plain", "overlap")
    ]
    for index, (plain, overlapped) in enumerate(zip(*streams, strict=True)):
        assert plain.difference(overlapped) is None, f"request {index}"


def test_the_overlapped_loop_launches_a_step_before_the_last_one_is_read(lab: Lab):
    runner = record(lab, random_requests(66, 8, BASE), "overlap")
    num_steps = len(runner.inputs)
    assert len(launched_ahead(runner.trace)) > 0.8 * num_steps
    reads = [step for kind, step in runner.trace if kind == "read"]
    assert reads == sorted(reads), "steps were read out of order"


def test_a_step_launched_ahead_takes_its_tokens_from_the_device(lab: Lab):
    runner = record(lab, random_requests(66, 8, BASE), "overlap")
    ahead = set(launched_ahead(runner.trace))
    decodes = [i for i in runner.inputs if i.step_id in ahead and i.num_tokens == i.num_logits]
    assert decodes
    for inputs in decodes:
        assert LAST_SAMPLED in inputs.tokens.ids[: inputs.num_tokens]


def test_the_plain_loop_reads_every_step_before_the_next_launch(lab: Lab):
    """The trace can tell the loops apart."""
    runner = record(lab, random_requests(66, 8, BASE), "plain")
    assert launched_ahead(runner.trace) == []
