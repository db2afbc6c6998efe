"""`ScoreMemo`: scores of recent prompts, which follow from their tokens and the tokens that end the
look-ahead. Invariant: tenants of other salts do not learn from it what was scored."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from cadenza.batch.sequence import Sequence

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
