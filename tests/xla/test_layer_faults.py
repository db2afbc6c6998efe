"""Faults of one kind of layer each: the solo-exact comparison turns red, over the kernels that
serve, and alone nothing is changed."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

from cadenza.backends.xla.mutants import LAYER_FAULTS, LayerFault
from tests.xla.harness import BASE, Lab, Mode, Variant, random_requests, serve, serve_alone, shout

# Of each kind of layer, a shape that has it.
SHAPES: Mapping[str, str] = {
    "sliding windows": "tiny-gpt-oss",
    "attention sinks": "tiny-gpt-oss",
    "experts": "tiny-gpt-oss",
    "latents": "tiny-deepseek-v3",
    "shared KV": "tiny-gemma4",
    "per-layer embeddings": "tiny-gemma4",
}


def variant_of(fault: LayerFault) -> Variant:
    variant = replace(BASE, shape=SHAPES[fault.layers], num_rows=4)
    assert fault.is_in(variant.config)
    return variant


@pytest.mark.parametrize("fault", LAYER_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_one_kind_of_layer_is_seen_in_company_alone(lab: Lab, fault: LayerFault):
    sound = variant_of(fault)
    faulty = replace(sound, ops=partial(fault.planted, sound.ops))
    requests = [shout(each) for each in random_requests(93, 6, sound, longest_output=12)]
    mode = Mode(arrival_seed=94, caching=False)
    alone = [serve_alone(lab, sound, each) for each in requests]

    def differ(variant: Variant) -> bool:
        streams = serve(lab.runner(variant), variant, requests, mode).streams
        pairs = zip(streams, alone, strict=True)
        return any(one.difference(other) for one, other in pairs)

    assert not differ(sound), "the control"
    assert differ(faulty)
    if fault.layers != "experts":  # of the step's next token, which is its own prompt's
        runner = lab.runner(faulty)
        again = serve(runner, faulty, requests[:1], Mode(caching=False, loop="plain")).streams[0]
        assert again.difference(alone[0]) is None
