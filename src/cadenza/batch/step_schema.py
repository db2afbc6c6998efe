"""The step schema: every array that a step sends to the device, declared once. The uploaded buffer,
the host's views, the device's arrays and the per-row settings follow from the declarations.
Invariants: every entry is a 32-bit word; padding is identified by counts and by -1 in
`TokenInputs.slots` and `LogitInputs.token_indices`, never by a token id."""

# T tokens of the step padded to its bucket · R rows = `max_num_seqs` · L logit rows =
# R + `NUM_EXTRA_LOGIT_ROWS` · U changed page-table entries · C copied pages · W words of a rule
# record, of which the device has L: one for each row, then those of drafts' masks.
# Groups are generic, so that a backend can use them for arrays of its own library.

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from cadenza.batch.sequence import Sequence
from cadenza.batch.token_rules import has_rules
from cadenza.request import Attachment

Int32Array = npt.NDArray[np.int32]
HostArray = npt.NDArray[Any]

NO_HIDDEN = np.zeros((0, 0), np.float32)

# In `TokenInputs.ids`: use the row's last sampled token, which is still on the device.
LAST_SAMPLED = -1

PADDING = -1

NO_ROPE_POSITION = -1  # In `TokenInputs.rope_positions`: the token's position on each axis

# In `RowInputs.state_starts`: zeros. In `TokenInputs.state_slots`: the state is not kept.
NO_STATE = -1

NO_IMAGE = -1  # In `TokenInputs.image_slots`: the token has the embedding of its id

NO_REACH = -1  # In `TokenInputs.reaches`: the token attends to no later one

# In `TokenInputs.window_starts`: what the layer's window allows, by positions.
NO_WINDOW_START = -1

NO_SCORES = 0  # In `RowInputs.score_lens`: the row's tokens score none

NO_TARGET = -1

NO_RULES = -1  # In `LogitInputs.rule_record`

NUM_EXTRA_LOGIT_ROWS = 64  # Logit rows per step for prompts and drafts, in addition to one per row.

WORD = np.dtype(np.int32)

A = TypeVar("A")

RowSetting = Callable[[Sequence], int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """`columns` words per entry, on an axis with `extra` more; `setting`: constant while a sequence
    has its row."""

    name: str
    dtype: np.dtype[Any]
    fill: int | float
    columns: int
    extra: int
    setting: RowSetting | None

    def num_words(self, length: int) -> int:
        return self.columns * (length + self.extra)


def _words(
    dtype: type[np.generic] = np.int32,
    *,
    fill: int | float = 0,
    columns: int = 1,
    extra: int = 0,
    setting: RowSetting | None = None,
) -> dict[str, Any]:
    return {
        "dtype": np.dtype(dtype),
        "fill": fill,
        "columns": columns,
        "extra": extra,
        "setting": setting,
    }


def _setting(dtype: type[np.generic], *, off: int | float, of: RowSetting) -> dict[str, Any]:
    """A sampling setting, computed by `of` from the sequence; `off` is the value without effect."""
    return _words(dtype, fill=off, setting=of)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts(Generic[A]):
    """Entries in use, as arrays of shape [1]."""

    num_tokens: A = field(metadata=_words())
    num_logits: A = field(metadata=_words())


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs(Generic[A]):
    """[T], of which `num_tokens` are in use."""

    ids: A = field(metadata=_words())  # LAST_SAMPLED or an id
    positions: A = field(metadata=_words())
    slots: A = field(metadata=_words(fill=PADDING))  # page * S + offset
    state_slots: A = field(metadata=_words(fill=NO_STATE))  # get the state after the token
    image_slots: A = field(metadata=_words(fill=NO_IMAGE))  # have the embedding of a placeholder
    rope_positions: A = field(metadata=_words(fill=NO_ROPE_POSITION, columns=3))
    reaches: A = field(metadata=_words(fill=NO_REACH))  # the last position of the token's span
    window_starts: A = field(metadata=_words(fill=NO_WINDOW_START))  # the first that windows show


@dataclass(frozen=True, slots=True, kw_only=True)
class RowInputs(Generic[A]):
    """[R]; `query_starts` is [R + 1]. `decode_starts`: a prompt's last token, or 0 if the logits of
    all its tokens are needed; a backend whose results depend on how tokens are cut into calls
    computes a row's tokens from there on one at a time, also when they are computed again. A slot
    that a step writes is read by no other row of it. With `score_lens` the row's last token scores
    the tokens before that position."""

    query_starts: A = field(metadata=_words(extra=1))
    kv_lens: A = field(metadata=_words())  # including this step's tokens; 0 for unused rows
    prompt_lens: A = field(metadata=_words())
    decode_starts: A = field(metadata=_words())  # the first position that is computed by itself
    state_starts: A = field(metadata=_words(fill=NO_STATE))
    score_lens: A = field(metadata=_words(fill=NO_SCORES))


def _num_logprobs(sequence: Sequence) -> int:
    count = sequence.params.logprobs
    return -1 if count is None else count


def _temperature(sequence: Sequence) -> float:
    return 0.0 if sequence.params.is_greedy else sequence.params.temperature


def _rule_record(sequence: Sequence) -> int:
    if not has_rules(sequence):
        return NO_RULES
    assert sequence.row is not None
    return sequence.row


def _top_k(sequence: Sequence) -> int:
    return min(max(sequence.params.top_k, 0), np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitInputs(Generic[A]):
    """[L], of which `num_logits` are in use. `positions`: of the token sampled or scored, which
    sets the draw's key; rules apply to the tokens before it. A row's logit rows are in order of
    position: the last samples its last token. A row with a target reports its log probability and
    samples none."""

    token_indices: A = field(metadata=_words(fill=PADDING))  # into T
    rows: A = field(metadata=_words())
    positions: A = field(metadata=_words())
    targets: A = field(metadata=_words(fill=NO_TARGET))
    keys: A = field(metadata=_words(np.uint32, columns=2))  # from (request seed, position)
    num_logprobs: A = field(metadata=_setting(np.int32, off=-1, of=_num_logprobs))
    temperature: A = field(metadata=_setting(np.float32, off=0.0, of=_temperature))
    top_k: A = field(metadata=_setting(np.int32, off=0, of=_top_k))
    top_p: A = field(metadata=_setting(np.float32, off=1.0, of=lambda s: s.params.top_p))
    min_p: A = field(metadata=_setting(np.float32, off=0.0, of=lambda s: s.params.min_p))
    top_n_sigma: A = field(
        metadata=_setting(np.float32, off=0.0, of=lambda s: max(0.0, s.params.top_n_sigma))
    )
    rule_record: A = field(metadata=_setting(np.int32, off=NO_RULES, of=_rule_record))  # into L


_Group = type[StepCounts[Any] | TokenInputs[Any] | RowInputs[Any] | LogitInputs[Any]]


@cache
def specs_of(group: _Group) -> tuple[FieldSpec, ...]:
    return tuple(FieldSpec(name=each.name, **each.metadata) for each in fields(group))


# The sampling settings: the last fields of `LogitInputs`
SETTINGS = tuple(spec for spec in specs_of(LogitInputs) if spec.setting is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups(Generic[A]):
    """All declared arrays of a step."""

    counts: StepCounts[A]
    tokens: TokenInputs[A]
    rows: RowInputs[A]
    logits: LogitInputs[A]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Offsets of all declared fields in a step's buffer of words, for T tokens and R rows."""

    num_tokens: int
    num_rows: int

    @property
    def num_logits(self) -> int:
        return self.num_rows + NUM_EXTRA_LOGIT_ROWS

    @property
    def num_words(self) -> int:
        return _fields_of(self)[-1].end

    def split(self, words: A, cast: Callable[[A, np.dtype[Any]], A]) -> StepGroups[A]:
        """Splits a buffer [num_words] into groups. `cast` reinterprets words as another dtype."""
        buffer: Any = words
        arrays: dict[_Group, dict[str, Any]] = {group: {} for group, _ in self.groups()}
        for field_ in _fields_of(self):
            spec = field_.spec
            part: Any = buffer[field_.start : field_.end]
            if field_.is_cast:
                part = cast(part, spec.dtype)
            if spec.columns > 1:
                part = part.reshape(spec.columns, -1).T
            arrays[field_.group][spec.name] = part
        groups: list[Any] = [group(**found) for group, found in arrays.items()]
        counts, tokens, rows, logits = groups
        return StepGroups(counts=counts, tokens=tokens, rows=rows, logits=logits)

    def empty_words(self) -> Int32Array:
        """Of a step without tokens: all padding."""
        parts = [
            np.full(field_.end - field_.start, field_.spec.fill, field_.spec.dtype).view(WORD)
            for field_ in _fields_of(self)
        ]
        return np.concatenate(parts)

    def views(self, words: Int32Array) -> StepGroups[HostArray]:
        """The groups of a host buffer, as views that share its memory."""
        return self.split(words, np.ndarray.view)

    def groups(self) -> Iterator[tuple[_Group, int]]:
        yield StepCounts, 1
        yield TokenInputs, self.num_tokens
        yield RowInputs, self.num_rows
        yield LogitInputs, self.num_logits


class _FieldWords(NamedTuple):
    group: _Group
    spec: FieldSpec
    start: int
    end: int
    is_cast: bool


@cache
def _fields_of(layout: StepLayout) -> tuple[_FieldWords, ...]:
    places: list[_FieldWords] = []
    start = 0
    for group, length in layout.groups():
        for spec in specs_of(group):
            end = start + spec.num_words(length)
            places.append(_FieldWords(group, spec, start, end, spec.dtype != WORD))
            start = end
    return tuple(places)


@dataclass(frozen=True, slots=True)
class RuleUpdate:
    """A row's new rules, effective from this step on."""

    row: int
    record: Int32Array  # [W]


@dataclass(frozen=True, slots=True)
class MaskUpdate:
    """Makes `record` the rules of `row` with another mask, after rule updates: the row's own
    record, of which only the mask changes, or one after all rows', for logit rows of this step."""

    record: int
    row: int
    mask: Int32Array  # [W - MASK]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageCall:
    """Work items [start, stop) of an image, in order from 0, none of another image between them.
    The last one writes `slots` [rows * columns]."""

    attachment: Attachment
    start: int
    stop: int
    slots: Int32Array

    @classmethod
    def into_first_slots(cls, attachment: Attachment, start: int, stop: int) -> "ImageCall":
        """A call of an image that is alone on the device."""
        slots = np.arange(attachment.rows * attachment.columns, dtype=np.int32)
        return cls(attachment=attachment, start=start, stop=stop, slots=slots)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanCall:
    """Rows of a span in pass `pass_index`, from the span's row `first`. `words` are a step's with
    these rows as its tokens, and the whole span in its row's `kv_lens`; `groups` are views of
    it."""

    pass_index: int
    first: int
    words: Int32Array
    groups: StepGroups[HostArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """Ragged rows concatenated and padded to a bucket. `words` holds all declared fields and is
    uploaded; `groups` are views of it. Data that rarely changes is sent separately."""

    step_id: int
    words: Int32Array
    groups: StepGroups[HostArray]
    # [U, 3] of (row, index in the row's page table, page)
    page_updates: Int32Array = field(default_factory=lambda: np.zeros((0, 3), np.int32))
    # [C, 3] of `core.sequence.PageCopy`, done before the step. A backend may copy full pages; one
    # whose page is a slot of `max_model_len` tokens copies only the first `num_tokens`.
    page_copies: Int32Array = field(default_factory=lambda: np.zeros((0, 3), np.int32))
    rule_updates: tuple[RuleUpdate, ...] = ()
    mask_updates: tuple[MaskUpdate, ...] = ()
    # Tokens are chosen when the masks are given later, by `backends.base.LateStepHandle`.
    masks_follow: bool = False
    # [H] logit rows whose hidden states are needed, ascending
    hidden_rows: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    # Done in order, before the step's tokens, of which there may be none
    image_calls: tuple[ImageCall, ...] = ()
    # Done in order after `image_calls` and all updates, before the step's tokens.
    span_calls: tuple[SpanCall, ...] = ()

    @classmethod
    def empty(cls, *, bucket: int, num_rows: int) -> "ModelInputs":
        layout = StepLayout(bucket, num_rows)
        words = layout.empty_words()
        return cls(step_id=-1, words=words, groups=layout.views(words))

    @property
    def num_tokens(self) -> int:
        return int(self.groups.counts.num_tokens[0])

    @property
    def num_logits(self) -> int:
        return int(self.groups.counts.num_logits[0])

    @property
    def tokens(self) -> TokenInputs[HostArray]:
        return self.groups.tokens

    @property
    def rows(self) -> RowInputs[HostArray]:
        return self.groups.rows

    @property
    def logits(self) -> LogitInputs[HostArray]:
        return self.groups.logits


class RowSettings:
    """The sampling settings of all batch rows, as words in the order of `SETTINGS`."""

    def __init__(self, num_rows: int) -> None:
        self._words = np.empty((len(SETTINGS), num_rows), WORD)
        self._views = [
            words.view(spec.dtype) for spec, words in zip(SETTINGS, self._words, strict=True)
        ]
        for spec, view in zip(SETTINGS, self._views, strict=True):
            view[:] = spec.fill

    def set_row(self, row: int, sequence: Sequence) -> None:
        for spec, view in zip(SETTINGS, self._views, strict=True):
            assert spec.setting is not None
            view[row] = spec.setting(sequence)

    def write(self, inputs: ModelInputs, places: slice, rows: HostArray) -> None:
        """Of the batch's `rows` to the logit rows `places`."""
        num_logits = len(inputs.logits.rows)
        block = inputs.words[-len(SETTINGS) * num_logits :].reshape(len(SETTINGS), num_logits)
        block[:, places] = self._words[:, rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """One entry per logit row in use (N). `hidden`: the states after the final norm of
    `ModelInputs.hidden_rows`."""

    token_ids: Int32Array  # [N]
    is_finite: npt.NDArray[np.bool_]  # [N]; False if the logits hold a NaN or an infinity
    has_choice: npt.NDArray[np.bool_]  # [N]; False if the rules ban every token
    logprobs: npt.NDArray[np.float32]  # [N], of the sampled token; 0 if not requested
    ranks: Int32Array  # [N]; 1 is the most likely
    top_ids: Int32Array  # [N, K]
    top_logprobs: npt.NDArray[np.float32]  # [N, K]
    hidden: npt.NDArray[np.float32] = field(default_factory=lambda: NO_HIDDEN)  # [H, E]

    @classmethod
    def empty(cls) -> "StepOutput":
        return cls(
            token_ids=np.zeros(0, np.int32),
            is_finite=np.zeros(0, np.bool_),
            has_choice=np.zeros(0, np.bool_),
            logprobs=np.zeros(0, np.float32),
            ranks=np.zeros(0, np.int32),
            top_ids=np.zeros((0, 0), np.int32),
            top_logprobs=np.zeros((0, 0), np.float32),
        )
