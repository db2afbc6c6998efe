"""The fake runner for tests, numpy only: it stores tokens in the slots where a model would store
KV, reads every row's history back through the page table, and returns a hash of it. States, images
and spans store likewise (`fake_memory`). An error in paging, sharing,
chunking, preemption, speculation or encoding therefore changes the output, without a model."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from cadenza.backends.base import Capability
from cadenza.backends.fake_memory import (
    FakeImages,
    FakeSpans,
    FakeStates,
    fake_image_work,
    fake_span_shape,
    state_of,
)
from cadenza.batch.image_cost import ImageWork
from cadenza.batch.step_schema import (
    LAST_SAMPLED,
    NO_HIDDEN,
    NO_IMAGE,
    NO_ROPE_POSITION,
    NO_RULES,
    NO_TARGET,
    NO_WINDOW_START,
    NUM_EXTRA_LOGIT_ROWS,
    HostArray,
    MaskUpdate,
    ModelInputs,
    SpanCall,
    StepOutput,
    TokenInputs,
)
from cadenza.batch.token_rules import HAS_MASK, MASK, RuleLayout
from cadenza.batch.whole_spans import SpanShape
from cadenza.errors import RunnerError
from cadenza.request import Attachment

_NEVER_WRITTEN = -7
WINDOW_START = -13  # behind the first position that a token sees through a window
_MAX_LOGPROBS = 20
NO_TOKEN = -1
HIDDEN_SIZE = 8


def next_token(
    history: list[int],
    key: tuple[int, int],
    *,
    vocab_size: int,
    rules: list[int] | None = None,
    banned: int | None = None,
) -> int:
    """The token after `history` for a draw `key` (zeros when greedy) and a record of token rules,
    if any: the only token that its mask allows, never `banned`, NO_TOKEN if nothing is allowed."""
    rules = rules or []
    only = _only_allowed(rules)
    if only is not None:
        return NO_TOKEN if only == banned else only
    text = np.array([*history, *rules, *key], np.int64).tobytes()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    found = int.from_bytes(digest, "little") % vocab_size
    return (found + 1) % vocab_size if found == banned else found


def _only_allowed(rules: list[int]) -> int | None:
    if not rules or not rules[HAS_MASK]:
        return None
    allowed = sum((word & 0xFFFFFFFF) << 32 * index for index, word in enumerate(rules[MASK:]))
    return allowed.bit_length() - 1 if allowed.bit_count() == 1 else None


def placed_token(token_id: int, position: int, index: int) -> int:
    """What is stored of a token; the token itself where its index is its position."""
    return token_id if index == position else token_id + (index + 1) * 1_000_003


def hidden_state(history: list[int]) -> npt.NDArray[np.float32]:
    """The last hidden state [E] of the last token of `history`, in [-1, 1)."""
    text = np.array(history, np.int64).tobytes()
    words = np.frombuffer(hashlib.blake2b(text, digest_size=4 * HIDDEN_SIZE).digest(), np.int32)
    return (words / 2.0**31).astype(np.float32)


Sample = Callable[[Sequence[MaskUpdate]], StepOutput]


@dataclass(slots=True)
class FakeStepHandle:
    """A step computed at launch; `on_read` records that its result was read."""

    output: StepOutput
    on_read: Callable[[], None]

    def result(self) -> StepOutput:
        self.on_read()
        return self.output


@dataclass(slots=True)
class FakeLateStepHandle(FakeStepHandle):
    """A step whose tokens `sample` chooses when its masks are known; then it is None."""

    sample: Sample | None

    def choose(self, masks: Sequence[MaskUpdate]) -> None:
        if self.sample is None:
            raise RunnerError("the tokens of the step were chosen")
        self.output = self.sample(masks)
        self.sample = None

    def result(self) -> StepOutput:
        if self.sample is not None:
            raise RunnerError("the step waits for its masks; call choose first")
        return FakeStepHandle.result(self)


@dataclass(slots=True, eq=False, kw_only=True)
class FakeRunner:
    """`trace` lists ("launch" | "choose" | "read", step id) in the order of the calls; a step
    launched with its masks has no "choose"."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_pages_per_seq: int
    num_pages: int
    page_size: int
    vocab_size: int = 97
    num_state_slots: int = 0
    num_image_slots: int = 0
    image_token_id: int | None = None
    is_sparse: bool = False
    whole_span: int = 0
    trace: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    _slots: np.ndarray = field(init=False)  # [P * S]
    _page_table: np.ndarray = field(init=False)  # [R, pages]
    _last_sampled: np.ndarray = field(init=False)  # [R]
    _rules: np.ndarray = field(init=False)  # [L, W]
    _generation: int = field(init=False)  # of KV: increased by a reset
    states: FakeStates = field(init=False)
    images: FakeImages = field(init=False)
    spans: FakeSpans = field(init=False)
    _states_after: list[tuple[int, ...]] = field(init=False)  # each token of the newest step

    def __post_init__(self) -> None:
        self._generation = 0
        self.reset()

    @property
    def name(self) -> str:
        return "fake"

    @property
    def capabilities(self) -> frozenset[Capability]:
        found: set[Capability] = {"logprobs", "drafts", "late_masks"}
        if self.num_image_slots:
            found.add("attachments")
        if self.is_sparse:
            found.add("sparse_prompts")
        if self.whole_span:
            found.add("whole_spans")
        return frozenset(found)

    @property
    def hidden_size(self) -> int | None:
        return HIDDEN_SIZE

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return (self.max_num_batched_tokens,)

    def warmup(self) -> None:
        """Does nothing: there are no programs to compile."""

    def reset(self) -> None:
        self._generation += 1
        self._slots = np.full(self.num_pages * self.page_size, _NEVER_WRITTEN, np.int64)
        self.states = FakeStates(self.num_state_slots, self.max_pages_per_seq * self.page_size)
        self._states_after = []
        self.images = FakeImages(self.num_image_slots)
        self.spans = FakeSpans()
        self._page_table = np.full((self.max_num_seqs, self.max_pages_per_seq), -1, np.int64)
        self._last_sampled = np.full(self.max_num_seqs, _NEVER_WRITTEN, np.int64)
        num_words = RuleLayout(self.vocab_size).num_words
        num_records = self.max_num_seqs + NUM_EXTRA_LOGIT_ROWS
        self._rules = np.full((num_records, num_words), _NEVER_WRITTEN, np.int64)

    def check_image(self, part: Attachment) -> None:
        """It takes images of any size."""

    def image_work(self, part: Attachment) -> ImageWork:
        return fake_image_work(part)

    @property
    def span_shape(self) -> SpanShape | None:
        return fake_span_shape(self.whole_span) if self.whole_span else None

    def stored(self, start: int, count: int) -> list[int]:
        return self._slots[start : start + count].tolist()

    def read_pages(self, page_ids: Sequence[int]) -> list[bytes]:
        pages = self._slots.reshape(-1, self.page_size)
        return [pages[page_id].tobytes() for page_id in page_ids]

    def write_pages(self, page_ids: Sequence[int], contents: Sequence[bytes]) -> None:
        pages = self._slots.reshape(-1, self.page_size)
        for page_id, content in zip(page_ids, contents, strict=True):
            if len(content) != pages[page_id].nbytes:
                raise RunnerError(f"a page has {pages[page_id].nbytes} bytes, not {len(content)}")
            pages[page_id] = np.frombuffer(content, np.int64)

    def read_states(self, slots: Sequence[int]) -> list[bytes]:
        return self.states.read(slots)

    def write_states(self, slots: Sequence[int], contents: Sequence[bytes]) -> None:
        self.states.write(slots, contents)

    def close(self) -> None:
        self._slots = np.empty(0, np.int64)

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        if not len(self._slots):
            raise RunnerError("the runner was closed; make a new one")
        for row, index, page in inputs.page_updates:
            self._page_table[row, index] = page
        for update in inputs.rule_updates:
            self._rules[update.row] = update.record
        pages = self._slots.reshape(-1, self.page_size)
        for source, destination, num_tokens in inputs.page_copies:
            pages[destination, :num_tokens] = pages[source, :num_tokens]
        for call in inputs.image_calls:
            self.images.encode(call)
        for call in inputs.span_calls:
            self._compute_span(call)
        for row in range(self.max_num_seqs):
            self._store(inputs, row)
        if len(self.states):
            stored = self._slots[inputs.tokens.slots[: inputs.num_tokens]]
            self._states_after = self.states.run(inputs, stored.tolist())
        step_id = inputs.step_id
        self.trace.append(("launch", step_id))
        on_read = partial(self.trace.append, ("read", step_id))
        if inputs.masks_follow:
            choose = partial(self._choose, inputs, self._generation)
            return FakeLateStepHandle(NO_OUTPUT, on_read, choose)
        return FakeStepHandle(self._choose_tokens(inputs, inputs.mask_updates), on_read)

    def _choose(
        self, inputs: ModelInputs, generation: int, masks: Sequence[MaskUpdate]
    ) -> StepOutput:
        if generation != self._generation:
            raise RunnerError("the step was dropped before its tokens were chosen")
        self.trace.append(("choose", inputs.step_id))
        return self._choose_tokens(inputs, masks)

    def _choose_tokens(self, inputs: ModelInputs, masks: Sequence[MaskUpdate]) -> StepOutput:
        for update in masks:
            self._rules[update.record] = self._rules[update.row]
            self._rules[update.record, MASK:] = update.mask
        count = inputs.num_logits
        rows = inputs.logits.rows[:count]
        drawn = np.array(
            [self._sample(inputs, index, int(row)) for index, row in enumerate(rows)], np.int32
        )
        targets = inputs.logits.targets[:count]
        is_choice = targets == NO_TARGET
        self._last_sampled[rows[is_choice]] = drawn[is_choice]
        return _output(np.where(is_choice, drawn, targets), drawn, self._hidden(inputs))

    def _store(self, inputs: ModelInputs, row: int) -> None:
        tokens, starts = inputs.tokens, inputs.rows.query_starts
        for index in range(starts[row], starts[row + 1]):
            self._slots[tokens.slots[index]] = self._value(tokens, index, row)

    def _value(self, tokens: TokenInputs[HostArray], index: int, row: int) -> int:
        token = int(tokens.ids[index])
        if token == LAST_SAMPLED:
            token = int(self._last_sampled[row])
        if tokens.image_slots[index] != NO_IMAGE:
            token = self.images.value_at(int(tokens.image_slots[index]), token)
        rope_position = int(tokens.rope_positions[index, 0])
        if self.is_sparse and rope_position != NO_ROPE_POSITION:
            token = placed_token(token, int(tokens.positions[index]), rope_position)
        return token

    def _compute_span(self, call: SpanCall) -> None:
        row, count = int(call.groups.rows.kv_lens.argmax()), int(call.groups.counts.num_tokens[0])
        values = [self._value(call.groups.tokens, index, row) for index in range(count)]
        for slot, value in self.spans.compute(call, values).items():
            self._slots[slot] = value

    def _hidden(self, inputs: ModelInputs) -> npt.NDArray[np.float32]:
        rows = inputs.logits.rows
        found = [
            hidden_state(self._history(inputs, index, int(rows[index])))
            for index in inputs.hidden_rows.tolist()
        ]
        return np.stack(found) if found else NO_HIDDEN

    def _history(self, inputs: ModelInputs, index: int, row: int) -> list[int]:
        token_index = inputs.logits.token_indices[index]
        num_before = int(inputs.tokens.positions[token_index]) + 1
        history = [
            int(
                self._slots[
                    self._page_table[row, at // self.page_size] * self.page_size
                    + at % self.page_size
                ]
            )
            for at in range(num_before)
        ]
        start = int(inputs.tokens.window_starts[token_index])
        if self.is_sparse and start != NO_WINDOW_START:
            history = [*history, start, WINDOW_START]
        if not len(self.states) or self._states_after[token_index] == state_of(history):
            return history
        return [*history, *self._states_after[token_index]]

    def _sample(self, inputs: ModelInputs, index: int, row: int) -> int:
        logits, history = inputs.logits, self._history(inputs, index, row)
        record = logits.rule_record[index]
        rules = None if record == NO_RULES else self._rules[record].tolist()
        greedy = logits.temperature[index] == 0
        key = (0, 0) if greedy else tuple(int(word) for word in logits.keys[index])
        return next_token(
            history,
            (key[0], key[1]),
            vocab_size=self.vocab_size,
            rules=rules,
            banned=self.image_token_id,
        )


def _output(
    token_ids: np.ndarray, drawn: np.ndarray, hidden: npt.NDArray[np.float32]
) -> StepOutput:
    count = len(token_ids)
    return StepOutput(
        token_ids=np.maximum(token_ids, 0),
        is_finite=np.ones(count, np.bool_),
        has_choice=drawn != NO_TOKEN,
        logprobs=(-drawn / 8).astype(np.float32),
        ranks=np.ones(count, np.int32),
        top_ids=np.tile(drawn[:, None], (1, _MAX_LOGPROBS)).astype(np.int32),
        top_logprobs=np.tile(-drawn[:, None] / 8, (1, _MAX_LOGPROBS)).astype(np.float32),
        hidden=hidden,
    )


NO_OUTPUT = _output(np.zeros(0, np.int32), np.zeros(0, np.int32), NO_HIDDEN)
