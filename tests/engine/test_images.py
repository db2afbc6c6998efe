"""Images in an engine over the runner that sees: who is encoded when, what is shared, what a fault,
a cancel or a full pool leaves behind. The streams must be those of each request alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import pytest

from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import EngineLimits, ImageLimits, SchedulerLoop
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.model_drafter import DraftModel
from cadenza.engine.page_folder import PageFolder
from cadenza.engine.stats import StepMeter
from cadenza.errors import RunnerError
from cadenza.events import Finished, Preparing, Started, Token
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.image_queue import ImageQueue
from cadenza.speculative_config import SpeculativeConfig
from cadenza.structured import ConstraintSpec
from cadenza.tenant import Tenant
from tests.engine.hashed_constraint import Compiled
from tests.engine.seeing import image_at, prompt_of, sees_with, spoil_free_image_slots
from tests.engine.simulation import Parts, Record, make_engine, run_requests
from tests.engine.solo import IMAGE_TOKEN_ID

LOOPS: tuple[SchedulerLoop, ...] = ("plain", "overlap")
CAT, DOG, COW = (1, 4, 4), (2, 4, 4), (3, 2, 3)
LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=128,
    page_size=16,
    num_pages=32,
    max_num_queued_reqs=100,
    images=ImageLimits(token_id=IMAGE_TOKEN_ID, num_slots=64),
)


@dataclass(kw_only=True, eq=False)
class WatchedRunner(FakeRunner):
    """Notes which images were encoded, and can fail at a launch."""

    encoded: list[bytes] = field(default_factory=list)
    calls: list[list[tuple[bytes, int, int]]] = field(default_factory=list)
    inputs: list[ModelInputs] = field(default_factory=list)
    fails: Callable[[ModelInputs], bool] = lambda _: False

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        if self.fails(inputs):
            raise RunnerError("the device was lost")
        self.inputs.append(inputs)
        calls = [(each.attachment.digest, each.start, each.stop) for each in inputs.image_calls]
        self.calls.append(calls)
        self.encoded += [digest for digest, start, _ in calls if start == 0]
        return super().launch(inputs)


def engine_of(
    loop: SchedulerLoop = "overlap", **changes: object
) -> tuple[EngineCore, WatchedRunner]:
    limits = replace(LIMITS, **changes)  # type: ignore[arg-type]
    engine = make_engine(limits, loop=loop, parts=Parts(runner=WatchedRunner))
    assert isinstance(engine.runner, WatchedRunner)
    return engine, engine.runner


def fake_of(limits: EngineLimits, kind: Callable[..., FakeRunner] = WatchedRunner) -> FakeRunner:
    return kind(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        **sees_with(limits),
    )


def with_slots(num_slots: int) -> ImageLimits:
    return ImageLimits(token_id=IMAGE_TOKEN_ID, num_slots=num_slots)


def text(length: int, first: int = 0) -> list[int]:
    return [(first + at * 7) % 50 for at in range(length)]


def request_of(*pieces: list[int] | tuple[int, int, int], **options: object) -> Request:
    tokens, parts = prompt_of(*pieces)
    given: dict[str, object] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    tenant = options.pop("tenant", Tenant())
    salt = options.pop("cache_salt", "")
    params = SamplingParams(**(given | options))  # type: ignore[arg-type]
    return Request(
        prompt_token_ids=tokens,
        attachments=parts,
        params=params,
        cache_salt=salt,  # type: ignore[arg-type]
        tenant=tenant,  # type: ignore[arg-type]
    )


def digest_of(piece: tuple[int, int, int]) -> bytes:
    return image_at(0, *piece)[1][0].digest


MANY = [
    request_of(text(5), CAT, text(20)),
    request_of(text(9, 3), CAT, text(3), DOG, text(4)),
    request_of(COW, text(30, 1), COW),
    request_of(text(40, 2)),
    request_of(text(16), DOG, n=3, temperature=1.0, seed=5),
]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("budget", range(4, 40, 5))
def test_streams_are_exact_with_chunks_of_every_size(loop: SchedulerLoop, budget: int) -> None:
    engine, _ = engine_of(loop, max_num_batched_tokens=budget)
    run_requests(engine, MANY).verify()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("num_slots", [16, 17, 22, 33])
@pytest.mark.parametrize("num_pages", [8, 32])
def test_tiny_pools_end_every_request(loop: SchedulerLoop, num_slots: int, num_pages: int) -> None:
    engine, _ = engine_of(loop, images=with_slots(num_slots), num_pages=num_pages)
    run_requests(engine, MANY).verify()


def test_placeholders_and_breaks_name_their_slots_in_order() -> None:
    engine, runner = engine_of(max_num_batched_tokens=64)
    tokens, parts = image_at(3, 9, 3, 2, has_breaks=True)
    request = Request(prompt_token_ids=(1, 2, 3, *tokens, 4, 5), attachments=parts)
    run_requests(engine, [request]).verify()
    step = next(each for each in runner.inputs if each.num_tokens > 5)
    slots = runner.inputs[0].image_calls[0].slots.tolist()
    first, second, third = slots[:2], slots[2:4], slots[4:]
    assert step.tokens.image_slots[:13].tolist() == [
        *(-1, -1, -1, *first, -1, *second, -1, *third, -1, -1)
    ]


def test_an_image_in_several_requests_and_samples_is_encoded_once() -> None:
    engine, runner = engine_of()
    requests = [request_of(text(4, k), CAT, text(5), n=2) for k in range(3)]
    run_requests(engine, requests).verify()
    assert runner.encoded == [digest_of(CAT)]
    counts = engine.scheduler.work(ImageQueue).counts
    assert (counts.num_encoded, counts.num_slot_hits, counts.num_prefix_hits) == (1, 2, 0)


def test_another_salt_has_an_image_of_its_own() -> None:
    engine, runner = engine_of()
    requests = [request_of(text(4), CAT, text(5), cache_salt=salt) for salt in ("", "b")]
    run_requests(engine, requests).verify()
    assert runner.encoded == [digest_of(CAT)] * 2


def test_a_span_whose_pages_are_cached_is_not_encoded() -> None:
    engine, runner = engine_of(images=with_slots(16))
    run_requests(engine, [request_of(text(16), CAT, text(9))]).verify()
    run_requests(engine, [request_of(DOG)]).verify()  # takes the slots
    record = run_requests(engine, [request_of(text(16), CAT, text(9), text(8, 3))])
    assert runner.encoded == [digest_of(CAT), digest_of(DOG)]
    assert record.finished[2, 0].num_cached_tokens == 32
    assert engine.scheduler.work(ImageQueue).counts.num_prefix_hits == 1


def test_a_hit_that_ends_inside_an_image_goes_on_with_the_same_rows() -> None:
    engine, runner = engine_of(images=with_slots(16))
    run_requests(engine, [request_of(text(10), CAT, text(9))]).verify()  # 10 ... 26: pages 0, 1
    run_requests(engine, [request_of(DOG)]).verify()
    one = request_of(text(10), CAT, text(3, 30))
    record = run_requests(engine, [one])
    assert record.finished[2, 0].num_cached_tokens == 16
    assert runner.encoded == [digest_of(each) for each in (CAT, DOG, CAT)]
    record.seed = 0
    assert record.token_ids((2, 0)) == record.solo((2, 0)).token_ids


def test_an_evicted_image_is_encoded_again_to_the_same_bits() -> None:
    engine, runner = engine_of(images=with_slots(16), enable_prefix_caching=False)
    requests = [request_of(text(5, k), piece) for k, piece in enumerate([CAT, DOG, CAT, DOG])]
    for at, request in enumerate(requests):
        record = Record(seed=0, engine=engine)
        request_id = engine.submit(request)
        assert request_id == at
        record.requests[at], record.streams[at, 0] = request, []
        while not engine.is_idle:
            for event in engine.step():
                record.take(event)
            spoil_free_image_slots(engine)
        record.verify()
    assert len(runner.encoded) == 4


def test_text_goes_on_while_an_image_is_encoded_and_passes_its_request() -> None:
    engine, runner = engine_of()
    big = request_of(text(3), (8, 8, 8))
    record = Record(seed=0, engine=engine)
    for request in (big, request_of(text(6), max_tokens=4)):
        record.accept(engine.submit(request), request)
    order: list[int] = []
    while not engine.is_idle:
        for event in engine.step():
            record.take(event)
            order += [event.request_id] if isinstance(event, Finished) else []
    record.verify()
    assert order == [1, 0]
    assert any(each.image_calls and each.num_tokens for each in runner.inputs)


def test_a_request_without_its_image_holds_no_row_and_no_page() -> None:
    engine, _ = engine_of("plain")
    engine.submit(request_of(text(3), (8, 8, 8)))
    engine.step()
    sequence = engine.scheduler.waiting[0]
    assert engine.scheduler.work(ImageQueue)._encoding is None or sequence.row is None
    assert not sequence.page_table


def test_requests_leave_the_queue_when_the_image_that_they_wait_for_is_encoded() -> None:
    engine, _ = engine_of(images=with_slots(2000), max_model_len=2048, num_pages=200)
    big = request_of(text(3), (8, 40, 40))
    ids = [engine.submit(each) for each in (big, big, request_of(text(6), (9, 8, 8)))]
    told: list[Started | Preparing] = []
    for _ in range(3):
        engine.step(told.extend)
    assert told == [Preparing(request_id=each) for each in ids[:2]], "once, and not the last one"


@pytest.mark.parametrize("loop", LOOPS)
def test_cancelling_in_the_middle_of_an_encode_frees_its_slots(loop: SchedulerLoop) -> None:
    engine, runner = engine_of(loop, images=with_slots(2000), max_model_len=2048, num_pages=200)
    request_id = engine.submit(request_of(text(3), (8, 40, 40)))
    engine.step()
    assert runner.calls[0]
    assert engine.cancel(request_id)
    engine.check_invariants()
    run_requests(engine, []).verify_nothing_is_held()
    assert engine.scheduler.work(ImageQueue).counts.num_failed == 1
    assert len(engine.scheduler.work(ImageQueue).slots.free_slots) == 2000


def test_cancelling_one_of_two_who_wait_for_an_image_goes_on_for_the_other() -> None:
    engine, runner = engine_of(images=with_slots(2000), max_model_len=2048, num_pages=200)
    big = request_of(text(3), (8, 40, 40))
    first = engine.submit(big)
    record = Record(seed=0, engine=engine)
    second = engine.submit(big)
    record.requests[second], record.streams[second, 0] = big, []
    engine.step()
    engine.cancel(first)
    while not engine.is_idle:
        for event in engine.step():
            record.take(event)
        engine.check_invariants()
    record.verify()
    assert runner.encoded == [digest_of((8, 40, 40))]


@pytest.mark.parametrize("loop", LOOPS)
def test_an_image_that_always_fails_ends_its_own_request_alone(loop: SchedulerLoop) -> None:
    engine, runner = engine_of(loop)

    def fails(inputs: ModelInputs) -> bool:
        return any(each.attachment.digest == digest_of(DOG) for each in inputs.image_calls)

    runner.fails = fails
    requests = [request_of(text(4), CAT), request_of(text(5), DOG), request_of(text(6))]
    record = run_requests(engine, requests)
    record.verify(failed=frozenset({(1, 0)}))
    assert record.finished[1, 0].error_kind == "step_failed"


def test_streams_go_on_between_the_quanta_of_an_image_that_is_retried() -> None:
    engine, runner = engine_of("plain")
    failed: list[bool] = []

    def fails(inputs: ModelInputs) -> bool:
        is_first = bool(inputs.image_calls) and not failed
        failed.extend([True] * is_first)
        return is_first

    runner.fails = fails
    requests = [request_of(text(4), max_tokens=40), request_of((8, 8, 8), max_tokens=1)]
    run_requests(engine, requests).verify()
    assert all(not (each.image_calls and each.num_tokens) for each in runner.inputs)


def test_tenants_have_their_images_encoded_in_turns() -> None:
    engine, runner = engine_of(images=with_slots(1000))
    one, other = Tenant(name="a"), Tenant(name="b")
    pieces = [(k, 3, 3) for k in range(6)]
    requests = [request_of(text(3), *pieces, tenant=one, max_tokens=1)]
    requests.append(request_of(text(4), (9, 3, 3), tenant=other, max_tokens=1))
    run_requests(engine, requests).verify()
    assert runner.encoded.index(digest_of((9, 3, 3))) <= 2


def test_no_step_names_the_slots_of_two_images_for_one_token() -> None:
    engine, runner = engine_of(max_num_batched_tokens=64)
    run_requests(engine, MANY).verify()
    for each in runner.inputs:
        used = [slot for slot in each.tokens.image_slots[: each.num_tokens].tolist() if slot >= 0]
        assert all(0 <= slot < 64 for slot in used)
        assert (each.tokens.image_slots[each.num_tokens :] == -1).all()


def test_no_placeholder_is_ever_sampled() -> None:
    engine, _ = engine_of()
    record = run_requests(engine, MANY)
    sampled = {event.token_id for _, event in record.log if isinstance(event, Token)}
    assert IMAGE_TOKEN_ID not in sampled


def test_statistics_count_what_was_encoded_and_found() -> None:
    engine, _ = engine_of()
    run_requests(engine, [request_of(text(3), CAT, text(4)), request_of(text(5), CAT)])
    stats = StepMeter(engine, lambda: 0.0).stats()
    assert (stats.numbers["images_encoded"], stats.numbers["images_given_up"]) == (1, 0)
    assert stats.by_label["image_hits"] == {"slots": 1, "prefix_cache": 0}
    assert stats.by_label["image_slots"] == {"live": 0, "cached": 16, "free": 48}
    assert stats.numbers["image_encoder_seconds"] > 0


def test_images_give_their_requests_no_rules() -> None:
    engine, runner = engine_of(max_num_batched_tokens=64)
    run_requests(engine, [request_of(text(3), COW), request_of(text(5))])
    assert not [each for step in runner.inputs for each in step.rule_updates]


def test_a_request_of_text_looks_up_no_placeholder() -> None:
    plain = request_of(text(6), max_tokens=30)
    stream = run_requests(engine_of()[0], [plain]).token_ids((0, 0))
    engine, runner = engine_of()
    spoilt = [(*stream[at : at + 5], IMAGE_TOKEN_ID) for at in range(0, 30, 5)]
    predicted = replace(plain, prediction=tuple(chain(plain.prompt_token_ids[-3:], *spoilt)))
    record = run_requests(engine, [predicted])
    record.verify()
    assert record.token_ids((0, 0)) == stream
    assert engine.draft_counts.num_draft_tokens > 10
    assert not any((step.tokens.ids == IMAGE_TOKEN_ID).any() for step in runner.inputs)


@dataclass(kw_only=True, eq=False)
class DrawsPlaceholders(FakeRunner):
    """A second model, every other token of which is a placeholder: it does not see."""

    num_drawn: int = 0

    def _sample(self, inputs: ModelInputs, index: int, row: int) -> int:
        self.num_drawn += 1
        return IMAGE_TOKEN_ID if self.num_drawn % 2 else super()._sample(inputs, index, row)


def test_a_second_model_proposes_no_placeholder() -> None:
    drawing = fake_of(LIMITS, DrawsPlaceholders)
    watched = fake_of(LIMITS)
    assert isinstance(watched, WatchedRunner)
    model = DraftModel(runner=drawing, limits=LIMITS, shares_kv=False)
    config = SpeculativeConfig(method="draft_model", model="second", num_speculative_tokens=4)
    engine = EngineCore(watched, LIMITS, CoreOptions(draft_model=model, speculation=config))
    run_requests(engine, [request_of(text(9, each), max_tokens=20) for each in range(4)]).verify()
    assert isinstance(drawing, DrawsPlaceholders)
    assert drawing.num_drawn > 20
    assert not any((step.tokens.ids == IMAGE_TOKEN_ID).any() for step in watched.inputs)


@dataclass(slots=True)
class Forcing:
    """A constraint behind whose first token an image must follow."""

    accepted: list[int] = field(default_factory=list)
    is_complete: bool = False
    has_failed: bool = False

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def allowed(self) -> bytes:
        only = 1 << IMAGE_TOKEN_ID if self.accepted else (1 << IMAGE_TOKEN_ID + 1) - 1
        return only.to_bytes(16, "little")

    def forced(self) -> tuple[int, ...]:
        return (IMAGE_TOKEN_ID,) if self.accepted else ()

    def fork(self) -> "Forcing":
        return Forcing([*self.accepted])


def test_a_constraint_that_wants_a_placeholder_ends_with_an_error() -> None:
    options = CoreOptions(compile_constraint=lambda _: Compiled(Forcing()))
    engine = EngineCore(fake_of(LIMITS), LIMITS, options)
    request = replace(request_of(text(5)), constraint=ConstraintSpec(grammar="an image"))
    engine.submit(request)
    events = [event for _ in range(20) for event in engine.step()]
    (token,) = (each for each in events if isinstance(each, Token))
    (finished,) = (each for each in events if isinstance(each, Finished))
    assert token.token_id != IMAGE_TOKEN_ID
    assert finished.error_kind == "none_allowed"
    assert finished.error_fields == ("structured",)


def test_a_restarted_engine_takes_images_from_the_disk_without_encoding(tmp_path: Path) -> None:
    requests = [request_of(text(10), CAT, text(16)), request_of(text(10), DOG, text(16))]
    tokens: list[list[tuple[int, ...]]] = []
    for place in range(2):
        runner = fake_of(LIMITS)
        pages = PageFolder(tmp_path, "a model", 1 << 20)
        engine = EngineCore(runner, LIMITS, CoreOptions(page_folder=pages))
        record = run_requests(engine, requests[: 1 + place])
        tokens.append([record.token_ids((at, 0)) for at in range(1 + place)])
        engine.close()
        assert engine.scheduler.work(ImageQueue).counts.num_encoded == 1, (
            "the second run encodes DOG alone"
        )
    assert tokens[0][0] == tokens[1][0] != tokens[1][1]
