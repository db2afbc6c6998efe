"""The gate has teeth: over each mutant op table the solo-exact comparison turns red.

Alone, in a pool of zeros, mutants give the reference engine's tokens: only the comparison with what
a request gives in company, in a pool full of NaN, tells them apart. Over the reference table the
same comparison is green. `cadenza verify --self-test` relies on the same mutants.
"""

from dataclasses import replace

import numpy as np
import pytest

from cadenza.backends.xla.mutants import MUTANTS, MultipliedPadding, RelativeBlocks
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.request import Request
from tests.xla.harness import (
    BASE,
    REFERENCE,
    Lab,
    Mode,
    Stream,
    Variant,
    poison,
    random_requests,
    replay,
    serve,
    shout,
)

MODE = Mode(arrival_seed=91, caching=False, num_pages=40, reserved_output=0.0)
NO_SLOTS = np.empty(0, np.int64)


def workload() -> list[Request]:
    return [shout(r) for r in random_requests(92, 10, BASE, longest_output=30)]


def variant_of(ops: type[OpTable]) -> Variant:
    return replace(REFERENCE, ops=ops)


def serve_in_clean_pool(lab: Lab, variant: Variant, request: Request) -> Stream:
    runner = lab.runner(variant)
    poison(runner, NO_SLOTS, 0.0)
    return serve(runner, variant, [request], Mode(loop="plain")).streams[0]


def find_divergence(lab: Lab, variant: Variant) -> str | None:
    requests = workload()
    together = serve(lab.runner(variant), variant, requests, MODE).streams
    for index, request in enumerate(requests):
        difference = together[index].difference(serve_in_clean_pool(lab, variant, request))
        if difference is not None:
            return f"request {index}: {difference}"
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_the_gate_turns_red_over(lab: Lab, name: str):
    replay("seed 92, 10 requests")
    divergence = find_divergence(lab, variant_of(MUTANTS[name]))
    assert divergence is not None


def test_the_gate_is_green_over_the_reference_table(lab: Lab):
    assert find_divergence(lab, variant_of(OpTable)) is None


@pytest.mark.parametrize("ops", [RelativeBlocks, MultipliedPadding])
def test_alone_the_mutant_gives_the_reference_engines_tokens(lab: Lab, ops: type[OpTable]):
    variant = variant_of(ops)
    reference = lab.reference(REFERENCE)
    for request in workload():
        stream = serve_in_clean_pool(lab, variant, request)
        assert stream.token_ids == reference.run(request).token_ids
