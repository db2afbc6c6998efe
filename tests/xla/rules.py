"""Random token rules on random rows, for the device's op tables and for the plain reference.

Owns the making of requests, contexts and pages; judges nothing. Every context lies on pages of its
own, the slots between hold other rows' tokens or garbage. Records are in the opposite order.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.table import RuleArrays, StepArrays
from cadenza.batch.draw_keys import draw_keys
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_schema import NO_RULES, LogitInputs
from cadenza.batch.token_rules import RuleLayout
from cadenza.request import Request, SamplingParams
from cadenza.verification.reference import ruled_logits
from tests.contract.steps import logit_rows

PAGE_SIZE = 16
PAGES = 4
STOPS = frozenset({2, 5})
GARBAGE = (-9, -1, 1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledRow:
    """One logit row: a request, what it has generated, and its raw logits [V]."""

    request: Request
    generated: list[int]
    logits: np.ndarray

    @property
    def length(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.generated)

    @property
    def seed(self) -> int:
        return self.request.params.seed or 0

    def ruled(self) -> np.ndarray:
        return ruled_logits(self.logits, self.request, self.generated, STOPS)

    def record(self) -> np.ndarray | None:
        sequence = Sequence(
            request_id=0,
            request=self.request,
            seed=self.seed,
            max_num_tokens=1 << 20,
            stop_token_ids=STOPS,
            token_ids=list(self.request.prompt_token_ids),
        )
        return RuleLayout(len(self.logits)).encode(sequence)


def random_row(rng: np.random.Generator, vocab_size: int, *, sampled: bool = True) -> RuledRow:
    few = rng.integers(0, vocab_size, 9)

    def tokens(most: int) -> list[int]:
        pool = few if rng.random() < 0.7 else np.arange(vocab_size)
        return rng.choice(pool, rng.integers(0, most + 1)).tolist()

    prompt, generated = [int(few[0]), *tokens(25)], tokens(35)
    params = SamplingParams(
        max_tokens=None,
        temperature=float(rng.choice([0.0, 0.7, 1.0, 2.0])) if sampled else 0.0,
        seed=int(rng.integers(0, 1 << 62)),
        top_k=int(rng.choice([0, 0, 0, 1, 7])),
        top_p=float(rng.choice([1.0, 1.0, 0.5, 0.9])),
        min_p=float(rng.choice([0.0, 0.0, 0.1])),
        top_n_sigma=float(len(generated) % 3 == 1),
        presence_penalty=float(rng.choice([0.0, 0.0, -2.0, 0.7, 2.0])),
        frequency_penalty=float(rng.choice([0.0, 0.0, -1.3, 0.3, 2.0])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 0.5, 1.2, 3.0])),
        logit_bias=_biases(rng, few, vocab_size),
        allowed_token_ids=_allowed(rng, vocab_size),
        min_tokens=int(rng.choice([0, 0, 1, len(generated), len(generated) + 1])),
        logprobs=[None, 0, 20][rng.integers(3)],
    )
    request = Request(
        prompt_token_ids=tuple(prompt),
        params=params,
        bad_word_token_ids=_bad_words(rng, few, generated),
    )
    scale = rng.choice([0.1, 1.0, 4.0, 10.0])
    logits = rng.normal(0, scale, vocab_size).astype(np.float32)
    return RuledRow(request=request, generated=generated, logits=logits)


def _biases(rng: np.random.Generator, few: np.ndarray, vocab_size: int) -> dict[int, float]:
    if rng.random() < 0.5:
        return {}
    ids = {*few[:3].tolist(), *rng.integers(0, vocab_size, rng.integers(0, 40)).tolist()}
    return {token_id: float(rng.choice([-100.0, -1.5, 0.25, 6.0])) for token_id in ids}


def _allowed(rng: np.random.Generator, vocab_size: int) -> tuple[int, ...] | None:
    if rng.random() < 0.6:
        return None
    count = int(rng.choice([1, 4, vocab_size // 2, vocab_size]))
    return tuple(rng.choice(vocab_size, count, replace=False).tolist())


def _bad_words(
    rng: np.random.Generator, few: np.ndarray, generated: list[int]
) -> tuple[tuple[int, ...], ...]:
    words: list[tuple[int, ...]] = []
    for _ in range(int(rng.choice([0, 0, 1, 5]))):
        start = generated[len(generated) - int(rng.integers(0, 4)) :] if generated else []
        if rng.random() < 0.3:
            start = rng.choice(few, rng.integers(0, 4)).tolist()
        words.append((*start, int(rng.choice(few))))
    return tuple(words)


def step_of(rows: list[RuledRow], *, seed: int = 0) -> StepArrays:
    rng = np.random.default_rng(seed)
    count = len(rows)
    table = rng.permutation(count * PAGES).reshape(count, PAGES).astype(np.int32)
    history = rng.choice(GARBAGE, count * PAGES * PAGE_SIZE).astype(np.int32)
    records = np.full((count, RuleLayout(len(rows[0].logits)).num_words), -1, np.int32)
    for index, row in enumerate(rows):
        positions = np.arange(row.length)
        slots = table[index, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        history[slots] = (*row.request.prompt_token_ids, *row.generated)
        record = row.record()
        if record is not None:
            records[count - 1 - index] = record
    nothing = dict.fromkeys(StepArrays._fields, np.int32(0))
    own = {
        "num_logits": np.int32(count),
        "page_table": jnp.asarray(table),
        "logits": logits_of(rows),
        "rules": RuleArrays(jnp.asarray(records), jnp.asarray(history)),
    }
    return StepArrays(**{**nothing, **own})


def logits_of(rows: list[RuledRow]) -> LogitInputs[Any]:
    params = [row.request.params for row in rows]
    seeds = np.array([row.seed for row in rows], np.uint64)
    positions = np.array([row.length for row in rows], np.int32)
    return logit_rows(
        len(rows),
        positions=positions,
        temperature=jnp.array([0.0 if p.is_greedy else p.temperature for p in params], jnp.float32),
        top_k=jnp.array([max(p.top_k, 0) for p in params], jnp.int32),
        top_p=jnp.array([p.top_p for p in params], jnp.float32),
        min_p=jnp.array([p.min_p for p in params], jnp.float32),
        top_n_sigma=jnp.array([max(p.top_n_sigma, 0.0) for p in params], jnp.float32),
        keys=jnp.asarray(draw_keys(seeds, positions)),
        num_logprobs=jnp.array(
            [-1 if p.logprobs is None else p.logprobs for p in params], jnp.int32
        ),
        rule_record=jnp.array(
            [
                NO_RULES if row.record() is None else len(rows) - 1 - place
                for place, row in enumerate(rows)
            ],
            jnp.int32,
        ),
    )
