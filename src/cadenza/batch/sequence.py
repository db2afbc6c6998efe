"""`Sequence`: the engine's mutable state of one output stream; `SequenceList`: sequences in an
order, of which any one leaves without a search. Invariant: `num_computed_tokens` <= `num_tokens`,
of which only the last `num_pending_tokens` have not been read back."""

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import NamedTuple, overload

from cadenza.batch.prompt import PLAIN, Prompt
from cadenza.batch.recurrent_state import SequenceState
from cadenza.drafting.drafts import Drafting
from cadenza.events import CacheMiss, FinishReason
from cadenza.request import Request, SamplingParams
from cadenza.structured import Constraint
from cadenza.tenant import Tenant

# Tokens that are appended at once because no others may follow; a step computes them together.
MAX_FORCED_TOKENS = 16


class PageCopy(NamedTuple):
    """Copies the KV of the first `num_tokens` tokens; a step writes the other slots before they are
    read."""

    source: int
    destination: int
    num_tokens: int


class WaitReason(Enum):
    """Why a waiting sequence did not start in the newest step."""

    TURN = "turn"  # others come before it
    ROW = "row"  # all are taken
    PAGES = "pages"  # too few are free
    QUOTA = "quota"  # its tenant's pages are in use
    STEP = "step"  # it has no room for more prompts
    SAMPLE = "sample"  # another one of its request computes the prompt
    PREFIX = "prefix"  # another request computes the beginning of its prompt
    DISK = "disk"  # its pages are being read from the page folder
    IMAGE = "image"  # its next one is not encoded
    SCORES = "scores"  # its prompt's, for a sparse prefill
    RETRY = "retry"  # sequences of a failed step are computed before, one at a time


class SequenceStatus(Enum):
    """Queued, in a row of the batch, or ended."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One stream of a request: number `sample` of `siblings` (empty if the request has only
    one)."""

    request_id: int
    request: Request
    seed: int
    max_num_tokens: int
    stop_token_ids: frozenset[int]
    token_ids: list[int]  # the prompt, or what is kept of it, and all tokens read back so far
    prompt: Prompt = PLAIN
    arrived_s: float = 0.0  # when it was submitted, by the engine's clock
    sample: int = 0
    siblings: list["Sequence"] = field(default_factory=list["Sequence"])
    status: SequenceStatus = SequenceStatus.WAITING
    # why it did not start in the newest step, if that step got as far as to it
    wait_reason: WaitReason | None = None
    row: int | None = None
    page_table: list[int] = field(default_factory=list[int])
    # the page copy to make before its next step; None after that step's launch
    page_copy: PageCopy | None = None
    page_keys: list[bytes] = field(default_factory=list[bytes])
    num_computed_tokens: int = 0  # tokens whose KV exists once the launched steps have run
    # tokens sampled by launched steps that have not been read; all drafts are taken for accepted
    # until then
    num_pending_tokens: int = 0
    # choices of launched steps whose tokens were known before they were read
    num_void_choices: int = 0
    has_started: bool = False  # it has had a row
    # a step with it failed, and it has not sampled since; its steps are its own
    is_retried: bool = False
    # prompt tokens whose KV was shared at its first start; None before. A sample that another
    # engine began has that engine's number.
    num_cached_tokens: int | None = None
    # where and why the look-up of its prompt ended at its first start, if early
    cache_miss: CacheMiss | None = None
    num_published_pages: int = 0
    # the prefix cache's serial of its last published page; None after a key collision, or where the
    # tenant's share of the cache is in use: both end publication
    published_serial: int | None = 0
    # the key of a page that another sequence computes, for which this one waits
    awaited_key: bytes | None = None
    num_sent_pages: int = 0  # entries of the page table already sent to the device
    # the recurrent state of its row; None without one, and while it has no row
    state: SequenceState | None = None
    num_preemptions: int = 0
    drafting: Drafting | None = None  # None if its steps verify no drafts
    # has accepted its generated tokens; None if every token is allowed
    constraint: Constraint | None = None
    takes_forced: bool = True  # tokens that must follow are appended without being sampled
    num_uncharged_tokens: int = 0  # such tokens that its tenant has not been charged for

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def tenant(self) -> Tenant:
        return self.request.tenant

    @property
    def num_prompt_tokens(self) -> int:
        """Those that are computed."""
        kept = self.prompt.kept
        return len(self.request.prompt_token_ids) if kept is None else kept.num_tokens

    @property
    def num_skipped_tokens(self) -> int:
        """By how much the index of a generated token exceeds its position."""
        kept = self.prompt.kept
        return 0 if kept is None else kept.num_skipped

    @property
    def awaits_kept(self) -> bool:
        """True while it is not known which tokens of its prompt are computed."""
        prompt = self.prompt
        is_pruned = self.request.sparse_prefill is not None
        return is_pruned and prompt.kept is None and prompt.whole_reason is None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens, including those not yet read."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """0 if its last token is already being sampled."""
        num_pending = self.num_pending_tokens
        num_tokens = len(self.token_ids) + num_pending
        if num_pending and num_tokens >= self.max_num_tokens:
            return 0
        return num_tokens - self.num_computed_tokens

    @property
    def has_forced_tokens(self) -> bool:
        """Whether those to be computed are the newest one and forced ones after it."""
        return (
            self.constraint is not None
            and self.num_computed_tokens >= self.num_prompt_tokens
            and 1 < self.num_uncomputed_tokens <= 1 + MAX_FORCED_TOKENS
        )

    @property
    def is_prompt_only(self) -> bool:
        return self.max_num_tokens == self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def is_fresh(self) -> bool:
        return self.status is SequenceStatus.WAITING and self.num_tokens == self.num_prompt_tokens

    @property
    def fork_source(self) -> "Sequence | None":
        """A running sibling with the prompt's KV and state but for the last token, which each
        recomputes."""
        if not self.is_fresh or self.needs_prompt_rows:
            return None
        for sibling in self._running_siblings():
            if not sibling.is_before_fork and sibling.has_fork_state:
                return sibling
        return None

    @property
    def is_expecting_source(self) -> bool:
        """While a running sibling has not yet computed the prompt that this one will share."""
        if not self.is_fresh or self.needs_prompt_rows:
            return False
        is_coming = any(sibling.is_before_fork for sibling in self._running_siblings())
        return is_coming and self.fork_source is None

    @property
    def is_before_fork(self) -> bool:
        most = self.num_prompt_tokens - 1
        return self.num_computed_tokens < most or self.page_copy is not None

    @property
    def has_fork_state(self) -> bool:
        """Has the state after the prompt without its last token, or needs none."""
        state = self.state
        return state is None or self.num_prompt_tokens == 1 or state.for_samples is not None

    @property
    def awaits_fork(self) -> bool:
        return any(each.is_fresh for each in self.siblings)

    @property
    def needs_prompt_rows(self) -> bool:
        """True while logit rows of the prompt are missing; it must then be computed."""
        rows = self.prompt.rows
        return rows is not None and not rows.is_complete

    def _running_siblings(self) -> list["Sequence"]:
        return [each for each in self.siblings if each.status is SequenceStatus.RUNNING]

    def append(self, token_id: int) -> FinishReason | None:
        """The finish reason: a stop token at the maximum length counts as "stop", as does one after
        which the constraint allows none."""
        self.token_ids.append(token_id)
        self.num_pending_tokens -= 1
        self.is_retried = False
        if token_id in self.stop_token_ids:
            return "stop"
        if self.constraint is not None:
            self.constraint.accept(token_id)
            if self.constraint.is_complete:
                return "stop"
        return "length" if len(self.token_ids) >= self.max_num_tokens else None

    def append_forced(self, token_id: int) -> FinishReason | None:
        """Without sampling; a launched step's sample in its place is discarded."""
        if self.num_pending_tokens:
            self.num_void_choices += 1
        else:
            self.num_pending_tokens += 1
            self.num_uncharged_tokens += 1
        return self.append(token_id)

    def drop_drafts(self) -> None:
        """After a step with drafts was read."""
        self.num_pending_tokens = 0
        self.num_computed_tokens = min(self.num_computed_tokens, len(self.token_ids) - 1)

    def rewind(self) -> None:
        """Keeps the tokens, so that the stream can continue."""
        self.row = None
        self.page_table = []
        self.page_copy = None
        self.num_computed_tokens = 0
        self.num_published_pages = 0
        self.published_serial = 0
        self.num_sent_pages = 0
        self.state = None
        if self.prompt.rows is not None:
            self.prompt.rows.rewind()


class SequenceList(SequenceOf[Sequence]):
    """The scheduler's waiting, or running, sequences."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._ranks: dict[Sequence, int] = {}
        self._next_ranks, self._ranks_before = count(), count(-1, -1)

    def append(self, sequence: Sequence) -> None:
        self._ranks[sequence] = next(self._next_ranks)
        self._sequences.append(sequence)

    def appendleft(self, sequence: Sequence) -> None:
        self._ranks[sequence] = next(self._ranks_before)
        self._sequences.insert(0, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError if it is not there."""
        index = bisect_left(self._sequences, self._ranks[sequence], key=self._ranks.__getitem__)
        del self._sequences[index], self._ranks[sequence]

    def of_tenant(self, name: str) -> list[Sequence]:
        return [each for each in self._sequences if each.tenant.name == name]

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, value: object) -> bool:
        return value in self._ranks

    @overload
    def __getitem__(self, index: int) -> Sequence: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sequence]: ...

    def __getitem__(self, index: int | slice) -> Sequence | list[Sequence]:
        return self._sequences[index]


class RunningRows(SequenceList):
    """In the order of their starts, each in the lowest row that was free."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._free = list(range(num_rows))
        self._num_rows = num_rows

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def append(self, sequence: Sequence) -> None:
        sequence.row = heapq.heappop(self._free)
        sequence.status = SequenceStatus.RUNNING
        super().append(sequence)

    def remove(self, sequence: Sequence) -> None:
        assert sequence.row is not None, "a running sequence has no row"
        heapq.heappush(self._free, sequence.row)
        super().remove(sequence)

    def check_invariants(self) -> None:
        rows = [sequence.row for sequence in self if sequence.row is not None]
        assert len(rows) == len(self), "a running sequence has no row"
        assert sorted([*rows, *self._free]) == list(range(self._num_rows)), (
            "rows are lost or shared"
        )
