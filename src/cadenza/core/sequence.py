"""`Sequence`: the engine's mutable state of one output stream.

Knows its tokens, its progress and its pages' ids; does not know the pool, the batch or the device.
Invariant: `num_computed_tokens` <= `num_tokens`, and only the last `num_pending_tokens` of them are
still unread on the device.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from cadenza.core.prompt_logprobs import PromptLogprobsProgress
from cadenza.request import FinishReason, Request, SamplingParams


class PageCopy(NamedTuple):
    """The KV of the first `num_tokens` tokens of page `source`, copied to page `destination`.

    Nothing reads the rest of the destination before a step has written it.
    """

    source: int
    destination: int
    num_tokens: int


class SequenceStatus(Enum):
    """Where a sequence is: in the queue, in a row, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One stream of a request: the `sample`-th of `siblings`, which is empty for a single stream.

    Args:
        token_ids: the prompt and every token read back so far.
        page_copy: a page to copy before its next step; None once that is launched.
        num_computed_tokens: tokens whose KV exists once the launched steps are done.
        num_pending_tokens: tokens sampled by launched steps that have not been read.
        num_cached_tokens: prompt tokens whose KV was shared when it started; None before.
        num_sent_pages: entries of the page table that the device has.
        published_serial: the prefix cache's serial of its last published page; None after a
            collision, which ends publication.
        prompt_logprobs_progress: None where the request wants no prompt logprobs.
    """

    request_id: int
    request: Request
    seed: int
    max_num_tokens: int
    stop_token_ids: frozenset[int]
    token_ids: list[int]
    sample: int = 0
    siblings: list["Sequence"] = field(default_factory=list["Sequence"])
    status: SequenceStatus = SequenceStatus.WAITING
    row: int | None = None
    page_table: list[int] = field(default_factory=list[int])
    page_copy: PageCopy | None = None
    page_keys: list[bytes] = field(default_factory=list[bytes])
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int | None = None
    num_published_pages: int = 0
    published_serial: int | None = 0
    num_sent_pages: int = 0
    num_preemptions: int = 0
    prompt_logprobs_progress: PromptLogprobsProgress | None = None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens, the unread ones included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that still need KV; 0 when its last token is already being sampled."""
        num_pending = self.num_pending_tokens
        num_tokens = len(self.token_ids) + num_pending
        if num_pending and num_tokens >= self.max_num_tokens:
            return 0
        return num_tokens - self.num_computed_tokens

    @property
    def is_prompt_only(self) -> bool:
        """True where no token may follow the prompt (`max_tokens` 0)."""
        return self.max_num_tokens == len(self.request.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def is_fresh(self) -> bool:
        """True while it waits with nothing but its prompt."""
        return self.status is SequenceStatus.WAITING and self.num_tokens == self.num_prompt_tokens

    @property
    def fork_source(self) -> "Sequence | None":
        """A sibling whose pages hold the prompt's KV, all but the last token's.

        That token is computed again, so that each stream draws its own first token.
        """
        if not self.is_fresh or self.needs_prompt_logprobs:
            return None
        most = self.num_prompt_tokens - 1
        for sibling in self._running_siblings():
            if sibling.num_computed_tokens >= most and sibling.page_copy is None:
                return sibling
        return None

    @property
    def is_expecting_source(self) -> bool:
        """True while a sibling computes the prompt that this one will share."""
        if not self.is_fresh or self.needs_prompt_logprobs:
            return False
        return self._running_siblings() != [] and self.fork_source is None

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True while tokens of its prompt are to be described, which takes computing them."""
        return (
            self.prompt_logprobs_progress is not None
            and not self.prompt_logprobs_progress.is_complete
        )

    def _running_siblings(self) -> list["Sequence"]:
        return [each for each in self.siblings if each.status is SequenceStatus.RUNNING]

    def append(self, token_id: int) -> FinishReason | None:
        """Takes a token read back from the device; says why the stream ends with it, if it does.

        A stop token wins over the length cap when both fall on the same token.
        """
        self.token_ids.append(token_id)
        self.num_pending_tokens -= 1
        if token_id in self.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_num_tokens else None

    def rewind(self) -> None:
        """Forgets row, pages and progress; the tokens stay, so the stream goes on where it was."""
        self.row = None
        self.page_table = []
        self.page_copy = None
        self.num_computed_tokens = 0
        self.num_published_pages = 0
        self.published_serial = 0
        self.num_sent_pages = 0
        if self.prompt_logprobs_progress is not None:
            self.prompt_logprobs_progress.rewind()
