"""Embeddings of compiled models: a prompt's bits in any batch, and the model's own states."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cadenza.backends.xla.ops.reference import OpTable
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.events import Finished
from cadenza.models.declaration import HEAD
from cadenza.request import Pooling, PoolingParams, Request, SamplingParams
from cadenza.weights.weights import Weights
from tests.by_day import by_day
from tests.xla.harness import BASE, REFERENCE, Lab, Mode, Variant

VARIANTS = {
    "served": BASE,
    "served, bfloat16": replace(BASE, dtype="bfloat16"),
    "reference": REFERENCE,
    "reference, bfloat16": replace(REFERENCE, dtype="bfloat16"),
}
POOLINGS: tuple[Pooling, ...] = ("last", "mean")
LENGTHS = (1, 5, 40, 63, 150)
PROMPTS = [np.random.default_rng(length).integers(3, 211, length).tolist() for length in LENGTHS]
MODES = {
    "plain loop, small chunks": Mode(budget=9, loop="plain"),
    "preempted": Mode(num_pages=21, reserved_output=0.0),
    "without a prefix cache": Mode(caching=False),
    "one by one": Mode(arrival_seed=3),
}


def pooled(prompt: Sequence[int], pooling: Pooling) -> Request:
    params = PoolingParams(pooling=pooling)
    return Request(prompt_token_ids=tuple(prompt), pooling=params)


REQUESTS = [pooled(prompt, pooling) for prompt in PROMPTS for pooling in POOLINGS]
NEIGHBOURS = [
    Request(
        prompt_token_ids=tuple(PROMPTS[-1][: 30 + 9 * at]),
        params=SamplingParams(max_tokens=60, seed=at, ignore_eos=True, prompt_logprobs=at % 2),
    )
    for at in range(4)
]


def embeddings(lab: Lab, variant: Variant, requests: list[Request], mode: Mode) -> list[bytes]:
    limits = mode.limits(variant.limits)
    options = CoreOptions(loop=mode.loop, reserved_output=mode.reserved_output)
    engine = EngineCore(lab.runner(variant), limits, options)
    arrivals = mode.arrivals(len(requests))
    ids: list[int] = []
    found: dict[int, bytes] = {}
    for step in range(3000):
        ids += [engine.submit(requests[at]) for at, due in enumerate(arrivals) if due == step]
        for event in engine.step():
            if isinstance(event, Finished) and event.embedding is not None:
                found[event.request_id] = event.embedding
        engine.check_invariants()
        if len(ids) == len(requests) and engine.is_idle:
            break
    else:
        raise AssertionError("the engine did not come to an end")
    if mode is MODES["preempted"]:
        assert engine.scheduler.num_preemptions > 0
    order = sorted(range(len(requests)), key=lambda at: (arrivals[at], at))
    by_place = {place: found[request_id] for place, request_id in zip(order, ids, strict=True)
                if request_id in found}  # fmt: skip
    return [by_place[at] for at, each in enumerate(requests) if each.pooling is not None]


def alone(lab: Lab, variant: Variant) -> list[bytes]:
    return [embeddings(lab, variant, [each], Mode())[0] for each in REQUESTS]


@pytest.mark.parametrize("name", by_day(VARIANTS, {*VARIANTS} - {"reference, bfloat16"}))
def test_an_embedding_has_the_same_bits_alone_and_in_any_batch(lab: Lab, name: str) -> None:
    variant = VARIANTS[name]
    expected = alone(lab, variant)
    assert len(set(expected)) == 2 * len(PROMPTS) - 1, "of one token, the mean is the last"
    mixed = [*NEIGHBOURS[:2], *REQUESTS[:5], *NEIGHBOURS[2:], *REQUESTS[5:]]
    for label, mode in MODES.items():
        assert embeddings(lab, variant, mixed, mode) == expected, label


class AddsTheRowsNeighbour(OpTable):
    name = "leaking"

    def take_logit_rows(self, x: Any, step: Any) -> Any:
        rows = super().take_logit_rows(x, step)
        return rows.at[1:].add(rows[:-1] * 1e-3)


def test_a_row_that_sees_its_neighbour_would_be_found_out(lab: Lab) -> None:
    variant = replace(REFERENCE, ops=AddsTheRowsNeighbour)
    expected = [embeddings(lab, variant, [each], Mode())[0] for each in REQUESTS[:4]]
    assert embeddings(lab, variant, [*NEIGHBOURS, *REQUESTS[:4]], Mode()) != expected


@pytest.mark.parametrize("name", by_day(["served", "reference"], {"served"}))
def test_the_state_of_the_last_token_gives_the_witness_logits(lab: Lab, name: str) -> None:
    """Its direction, since an embedding has unit length: logits are the head's products with it."""
    variant = VARIANTS[name]
    head, witness = head_of(lab.weights(variant.shape)), lab.reference_model(variant)
    for prompt in PROMPTS:
        found = embeddings(lab, variant, [pooled(prompt, "last")], Mode())[0]
        products = head @ np.frombuffer(found, "<f4").astype(np.float64)
        witness.start()
        logits = witness.append(list(prompt)).astype(np.float64)
        cosine = products @ logits / np.linalg.norm(products) / np.linalg.norm(logits)
        assert cosine > 1 - 1e-9


def head_of(weights: Weights) -> np.ndarray:
    return np.asarray(weights.array(HEAD), np.float64)
