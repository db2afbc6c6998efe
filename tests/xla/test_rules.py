"""Penalties, biases, bans and masks: the definition and the kernels against the plain reference.

The reference loops over lists; the definition scatters over the vocabulary; the kernels walk pages.
Replays: a batch is a function of its seed, which its test's message shows.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.token_choice import (
    COLUMN_STATE,
    COLUMN_TOKEN,
    COLUMN_TOP,
    STATE_CHOSEN,
    STATE_NONE_ALLOWED,
    STATE_NOT_FINITE,
)
from cadenza.backends.xla.ops.native_library import has_native_library
from cadenza.backends.xla.ops.reference import OpTable, apply_rules
from cadenza.backends.xla.ops.table import DecoderSpec, StepArrays
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.request import Request, SamplingParams
from cadenza.verification.reference import choose_token
from tests.xla.harness import HOSTILE
from tests.xla.rules import PAGE_SIZE, RuledRow, random_row, step_of
from tests.xla.test_sampling import is_on_the_edge

VOCAB_SIZES = (23, 331)
ROWS, BATCHES = 40, 25
SEEING = named_shape("tiny-smolvlm").vision
FILTERS = ("top_k", "top_p", "min_p", "top_n_sigma")
OPS = ["reference", pytest.param("native", marks=pytest.mark.native)]

Choose = Callable[..., np.ndarray]

apply_on_device = jax.jit(apply_rules, static_argnums=2)


@cache  # for a table and a vocabulary is compiled once
def chooser(name: str, vocab_size: int, placeholder: int | None = None) -> Choose:
    model = replace(HOSTILE, vocab_size=vocab_size)
    if placeholder is not None:
        assert SEEING is not None
        model = replace(model, vision=replace(SEEING, image_token_id=placeholder))
    spec = DecoderSpec(model=model, dtype=jnp.float32, page_size=PAGE_SIZE)
    ops = OpTable(spec)
    if name == "native":
        if not has_native_library():
            pytest.skip("no native library")
        from cadenza.backends.xla.ops.native import NativeOps

        ops = NativeOps(spec)
    identity = ops.load_linear([np.eye(vocab_size, dtype=np.float32)], [])
    compiled = jax.jit(ops.next_tokens)

    def choose(rows: list[RuledRow], step: StepArrays | None = None) -> np.ndarray:
        logits = np.stack([row.logits for row in rows])
        return np.asarray(compiled(logits, identity, step_of(rows) if step is None else step))

    return choose


def batches(vocab_size: int, count: int = BATCHES):
    for seed in range(count):
        rng = np.random.default_rng([vocab_size, seed, 77])
        yield seed, [random_row(rng, vocab_size) for _ in range(ROWS)]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_definition_leaves_the_logits_that_the_reference_leaves(vocab_size: int):
    for seed, rows in batches(vocab_size):
        logits = np.stack([row.logits for row in rows])
        ours = np.asarray(apply_on_device(logits, step_of(rows), PAGE_SIZE))
        theirs = np.stack([row.ruled() for row in rows])
        assert np.array_equal(np.isneginf(ours), np.isneginf(theirs)), f"batch {seed}"
        allowed = ~np.isneginf(theirs)
        assert np.allclose(ours[allowed], theirs[allowed], rtol=1e-6, atol=1e-5), f"batch {seed}"


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("name", OPS)
def test_thousands_of_ruled_rows_choose_what_the_reference_chooses(name: str, vocab_size: int):
    choose = chooser(name, vocab_size)
    num_rows = num_other = num_empty = 0
    for seed, rows in batches(vocab_size):
        result = choose(rows)
        for row, out in zip(rows, result, strict=True):
            ruled, params = row.ruled(), row.request.params
            num_rows += 1
            if np.isneginf(ruled).all():
                num_empty += 1
                assert out[COLUMN_STATE] == STATE_NONE_ALLOWED, f"batch {seed}: {params}"
                continue
            assert out[COLUMN_STATE] == STATE_CHOSEN
            assert not np.isneginf(ruled[out[COLUMN_TOKEN]]), f"batch {seed}: a banned token"
            expected = choose_token(ruled, params, seed=row.seed, position=row.length)
            if out[COLUMN_TOKEN] != expected:
                num_other += 1
                assert is_a_toss_up(ruled, params, int(out[COLUMN_TOKEN]), expected), (seed, params)
    assert num_rows >= 1000
    assert num_empty > 0
    assert num_other <= num_rows // 200, f"{num_other} of {num_rows} rows differ"


def is_a_toss_up(ruled: np.ndarray, params: SamplingParams, ours: int, theirs: int) -> bool:
    if params.is_greedy:
        return bool(abs(ruled[ours] - ruled[theirs]) <= 1e-5)
    return is_on_the_edge(ruled / np.float32(params.temperature), params)


@pytest.mark.parametrize("name", OPS)
def test_a_ruled_row_has_the_same_bits_alone_and_in_company(name: str):
    choose = chooser(name, 331)
    for _, quiet in batches(331, 3):
        rows = [with_params(row, logprobs=20) for row in quiet]
        together = choose(rows)
        order = np.random.default_rng(5).permutation(ROWS)
        shuffled = choose([rows[i] for i in order])
        assert np.array_equal(together[order], shuffled)
        for index in range(0, ROWS, 7):
            assert np.array_equal(choose([rows[index]] * ROWS)[3], together[index])


@pytest.mark.parametrize("name", OPS)
def test_rules_change_no_bit_of_rows_without_any(name: str):
    choose = chooser(name, 331)
    rows = [with_params(row, logprobs=20) for row in next(batches(331))[1]]
    bare = Request(prompt_token_ids=(1,), params=SamplingParams(logprobs=20))
    plain = [replace(row, request=bare) for row in rows]
    mixed = [rows[i] if i % 2 else plain[i] for i in range(ROWS)]
    assert np.array_equal(choose(plain)[::2], choose(mixed)[::2])
    assert not np.array_equal(choose(plain)[1::2], choose(mixed)[1::2])


@pytest.mark.parametrize("placeholder", [0, 200, 330])
@pytest.mark.parametrize("name", OPS)
def test_a_placeholder_is_no_candidate_of_any_row(name: str, placeholder: int):
    """Whatever a row asks for, it chooses as if the vocabulary lacked the placeholder, likely as it
    may be. Half of the rows have no rules, and so the results of the fast path."""
    choose, plain = chooser(name, 331, placeholder), chooser(name, 331)
    for seed, rows in batches(331, 6):
        seeing = [
            likely(row if place % 2 else bare(row), placeholder, place)
            for place, row in enumerate(rows)
        ]
        result, free = choose(seeing), plain(seeing)
        for row, out in zip(seeing, result, strict=True):
            ruled, params = row.ruled(), row.request.params
            ruled[placeholder] = -np.inf
            if np.isneginf(ruled).all():
                assert out[COLUMN_STATE] == STATE_NONE_ALLOWED
                continue
            assert out[COLUMN_STATE] == STATE_CHOSEN
            expected = choose_token(ruled, params, seed=row.seed, position=row.length)
            found = int(out[COLUMN_TOKEN])
            is_other = found != expected
            assert not np.isneginf(ruled[found]), f"batch {seed}: {params}"
            assert not is_other or is_a_toss_up(ruled, params, found, expected), (seed, params)
        tops = slice(COLUMN_TOP, None)
        assert np.array_equal(result[:, tops], free[:, tops]), "log probabilities are of all tokens"
        assert (free[:, COLUMN_TOKEN] == placeholder).sum() > ROWS // 4, "it is likely"
        assert np.array_equal(choose(seeing[::-1])[::-1], result)


def likely(row: RuledRow, token_id: int, place: int) -> RuledRow:
    logits = row.logits.copy()
    logits[token_id] = -60.0 if place % 8 == 7 else 30.0
    row = replace(row, logits=logits)
    return with_params(row, logit_bias={token_id: 100.0}) if place % 6 == 5 else row


def bare(row: RuledRow) -> RuledRow:
    params = row.request.params
    own = {name: getattr(params, name) for name in ("temperature", "seed", *FILTERS, "logprobs")}
    return replace(row, request=Request(prompt_token_ids=(1,), params=SamplingParams(**own)))


@pytest.mark.parametrize("name", OPS)
def test_log_probabilities_are_of_the_model_and_not_of_the_rules(name: str):
    choose = chooser(name, 23)
    for _, rows in batches(23, 4):
        loud = [with_params(row, logprobs=20) for row in rows]
        result = choose(loud)
        for row, out in zip(loud, result, strict=True):
            exact = row.logits - np.log(np.exp(row.logits.astype(np.float64)).sum())
            found = out[2:3].view(np.float32)[0]
            assert abs(found - exact[out[COLUMN_TOKEN]]) < 1e-4
        quiet = choose([with_params(row, logprobs=None) for row in rows])
        assert np.array_equal(quiet[:, :2], result[:, :2]), "asking changed a token"


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_logit_of_a_ruled_row_harms_that_row_alone(name: str, value: float):
    choose = chooser(name, 331)
    rows = next(batches(331))[1]
    healthy = choose(rows)
    spoilt = list(rows)
    for index in (4, 9):
        logits = rows[index].logits.copy()
        logits[7] = value
        spoilt[index] = replace(rows[index], logits=logits)
    result = choose(spoilt)
    others = np.setdiff1d(np.arange(ROWS), [4, 9])
    assert (result[[4, 9], COLUMN_STATE] == STATE_NOT_FINITE).all()
    assert np.array_equal(result[others], healthy[others])


@pytest.mark.parametrize("name", OPS)
def test_a_target_is_reported_instead_of_a_choice(name: str):
    choose = chooser(name, 331)
    rows = [with_params(row, logprobs=5) for row in next(batches(331))[1]]
    step = step_of(rows)
    targets = np.where(np.arange(ROWS) % 2, np.arange(ROWS) * 3, -1).astype(np.int32)
    aimed = step._replace(logits=replace(step.logits, targets=jnp.asarray(targets)))
    plain, result = choose(rows), choose(rows, aimed)
    assert np.array_equal(result[1::2, COLUMN_TOKEN], targets[1::2])
    assert np.array_equal(result[::2], plain[::2])
    for row, out in list(zip(rows, result, strict=True))[1::2]:
        exact = row.logits - np.log(np.exp(row.logits.astype(np.float64)).sum())
        assert abs(out[2:3].view(np.float32)[0] - exact[out[COLUMN_TOKEN]]) < 1e-3


def with_params(row: RuledRow, **changes: object) -> RuledRow:
    params = replace(row.request.params, **changes)  # type: ignore[arg-type]
    return replace(row, request=replace(row.request, params=params))


OPTIONS: dict[str, dict[str, object]] = {
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "logit_bias": {"logit_bias": {5: 3.0}},
    "allowed_token_ids": {"allowed_token_ids": (1, 4)},
    "min_tokens": {"min_tokens": 50},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_alone_changes_the_logits(option: str):
    """The comparison with the reference could not pass by doing nothing."""
    logits = np.linspace(-3, 3, 23).astype(np.float32)
    params = SamplingParams(max_tokens=None, **OPTIONS[option])  # type: ignore[arg-type]
    request = Request(prompt_token_ids=(20, 21), params=params)
    row = RuledRow(request=request, generated=[1, 20], logits=logits)
    changed = np.asarray(apply_on_device(logits[None], step_of([row]), PAGE_SIZE))[0]
    assert not np.array_equal(changed, logits)
