"""What an engine can never serve, by the field that its refusal names; it changes nothing."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cadenza.backends.fake import HIDDEN_SIZE, FakeRunner
from cadenza.config import EngineLimits, ImageLimits
from cadenza.engine.core import EngineCore
from cadenza.errors import InvalidRequestError
from cadenza.request import Attachment, PoolingParams, Request, SamplingParams, StructuredOutput
from cadenza.sparse_prefill import SparsePrefill
from cadenza.structured import ConstraintSpec
from cadenza.tenant import Tenant
from tests.engine import sparse
from tests.engine.hashed_constraint import SHORT
from tests.engine.seeing import image_at
from tests.engine.simulation import VOCAB_SIZE, Parts, make_engine
from tests.engine.solo import IMAGE_TOKEN_ID
from tests.engine.test_whole_spans import engine_of as engine_of_spans
from tests.engine.test_whole_spans import request_of as request_of_spans

LIMITS = EngineLimits(
    max_num_seqs=3,
    max_num_batched_tokens=16,
    max_model_len=96,
    page_size=16,
    num_pages=18,
    max_num_queued_reqs=8,
)


class Poor(FakeRunner):
    """It gives no log probabilities and no hidden states."""

    @property
    def capabilities(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset()

    @property
    def hidden_size(self) -> None:
        return None


def without_gaps() -> EngineCore:
    runner = sparse.fake_of(sparse.LIMITS)
    runner.is_sparse = False
    return EngineCore(runner, sparse.LIMITS)


def without_constraints() -> EngineCore:
    return EngineCore(make_engine(LIMITS).runner, LIMITS)


def seeing(num_slots: int = 64) -> EngineCore:
    images = ImageLimits(token_id=IMAGE_TOKEN_ID, num_slots=num_slots)
    return make_engine(replace(LIMITS, images=images))


def scoring() -> EngineCore:
    scorer = sparse.scorer_of(sparse.LIMITS)
    limits = replace(scorer.limits, max_model_len=207)
    return sparse.scoring_engine(scorer=replace(scorer, limits=limits))


def text() -> EngineCore:
    return make_engine(LIMITS)


def tokens(count: int) -> tuple[int, ...]:
    return tuple((1 + at * 7) % 90 for at in range(count))


def asked(given: Any = (1, 2), tenant: Tenant | None = None, **params: Any) -> Request:
    prompt = tokens(given) if type(given) is int and given >= 0 else given
    return Request(
        prompt_token_ids=prompt, params=SamplingParams(**params), tenant=tenant or Tenant()
    )


def pooled(num_tokens: int = 1, **params: Any) -> Request:
    return Request(prompt_token_ids=tokens(num_tokens), pooling=PoolingParams(**params))


def image_of(**changes: object) -> Request:
    given, (part,) = image_at(1, 1, 2, 3)
    part = replace(part, **changes)  # type: ignore[arg-type]
    return Request(prompt_token_ids=(1, *given, 2, 3), attachments=(part,))


def big_image() -> Request:
    given, parts = image_at(3, 1, 4, 4)
    return Request(prompt_token_ids=(1, 2, 3, *given), attachments=parts)


def pruned(**changes: Any) -> Request:
    request = sparse.request_of(sparse.tokens_of(200, 1), sparse.random_kept(200, 1))
    return replace(request, **changes)


SMALL = Tenant(name="small", page_share=0.1)
BESIDE_SPANS = Request(
    prompt_token_ids=tuple(range(20)),
    params=SamplingParams(prompt_logprobs=1),
    attachments=(Attachment(start=3, length=4, digest=b"x"),),
)
NO_IDS = (1.5, "1", True, None, math.nan, math.inf, (1,), 2**63, -(2**63), 10**400)

Case = tuple[Callable[[], EngineCore], Callable[[], Request], str | None, str | None]
REFUSED: list[Case] = [
    (text, lambda: asked(()), "prompt", None),
    (text, lambda: asked((1, VOCAB_SIZE)), "prompt", None),
    (text, lambda: asked((-1,)), "prompt", None),
    (text, lambda: asked(96), "prompt", None),
    (text, lambda: asked(96, max_tokens=None), "prompt", None),
    (
        text,
        lambda: asked(90, max_tokens=7),
        "max_tokens",
        r"length is 96 tokens.* has 90 tokens and max_tokens is 7",
    ),
    *[(text, lambda item=item: asked((1,) * 20 + (item,) * 20), "prompt", None) for item in NO_IDS],
    *[(text, lambda ids=ids: asked(ids), "prompt", None) for ids in (-5, None, "12", 1.5, {})],
    *[
        (text, lambda salt=salt: replace(asked(40), cache_salt=salt), "cache_salt", None)
        for salt in (None, 5, b"salt", "\ud800")
    ],
    (text, lambda: asked(stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids", None),
    (text, lambda: asked(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias", None),
    (text, lambda: asked(allowed_token_ids=(3, -1)), "allowed_token_ids", None),
    (text, lambda: asked(bad_words=("no",)), "bad_words", "tokens"),
    (
        text,
        lambda: replace(asked(bad_words=("no",)), bad_word_token_ids=((1, VOCAB_SIZE),)),
        "bad_words",
        None,
    ),
    (
        lambda: make_engine(replace(LIMITS, num_pages=2)),
        lambda: asked(30, max_tokens=4),
        None,
        "needs 3 KV pages and the pool has 2",
    ),
    (text, lambda: asked(1, SMALL, max_tokens=30), None, "may hold 1 of the pool's 18"),
    (text, lambda: replace(asked(), priority=1), "priority", "--scheduling-policy priority"),
    *[
        (text, lambda value=value: replace(asked(), priority=value), "priority", "priority")
        for value in (1001, -1001, 1.5, True, "1", None)
    ],
    (
        lambda: make_engine(LIMITS, parts=Parts(runner=Poor)),
        lambda: asked(logprobs=1),
        "logprobs",
        "fake",
    ),
    (
        lambda: make_engine(LIMITS, parts=Parts(runner=Poor)),
        image_of,
        "attachments",
        "attachments are not supported by the fake",
    ),
    (
        lambda: make_engine(LIMITS, parts=Parts(runner=Poor)),
        lambda: pooled(pooling="last"),
        "pooling",
        "fake backend",
    ),
    (
        text,
        lambda: pooled(pooling="last", dimensions=HIDDEN_SIZE + 1),
        "dimensions",
        f"have {HIDDEN_SIZE}",
    ),
    (text, pooled, None, "not resolved"),
    (
        without_constraints,
        lambda: replace(asked(), constraint=ConstraintSpec(grammar=SHORT)),
        "structured",
        r"no tokenizer\.json",
    ),
    (
        text,
        lambda: asked(structured=StructuredOutput(regex="a")),
        None,
        "was not turned into a constraint",
    ),
    *[
        (seeing, lambda changes=changes: image_of(**changes), "attachments", words)
        for changes, words in (
            ({"rows": 3}, "has 3 x 3 tokens and the prompt 6"),
            ({"rows": 0, "columns": 0}, "has 0 x 0 tokens"),
            ({"payload": b"abc"}, "has 3 bytes; 6 x 4 pixels have 72"),
            ({"width": 0}, "0 x 4 pixels"),
            ({"length": 5}, "has 2 x 3 tokens and the prompt 5"),
            ({"length": 7}, "begins and ends with no token of it"),
            ({"start": 0, "length": 7}, "begins and ends with no token of it"),
        )
    ],
    (
        seeing,
        lambda: asked((1, IMAGE_TOKEN_ID, 2)),
        None,
        "holds the image token 96 where there is no",
    ),
    (lambda: seeing(15), big_image, None, "image 1 has 16 tokens and the engine has 15"),
    (
        seeing,
        lambda: asked(allowed_token_ids=(IMAGE_TOKEN_ID,) * 2),
        "allowed_token_ids",
        "holds the image token 96 alone",
    ),
    (
        lambda: engine_of_spans(16),
        lambda: request_of_spans(60, (3, 18)),
        None,
        "--max-num-batched-tokens 17",
    ),
    (lambda: engine_of_spans(16), lambda: BESIDE_SPANS, None, "prompt_logprobs"),
    *[
        (sparse.engine_of, lambda changes=changes: pruned(**changes), None, words)
        for changes, words in (
            ({"pooling": PoolingParams(pooling="last"), "params": SamplingParams()}, "pooling"),
            ({"params": SamplingParams(prompt_logprobs=1)}, "prompt_logprobs"),
            ({"params": SamplingParams(repetition_penalty=1.1)}, "repetition_penalty"),
            ({"attachments": (Attachment(start=0, length=1, digest=b"1"),)}, "attachments"),
            ({"sparse_prefill": SparsePrefill(keep=0.3)}, "no model that scores"),
            ({"sparse_prefill": SparsePrefill(keep=0.3, kept=b"\1")}, "which chunks"),
        )
    ],
    (without_gaps, pruned, None, "gaps"),
    (
        scoring,
        lambda: replace(asked(201), sparse_prefill=SparsePrefill(keep=0.3)),
        None,
        "at most 200",
    ),
]


@pytest.mark.parametrize(("make", "given", "param", "words"), REFUSED)
def test_what_can_never_be_served_is_refused_by_name_and_changes_nothing(
    make: Callable[[], EngineCore],
    given: Callable[[], Request],
    param: str | None,
    words: str | None,
) -> None:
    engine = make()
    running = engine.submit(asked(2, max_tokens=4, temperature=0.0, ignore_eos=True))
    engine.step()
    pool = engine.scheduler.kv_cache.pool
    before = (pool.counts(), engine.num_queue_slots, engine.num_steps)
    with pytest.raises(InvalidRequestError, match=words) as refusal:
        engine.submit(given())
    assert param in (None, refusal.value.param)
    assert (pool.counts(), engine.num_queue_slots, engine.num_steps) == before
    engine.check_invariants()
    assert engine.submit(asked(2)) == running + 1


@pytest.mark.parametrize(
    ("make", "fields", "words"),
    [
        *[
            (Tenant, {"name": name}, "tenant")
            for name in (None, 5, "two words", "ü", "x" * 65, b"bytes", "a\0")
        ],
        *[(Tenant, {"page_share": share}, "tenant") for share in (0, 1.1, math.nan, "half", None)],
        *[(Tenant, {"cache_share": share}, "tenant") for share in (-0.1, 1.1, math.nan, True)],
        *[
            (Tenant, {"weight": weight}, "tenant")
            for weight in (0, -1.0, math.nan, math.inf, "1", True, None)
        ],
        (Request, {"prompt_token_ids": (1,), "tenant": "name"}, "must be a Tenant"),
        *[
            (
                Request,
                {"prompt_token_ids": (1,), "pooling": PoolingParams(), **options},
                "generates nothing",
            )
            for options in (
                {"params": SamplingParams(max_tokens=3)},
                {"params": SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=1)},
                {"bad_word_token_ids": ((5,),)},
                {"prediction": (5,)},
                {"constraint": ConstraintSpec(grammar="a")},
            )
        ],
        (PoolingParams, {"pooling": "cls"}, "pooling"),
        *[(PoolingParams, {"dimensions": value}, "dimensions") for value in (0, 1.5, True)],
    ],
)
def test_values_out_of_bounds_are_refused_where_they_are_made(
    make: Callable[..., object], fields: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        make(**fields)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: engine_of_spans(16), lambda: request_of_spans(60, (3, 17))),
        (text, lambda: pooled(2, pooling="mean", dimensions=HIDDEN_SIZE)),
        (scoring, lambda: replace(asked(200), sparse_prefill=SparsePrefill(keep=0.3))),
        (seeing, lambda: asked(allowed_token_ids=(IMAGE_TOKEN_ID, 3))),
    ],
)
def test_what_just_fits_is_taken(
    make: Callable[[], EngineCore], given: Callable[[], Request]
) -> None:
    make().submit(given())
