"""Tokens of sparse prompts in a step: their rope positions and windows are those of their places in
the prompt, and tokens at their own places have the bits of a runner that knows of none."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.runner import XlaRunner
from cadenza.models.layer_kind import LayerKind
from cadenza.sparse_prefill import KeptTokens
from tests.contract.steps import Draw, Geometry, Stream, build_inputs
from tests.xla.harness import BASE, REFERENCE, Lab, Variant, slots_of, slots_of_pool

WINDOW = 24
KEPT = KeptTokens(num_prompt_tokens=300, chunks=(0, 1, 4, 9))  # 108 tokens, the last chunk of 12
WHOLE = np.random.default_rng(3).integers(3, 211, KEPT.num_prompt_tokens).tolist()
PROMPT = list(KEPT.of_prompt(WHOLE))
PAGES = list(range(8, 0, -1))
GEOMETRY = Geometry(bucket=64, num_rows=8, page_size=16)
DRAW = Draw(num_logprobs=20)


def runner_of(lab: Lab, variant: Variant, *, is_sparse: bool = True) -> XlaRunner:
    model = replace(variant.config, layer_pattern=(LayerKind(window=WINDOW), LayerKind()))
    setup = replace(variant.setup, capabilities=frozenset({"sparse_prompts"} if is_sparse else ()))
    runner = XlaRunner(model, lab.weights(variant.shape), setup, variant.ops)
    runner.warmup()
    return runner


def play(
    runner: XlaRunner,
    cuts: Sequence[int] = (64,),
    *,
    kept: KeptTokens | None = None,
    row: int = 0,
    company: bool = False,
) -> list[npt.NDArray[np.int32]]:
    runner.reset()
    stream = Stream(row=row, pages=PAGES, draw=DRAW)
    other = Stream(row=7 - row, pages=list(range(20, 36)))
    found: list[npt.NDArray[np.int32]] = []
    parts = [PROMPT[a:b] for a, b in zip((0, *cuts), (*cuts, len(PROMPT)), strict=True)]
    for number in range(len(parts) + 2):
        is_last = number >= len(parts) - 1
        chunks = [
            stream.chunk(parts[number], samples=is_last)
            if number < len(parts)
            else stream.next_token()
        ]
        if company:
            chunks.append(other.chunk(range(5, 9 + 4 * (number % 3)), samples=True))
        inputs = build_inputs(chunks, GEOMETRY)
        if kept is not None:
            begin, end = inputs.rows.query_starts[row], inputs.rows.query_starts[row + 1]
            first = int(inputs.tokens.positions[begin])
            indices = kept.indices(first, first + end - begin)
            inputs.tokens.rope_positions[begin:end] = np.array(indices)[:, None]
            inputs.tokens.window_starts[begin:end] = [
                kept.first_position_from(max(0, index - WINDOW + 1)) for index in indices
            ]
        rows = runner.launch(inputs).rows()
        used = inputs.logits.rows[: inputs.num_logits].tolist()
        if is_last:
            found.append(rows[used.index(row)])
    return found


def logprobs(rows: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32]:
    return np.stack(rows)[:, -20:].view(np.float32)


@pytest.mark.parametrize("variant", [BASE, replace(REFERENCE, shape="two layers of hostile")])
def test_tokens_at_their_own_places_have_the_bits_of_a_plain_runner(lab: Lab, variant: Variant):
    whole = KeptTokens(num_prompt_tokens=len(PROMPT), chunks=(0, 1, 2, 3))
    with closing(runner_of(lab, variant, is_sparse=False)) as plain:
        expected = play(plain)
        assert np.array_equal(play(plain, kept=KEPT), expected), "it reads none of them"
    with closing(runner_of(lab, variant)) as runner:
        assert "sparse_prompts" in runner.capabilities
        assert np.array_equal(play(runner), expected)
        assert np.array_equal(play(runner, kept=whole), expected)
        assert not np.array_equal(play(runner, kept=KEPT), expected)


def test_the_keys_of_kept_tokens_are_those_of_their_places_in_the_prompt(lab: Lab):
    variant = replace(BASE, shape="one layer of hostile")
    with closing(runner_of(lab, variant, is_sparse=False)) as plain:
        stream = Stream(row=0, pages=list(range(19)))
        for start in range(0, len(WHOLE), 64):
            chunk = stream.chunk(WHOLE[start : start + 64], samples=False)
            plain.launch(build_inputs([chunk], GEOMETRY)).result()
        expected = slots_of_pool(plain)[0][KEPT.indices(0, len(PROMPT))]
    with closing(runner_of(lab, variant)) as runner:
        play(runner, kept=KEPT)
        found = slots_of_pool(runner)[0][slots_of(PAGES, len(PROMPT), 16)]
    assert found.tobytes() == expected.tobytes()


def test_a_sparse_prompt_has_the_same_bits_however_it_is_cut_and_whoever_is_beside_it(lab: Lab):
    with closing(runner_of(lab, BASE)) as runner:
        expected = play(runner, kept=KEPT)
        for cuts in ((1, 33, 65), (32, 64, 96), (40, 80, 107)):
            for row, company in ((0, False), (3, True)):
                found = play(runner, cuts, kept=KEPT, row=row, company=company)
                assert np.array_equal(found, expected)


def test_kernels_and_the_definition_agree_on_a_sparse_prompt(lab: Lab):
    small = replace(BASE, shape="two layers of hostile")
    with closing(runner_of(lab, small)) as runner:
        found = play(runner, kept=KEPT)
    with closing(runner_of(lab, replace(small, ops=OpTable))) as runner:
        defined = play(runner, kept=KEPT)
    assert [row[0] for row in found] == [row[0] for row in defined]
    np.testing.assert_allclose(logprobs(found), logprobs(defined), atol=2e-5)
