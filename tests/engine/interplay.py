"""Requests in which features meet, on engines that are drawn: `cases`, and `play`, which serves
one. All is on the token-storing runner. What goes wrong meanwhile is part of a case: engines are
killed, sequences preempted, launches lost, clients hang up. A case shrinks by its parts.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

from hypothesis import strategies as st

from cadenza.batch.image_cost import ImageCost
from cadenza.batch.step_cost import StepBound, StepCost
from cadenza.config import Batching, EngineLimits, ImageLimits, SchedulerLoop
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.open_requests import OpenRequests
from cadenza.engine.step_works import WorkOptions
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import InvalidRequestError
from cadenza.events import Event, Started
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.image_queue import ImageQueue
from cadenza.scheduler.span_queue import SpanQueue
from cadenza.scheduler.turns import POLICIES
from cadenza.sparse_prefill import PromptSpan, SparsePrefill
from cadenza.speculative_config import Speculative, SpeculativeConfig, SpeculativeMethod
from cadenza.structured import ConstraintSpec
from cadenza.tenant import Tenant
from tests.engine.drafting import Source, draft_model_of
from tests.engine.hashed_constraint import PHRASES, SHORT, STEADY, compile_hashed
from tests.engine.seeing import (
    can_ever_fit,
    image_at,
    sees_with,
    spoil_free_slots,
    without_placeholders,
)
from tests.engine.simulation import (
    EOS_TOKEN_IDS,
    MAX_STEPS_TO_DRAIN,
    SECRET,
    STEP_S,
    TICK_S,
    LosingRunner,
    Record,
)
from tests.engine.solo import IMAGE_TOKEN_ID, VOCAB_SIZE, SoloStream, StreamId
from tests.engine.sparse import WINDOW, kept_of, owed, scorer_of, tokens_of

MAX_MODEL_LEN = 240
MAX_ROWS = 5
IMAGES = ((1, 1), (2, 3), (6, 5), (1, 20))
"""Rows and columns."""
LARGEST_IMAGE = 30

Sight = Literal["none", "alone", "whole"]
"""Of an engine: text alone; images whose tokens see what is before them, or all of their image."""

Prompts = Literal["any", "recurrent", "thinned"]
"""A model with recurrent states thins out no prompt."""

METHODS: dict[Source, SpeculativeMethod] = {
    "second model": "draft_model",
    "second model on the target's pages": "quantised",
    "mtp layer": "mtp",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Somebody who comes before a step; hangs up `hangs_up_after` steps later, from all samples or
    from one.

    Args:
        prompt: tokens of the prompt that all share, tokens behind them, and the seed of these.
        images: which of `IMAGES`, from where on.
        keep: the share of the prompt that is kept, where the engine thins prompts out; it is then
            a long one without images.
        error: every so many tokens of its prediction are wrong; None for no prediction.
    """

    comes: int
    prompt: tuple[int, int, int]
    images: tuple[tuple[int, int], ...]
    keep: float | None
    grammar: str | None
    speculative: Speculative
    error: int | None
    params: SamplingParams
    salt: str
    tenant: int
    priority: int
    hangs_up_after: int | None
    hung_up_sample: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Before a step."""

    step: int
    kind: Literal["preempt", "kill"]
    place: int
    """Of the running sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An engine, who comes to it, and what goes wrong."""

    loop: SchedulerLoop
    sight: Sight
    prompts: Prompts
    drafts: Source | Literal["ngram"] | None
    draft_error: float
    rows: int
    budget: int
    spare_pages: int
    caching: bool
    spare_slots: int
    bound_ms: float | None
    reserved: float
    policy: str
    batching: Batching
    shares: tuple[tuple[float, float], ...]
    """Of each tenant: of the pages, and of the cache."""
    clients: tuple[Client, ...]
    troubles: tuple[Trouble, ...]
    lost: frozenset[int]
    """Launches of an engine."""

    @property
    def limits(self) -> EngineLimits:
        states: dict[str, Any] = {}
        if self.prompts == "recurrent":
            slots = 2 * self.rows + self.spare_slots
            states = {"num_state_slots": slots, "state_snapshot_interval": 32}
        least = LARGEST_IMAGE + self.rows - 1 if self.sight == "whole" else self.rows
        images = ImageLimits(
            token_id=IMAGE_TOKEN_ID,
            num_slots=LARGEST_IMAGE + self.spare_slots,
            has_rope_axes=False,  # the runner tells tokens behind gaps by their rope positions
        )
        return EngineLimits(
            max_num_seqs=self.rows,
            max_num_batched_tokens=least + self.budget,
            max_model_len=MAX_MODEL_LEN,
            page_size=16,
            num_pages=MAX_MODEL_LEN // 16 + self.spare_pages,
            max_num_queued_reqs=100,
            enable_prefix_caching=self.caching,
            images=None if self.sight == "none" else images,
            **states,
        )

    def request_of(self, client: Client) -> Request:
        keep = client.keep if self.prompts == "thinned" else None
        num_shared, num_own, seed = client.prompt
        prompt = tokens_of(150, 0)[: num_shared if keep is None else max(num_shared, 130)]
        prompt, parts = prompt + tokens_of(num_own, seed), ()
        if self.sight != "none":
            prompt = without_placeholders(prompt)
            for first, which in client.images if keep is None else ():
                at = len(prompt) if parts else min(first, len(prompt))
                own, found = image_at(at, which, *IMAGES[which])
                prompt, parts = (*prompt[:at], *own, *prompt[at:]), (*parts, *found)
        grammar, (pages, cache) = client.grammar, self.shares[client.tenant % len(self.shares)]
        request = Request(
            prompt_token_ids=prompt,
            attachments=parts,
            params=replace(client.params, speculative=client.speculative),
            sparse_prefill=keep and SparsePrefill(keep=keep, forced=(PromptSpan(40, 41),)),
            constraint=None if grammar is None else ConstraintSpec(grammar=grammar),
            cache_salt=client.salt,
            tenant=Tenant(
                name=f"t{client.tenant % len(self.shares)}", page_share=pages, cache_share=cache
            ),
            priority=client.priority if self.policy == "priority" else 0,
        )
        if client.error is None or not can_ever_fit(request, self.limits):
            return request
        known = self.owed(request, 0).token_ids
        wrong = enumerate(known, 1)
        spoilt = [(each + (place % client.error == 0)) % VOCAB_SIZE for place, each in wrong]
        return replace(request, prediction=tuple(spoilt))

    def owed(self, request: Request, sample: int) -> SoloStream:
        """What a sample gives alone."""
        plain = replace(
            request,
            prediction=(),
            params=replace(request.params, speculative=None),
            tenant=Tenant(),
            cache_salt="",
            priority=0,
        )
        sees = self.sight != "none"
        return owed(plain, kept_of(plain), self.limits, sample, sees=sees)


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2),
    ignore_eos=st.sampled_from([True, True, False]),
    stop_token_ids=st.sampled_from([(), (), (5, 6, 7)]),
    logprobs=st.sampled_from([None, 2]),
    n=st.sampled_from([1, 1, 2, 3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
)
CLIENTS = st.builds(
    Client,
    comes=st.integers(0, 24),
    prompt=st.tuples(
        st.sampled_from([0, 16, 40, 48, 130, 150]), st.integers(1, 30), st.integers(1, 3)
    ),
    images=st.just(())
    | st.lists(
        st.tuples(st.sampled_from([0, 3, 16, 40, 200]), st.integers(0, len(IMAGES) - 1)),
        min_size=1,
        max_size=2,
    ).map(tuple),
    keep=st.sampled_from([None, 0.4, 0.4, 0.8]),
    grammar=st.sampled_from([None, None, "a", STEADY, PHRASES, SHORT]),
    speculative=st.sampled_from([None, True, 3, False]),
    error=st.sampled_from([None, None, 1000, 5]),
    params=PARAMS,
    salt=st.sampled_from(["", "", "other"]),
    tenant=st.integers(0, 1),
    priority=st.integers(-1, 1),
    hangs_up_after=st.sampled_from([None, None, None, 1, 6, 15]),
    hung_up_sample=st.sampled_from([None, 0, 1]),
)
TROUBLES = st.builds(
    Trouble,
    step=st.integers(1, 40),
    kind=st.sampled_from(["preempt", "preempt", "kill"]),
    place=st.integers(0, MAX_ROWS - 1),
)


KINDS: tuple[tuple[Sight, Prompts], ...] = (
    ("none", "any"),
    ("alone", "any"),
    ("whole", "any"),
    ("none", "recurrent"),
    ("alone", "recurrent"),
    ("none", "thinned"),
    ("alone", "thinned"),
    ("whole", "thinned"),
)
"""Of models; those with states compute no image whole."""


def cases(sight: Sight, prompts: Prompts) -> st.SearchStrategy[Case]:
    """Of engines with one kind of model."""
    sources = [*METHODS]
    if prompts == "recurrent":  # a copy of the model that computes on its states is refused
        sources.remove("second model on the target's pages")
    shares = st.tuples(st.sampled_from([1.0, 1.0, 0.8]), st.sampled_from([1.0, 0.3, 0.0]))
    return st.builds(
        Case,
        loop=st.sampled_from(["overlap", "plain"]),
        sight=st.just(sight),
        prompts=st.just(prompts),
        drafts=st.sampled_from([None, "ngram", *sources]),
        draft_error=st.sampled_from([0.0, 0.3]),
        rows=st.integers(1, MAX_ROWS),
        budget=st.integers(0, 60),
        spare_pages=st.sampled_from([0, 1, 5, 12, 40]),
        caching=st.sampled_from([True, True, True, False]),
        spare_slots=st.sampled_from([0, 1, 5, 40]),
        bound_ms=st.sampled_from([None, 8.0, 15.0, 30.0]),
        reserved=st.sampled_from([0.0, 0.5, 1.0]),
        policy=st.sampled_from([*POLICIES]),
        batching=st.sampled_from([*["continuous"] * 5, "static"]),
        shares=st.lists(shares, min_size=1, max_size=2).map(tuple),
        clients=st.lists(CLIENTS, min_size=1, max_size=7).map(tuple),
        troubles=st.lists(TROUBLES, max_size=4).map(tuple),
        lost=st.frozensets(st.integers(0, 60), max_size=2),
    )


@dataclass(slots=True, kw_only=True)
class Told(Record):
    """What clients were told, through the books of a front end, by one engine after the other."""

    case: Case
    books: OpenRequests

    def solo(self, stream: StreamId) -> SoloStream:
        return self.case.owed(self.requests[stream[0]], stream[1])

    def take_all(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Started):
                kept = kept_of(self.requests[event.request_id])
                assert event.kept == (None if kept is None else kept.mask), "other chunks are kept"
                assert event.whole_because is None
                if event.request_id not in self.started:
                    self.take(event)
        for event in self.books.record(events):
            if not isinstance(event, Started):
                self.take(event)


class Player:
    """Serves the clients of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.now_s = 0.0
        self.modes: Counter[str] = Counter()
        books = OpenRequests(RequestTimeouts(), lambda: 0.0)
        loses = bool(case.lost)
        self.record = Told(seed=0, engine=self._engine(), loses_steps=loses, case=case, books=books)
        self.hang_ups: dict[int, list[tuple[int, int | None]]] = {}

    def _engine(self) -> EngineCore:
        case, limits = self.case, self.case.limits
        runner = LosingRunner(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_pages_per_seq=limits.max_pages_per_seq,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            vocab_size=VOCAB_SIZE,
            num_state_slots=limits.num_state_slots,
            is_sparse=case.prompts == "thinned",
            whole_span=LARGEST_IMAGE if case.sight == "whole" else 0,
            seed=case.budget,
            lost=case.lost,
            **sees_with(limits),
        )
        options: dict[str, Any] = {}
        works = WorkOptions()
        if case.drafts == "ngram":
            options["speculation"] = SpeculativeConfig(method="ngram")
        elif case.drafts is not None:
            model = draft_model_of(case.drafts, runner, limits, error=case.draft_error)
            method = METHODS[case.drafts]
            name = "a second model" if method == "draft_model" else None
            options["speculation"] = SpeculativeConfig(method=method, model=name)
            options["draft_model"] = model
        if case.prompts == "thinned":
            works = replace(works, prompt_scorer=scorer_of(limits))
            options["window"] = WINDOW
        if case.bound_ms is not None:
            cost = StepCost(fixed_ms=5.0, token_ms=1.0, logit_ms=0.2, key_ms=0.002)
            options["step_bound"] = StepBound(max_ms=case.bound_ms, cost=cost)
            encoding = ImageCost(quantum_ms=1.0, product_ms=0.1, attention_ms=0.1)
            works = replace(works, image_cost=encoding)
        chosen = CoreOptions(
            eos_token_ids=EOS_TOKEN_IDS,
            loop=case.loop,
            reserved_output=case.reserved,
            secret=SECRET,
            policy=POLICIES[case.policy](2.0),
            batching=case.batching,
            clock=self._clock,
            compile_constraint=compile_hashed,
            works=works,
            **options,
        )
        return EngineCore(runner, limits, chosen)

    def _clock(self) -> float:
        self.now_s += TICK_S * (self.case.bound_ms is not None)
        return self.now_s

    def run(self) -> None:
        """Until all have come and the engine is idle."""
        record, case = self.record, self.case
        coming = sorted(case.clients, key=lambda each: -each.comes)
        while coming or not record.engine.is_idle:
            assert record.num_steps < MAX_STEPS_TO_DRAIN, "the engine does not come to rest"
            while coming and coming[-1].comes <= record.num_steps:
                self._submit(coming.pop())
            for hang_up in self.hang_ups.pop(record.num_steps, ()):
                self._hang_up(*hang_up)
            for trouble in case.troubles:
                if trouble.step == record.num_steps:
                    self._meet(trouble)
            record.step()
            self.now_s += STEP_S
            record.engine.check_invariants()
            spoil_free_slots(record.engine)
        self._count()

    def _submit(self, client: Client) -> None:
        record, request = self.record, self.case.request_of(client)
        try:
            record.engine.check(request)
        except InvalidRequestError:
            assert not can_ever_fit(request, self.case.limits), "refused without need"
            self.modes["refused"] += 1
            return
        assert can_ever_fit(request, self.case.limits), "accepted what can never fit"
        request_id = record.books.accept(request, self.case.limits)
        record.accept(request_id, request)
        record.engine.enqueue(request_id, request)
        if client.hangs_up_after is not None:
            due = record.num_steps + client.hangs_up_after
            self.hang_ups.setdefault(due, []).append((request_id, client.hung_up_sample))

    def _hang_up(self, request_id: int, sample: int | None) -> None:
        record = self.record
        ended = record.open_streams(request_id, sample)
        if sample is not None and sample >= record.requests[request_id].params.n:
            return
        assert record.books.cancel(request_id, sample) is bool(ended)
        record.engine.cancel(request_id, sample)
        record.cancelled.update(ended)
        record.num_cancels += len(ended)

    def _meet(self, trouble: Trouble) -> None:
        record, running = self.record, self.record.engine.scheduler.running
        if trouble.kind == "kill":
            self._count()
            record.engine.step()  # what it does in its last step is never told
            record.books.lose_engine(0.0)
            record.engine = self._engine()
            for request_id in record.books.open_ids():
                resumed = record.books.resume(request_id)
                assert resumed is not None
                record.engine.resume(request_id, *resumed)
            self.modes["killed"] += 1
        elif running and not any(each.batch.has_drafts for each in record.engine.loop.in_flight):
            # As in `schedule`, before which steps with drafts have been read.
            record.engine.scheduler._preempt(running[trouble.place % len(running)])

    def _count(self) -> None:
        """What the engine met that is given up now."""
        engine, modes, case = self.record.engine, self.modes, self.case
        assert isinstance(engine.runner, LosingRunner)
        assert engine.loop.num_failed_steps <= engine.runner.num_lost, "a step failed by itself"
        drafts = engine.draft_counts
        assert sum(drafts.num_accepted_per_pos) == drafts.num_accepted_tokens
        modes["preempted"] += engine.scheduler.num_preemptions
        modes["lost"] += engine.loop.num_failed_steps
        modes["accepted"] += drafts.num_accepted_tokens
        modes["rejected"] += drafts.num_draft_tokens - drafts.num_accepted_tokens
        modes["prefix hits"] += engine.scheduler.prefix_counts.num_hits
        states = engine.scheduler.kv_cache.states
        modes["state hits"] += 0 if states is None else engine.scheduler.prefix_counts.num_hits
        if case.sight != "none":
            images = engine.scheduler.work(ImageQueue).counts
            modes["images"] += images.num_encoded
            modes["image hits"] += images.num_slot_hits + images.num_prefix_hits
        if case.sight == "whole" and case.bound_ms is not None:
            modes["spans"] += engine.scheduler.work(SpanQueue).num_computed


def play(case: Case) -> Counter[str]:
    """Serves the clients of a case; each stream is the one that its request gives alone, and
    nothing is held at the end. Returns what was met."""
    player = Player(case)
    player.run()
    record, modes = player.record, player.modes
    record.verify()
    assert record.books.num_open == 0
    modes["cancelled"] += record.num_cancels
    for request in record.requests.values():
        thinned = kept_of(request)
        modes["thinned"] += thinned is not None and thinned.num_skipped > 0
        modes["constrained"] += request.constraint is not None
        modes["samples"] += request.params.n > 1
        modes["quotas"] += request.tenant.page_share < 1.0
    return modes
