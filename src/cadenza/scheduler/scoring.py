"""`Scoring`: a prompt whose tokens are scored for a sparse prefill; `ScoreMemo`: scores of recent
prompts, which follow from their tokens and the tokens that end the look-ahead. Invariant: tenants
of other salts do not learn from it what was scored."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from cadenza.batch.sequence import Sequence
from cadenza.events import WholePromptReason
from cadenza.request import Request, SamplingParams
from cadenza.sparse_prefill import LOOK_AHEAD, KeptTokens, num_chunks

MAX_PROMPTS = 256
MAX_CHUNKS = 1 << 20  # Scores of all prompts together: 8 MiB


def prompt_digest(sequence: Sequence) -> bytes:
    """What the scores of a sequence's prompt follow from, and its salt."""
    request, stop = sequence.request, sorted(sequence.stop_token_ids)
    found = hashlib.blake2b(request.cache_salt.encode(), digest_size=32)
    for token_ids in (request.prompt_token_ids, stop):
        found.update(array("q", (len(token_ids), *token_ids)).tobytes())
    return found.digest()


class ScoreMemo:
    """Scores of chunks by the digest of their prompt."""

    def __init__(self) -> None:
        self._scores: OrderedDict[bytes, array[float]] = OrderedDict()
        self._num_chunks = 0

    def __len__(self) -> int:
        return len(self._scores)

    def find(self, digest: bytes) -> SequenceOf[float] | None:
        found = self._scores.get(digest)
        if found is not None:
            self._scores.move_to_end(digest)
        return found

    def add(self, digest: bytes, scores: SequenceOf[float]) -> None:
        assert digest not in self._scores, "a prompt was scored twice"
        self._scores[digest] = array("d", scores)
        self._num_chunks += len(scores)
        while len(self._scores) > MAX_PROMPTS or self._num_chunks > MAX_CHUNKS:
            _, oldest = self._scores.popitem(last=False)
            self._num_chunks -= len(oldest)


@dataclass(slots=True, eq=False)
class Scoring:
    """`sequence` is the scorer's own, over the prompt and what is drawn after it. The last of
    `num_queries` may not be read. `is_retried`: a step with it failed, so that its steps are its
    own."""

    digest: bytes
    sequence: Sequence
    num_tokens: int
    waiters: dict[Sequence, None] = field(default_factory=dict[Sequence, None])
    num_queries: int = 0
    is_retried: bool = False

    @property
    def is_begun(self) -> bool:
        return self.sequence.row is not None

    @property
    def can_go_on(self) -> bool:
        return not self.sequence.num_pending_tokens and self.num_queries < LOOK_AHEAD

    @property
    def num_left(self) -> int:
        return len(self.sequence.token_ids) - self.sequence.num_computed_tokens


def scored_sequence(waiter: Sequence) -> Sequence:
    given = waiter.request
    request = Request(
        prompt_token_ids=given.prompt_token_ids,
        params=SamplingParams(max_tokens=LOOK_AHEAD, temperature=0.0),
        cache_salt=given.cache_salt,
        tenant=given.tenant,
    )
    return Sequence(
        request_id=waiter.request_id,
        request=request,
        seed=0,
        max_num_tokens=len(given.prompt_token_ids) + LOOK_AHEAD,
        stop_token_ids=waiter.stop_token_ids,
        token_ids=list(given.prompt_token_ids),
    )


def kept_unscored(sequence: Sequence) -> KeptTokens | None:
    sparse = sequence.request.sparse_prefill
    assert sparse is not None
    num_tokens = len(sequence.token_ids)
    count, num_kept = num_chunks(num_tokens), sparse.num_kept_chunks(num_tokens)
    if num_kept not in (count, len(sparse.forced_chunks(num_tokens))):
        return None
    return sparse.select([0.0] * count, num_tokens)


def select_kept(sequence: Sequence, scores: SequenceOf[float]) -> KeptTokens:
    sparse = sequence.request.sparse_prefill
    assert sparse is not None
    return sparse.select(scores, len(sequence.token_ids))


def prune(sequence: Sequence, kept: KeptTokens) -> None:
    """Makes it one over the tokens of its prompt that are kept; nothing is computed yet."""
    assert sequence.awaits_kept, "its prompt is pruned once, or not at all"
    assert kept.num_prompt_tokens == len(sequence.token_ids), "the kept tokens are another prompt's"
    sequence.token_ids = [*kept.of_prompt(sequence.token_ids)]
    sequence.max_num_tokens -= kept.num_skipped
    sequence.prompt = replace(sequence.prompt, kept=kept)
    # What was looked up so far was the whole prompt.
    sequence.page_keys = []
    sequence.awaited_key = None


def compute_whole(sequence: Sequence, reason: WholePromptReason) -> None:
    """Although its request has a sparse prefill."""
    sequence.prompt = replace(sequence.prompt, whole_reason=reason)
