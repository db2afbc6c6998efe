"""The scores of prompts: their definition in float64, and bits that depend on a row's tokens alone.

Legend: L layers · Hq/Hkv heads · D head size · Q queries · n tokens of a prompt.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from cadenza.backends.base import PromptScorer
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.runner import XlaRunner
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import RunnerError
from cadenza.sparse_prefill import LOOK_AHEAD, POOL
from tests.contract.steps import Chunk, Geometry, Stream, build_inputs
from tests.oracle.numpy_decoder import Float64Array
from tests.oracle.numpy_mtp import NumpyMTP
from tests.xla.harness import BASE, Lab, Variant

FIXTURES = Path(__file__).parent.parent / "fixtures"

GEOMETRY = Geometry(bucket=64, num_rows=8, page_size=16)
PROMPT = np.random.default_rng(7).integers(3, 97, 150).tolist()
PAGES = list(range(11, 0, -1))
DEFINITION = replace(BASE, shape="two layers of hostile", ops=OpTable)
VARIANTS = {
    "kernels": BASE,
    "definition": DEFINITION,
    "bfloat16": replace(BASE, dtype="bfloat16"),
    "int8 KV": replace(BASE, kv_cache_dtype="int8"),
}


@dataclass(slots=True)
class Scored:
    scores: npt.NDArray[np.float32]
    token_ids: list[int]


def scorer_of(lab: Lab, variant: Variant = BASE) -> XlaRunner:
    setup = replace(variant.setup, capabilities=frozenset({"scores"}))
    runner = XlaRunner(variant.config, lab.weights(variant.shape), setup, variant.ops)
    runner.warmup()
    return runner


def parts_of(prompt: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    bounds = [0, *(cut for cut in cuts if cut < len(prompt)), len(prompt)]
    return [
        list(prompt[at : min(at + 40, stop)])
        for start, stop in pairwise(bounds)
        for at in range(start, stop, 40)
    ]


def score(
    runner: XlaRunner,
    prompt: Sequence[int] = PROMPT,
    cuts: Sequence[int] = (),
    *,
    row: int = 0,
    pages: Sequence[int] = PAGES,
    beside: Sequence[Stream] = (),
) -> Scored:
    """Scores a prompt by its last token and greedy ones behind it; tokens of the rows beside it are
    in each step, and score what is before them."""
    stream, parts, drawn = Stream(row=row, pages=list(pages)), parts_of(prompt, cuts), list[int]()
    for number in range(len(parts) + LOOK_AHEAD - 1):
        is_scoring, chunks = number >= len(parts) - 1, list[Chunk]()
        if number < len(parts):
            chunks.append(stream.chunk(parts[number], samples=is_scoring))
        else:
            chunks.append(stream.next_token())
        chunks += [each.chunk([9, 4 + number], samples=True) for each in beside]
        inputs = build_inputs(chunks, GEOMETRY)
        for each in beside:
            inputs.rows.score_lens[each.row] = each.num_computed
        inputs.rows.score_lens[row] = len(prompt) * is_scoring
        output = runner.launch(inputs).result()
        if is_scoring:
            used = inputs.logits.rows[: inputs.num_logits].tolist()
            drawn.append(int(output.token_ids[used.index(row)]))
    return Scored(runner.read_scores(row, len(prompt), LOOK_AHEAD), drawn)


@dataclass(frozen=True, kw_only=True)
class ScoringDecoder(NumpyMTP):
    seen: list[tuple[Float64Array, Float64Array]] = field(default_factory=list)

    def _attention(self, prefix: str, x: Float64Array, window: int | None) -> Float64Array:
        if window is None:
            self.seen.append((self._of(prefix, "q_proj", x), self._of(prefix, "k_proj", x)))
        return super()._attention(prefix, x, window)

    def _of(self, prefix: str, name: str, x: Float64Array) -> Float64Array:
        heads = self._linear(f"{prefix}.{name}", x).reshape(len(x), -1, self._head_dim)
        heads = self._heads(prefix, name, heads.swapaxes(0, 1))
        repeats = self.config["num_attention_heads"] // len(heads)
        return np.repeat(self._rotated(heads), repeats, axis=0)

    def scores(self, prompt: list[int], drawn: list[int]) -> Float64Array:
        """Those of the prompt [n] by its last token and by those that were drawn behind it."""
        self.hidden_states([*prompt, *drawn])
        length, found = len(prompt), list[Float64Array]()
        for queries, keys in self.seen:
            logits = queries[:, length - 1 :] @ keys[:, :length].swapaxes(1, 2)  # [Hq, Q, n]
            weights = np.exp(logits / np.sqrt(self._head_dim))
            weights /= weights.sum(axis=-1, keepdims=True)
            window = [(0, 0), (0, 0), (POOL // 2, POOL // 2)]
            around = np.lib.stride_tricks.sliding_window_view(
                np.pad(weights, window), POOL, axis=-1
            )
            found.append(around.sum(axis=-1) / POOL)
        return np.concatenate(found).max(axis=0).mean(axis=0)


@pytest.mark.parametrize("variant", [BASE, DEFINITION], ids=["kernels", "definition"])
@pytest.mark.parametrize("fixture", ["qwen2-untied-bias", "qwen3-untied-bias"])
def test_scores_are_those_of_float64(variant: Variant, fixture: str):
    """In Qwen2 of a layer without a window alone, in Qwen3 of three."""
    checkpoint, decoder = open_checkpoint(FIXTURES / fixture), NumpyMTP.open(FIXTURES / fixture)
    setup = replace(variant.setup, capabilities=frozenset({"scores"}))
    with closing(XlaRunner(checkpoint.config, checkpoint.weights, setup, variant.ops)) as runner:
        runner.warmup()
        for length in (150, 21):
            prompt, found = PROMPT[:length], score(runner, PROMPT[:length])
            exact = ScoringDecoder(config=decoder.config, tensors=decoder.tensors)
            expected = exact.scores(prompt, found.token_ids[:-1])
            np.testing.assert_allclose(found.scores, expected, rtol=1e-5, atol=1e-7)
            assert expected.max() > 1.1 * expected.min(), "they differ"


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_scores_have_the_same_bits_however_a_prompt_is_cut_and_whoever_is_beside_it(
    lab: Lab, variant: Variant
):
    with closing(scorer_of(lab, variant)) as runner:
        alone = score(runner)
        assert np.isfinite(alone.scores).all()
        for cuts, row, others in (((1, 2, 149), 0, 0), ((33, 64), 5, 2), ((149,), 3, 7)):
            runner.reset()
            rows = [each for each in range(8) if each != row][:others]
            beside = [
                Stream(row=each, pages=[20 + 4 * each + i for i in range(4)]) for each in rows
            ]
            found = score(runner, cuts=cuts, row=row, beside=beside, pages=PAGES[::-1])
            assert found.scores.tobytes() == alone.scores.tobytes()
            assert found.token_ids == alone.token_ids


def test_a_prompt_behind_another_in_its_row_has_scores_of_its_own(lab: Lab):
    with closing(scorer_of(lab)) as runner:
        expected = score(runner, PROMPT[:90])
        runner.reset()
        score(runner)
        assert score(runner, PROMPT[:90]).scores.tobytes() == expected.scores.tobytes()


def spoil_keys_of_first_head(runner: XlaRunner, page: int) -> None:
    state = runner._state
    assert state is not None
    (pool,) = state.pools.kv
    keys = np.array(pool.keys)
    if keys.ndim == 4:  # [slots, layers, Hkv, D]
        keys[page * 16 + 3, :, 0] = np.nan
    else:  # [pages, layers, Hkv, page_size, D]
        keys[page, :, 0] = np.nan
    pools = state.pools.with_kv(0, pool._replace(keys=jnp.asarray(keys)))
    runner._state = state._replace(pools=pools)


@pytest.mark.parametrize("variant", [BASE, DEFINITION], ids=["kernels", "definition"])
def test_a_key_that_is_not_finite_makes_every_score_nan(lab: Lab, variant: Variant):
    """In one layer, since what a layer gives may not be finite in any head of the next."""
    variant = replace(variant, shape="one layer of hostile")
    with closing(scorer_of(lab, variant)) as runner:
        sound, stream = score(runner), Stream(row=0, pages=PAGES)
        assert np.isfinite(sound.scores).all()
        spoil_keys_of_first_head(runner, PAGES[2])
        stream.num_computed = len(PROMPT) - 1
        inputs = build_inputs([stream.chunk(PROMPT[-1:], samples=True)], GEOMETRY)
        inputs.rows.score_lens[0] = len(PROMPT)
        runner.launch(inputs)
        assert np.isnan(runner.read_scores(0, len(PROMPT), 1)).all()


def test_only_a_runner_that_was_loaded_to_score_does(lab: Lab):
    plain: Any = lab.runner()
    assert "scores" not in plain.capabilities
    with pytest.raises(RunnerError, match="load it with the capability scores"):
        plain.read_scores(0, 1, 1)
    with closing(scorer_of(lab)) as runner:
        assert isinstance(runner, PromptScorer)
        assert "scores" in runner.capabilities
