"""`SlotPrefixes`: finds slots (`--kv-layout dense`) whose KV begins like a sequence; a slot keeps
its content until allocated again. Invariant: contents are compared, and a slot is known only up to
the last token whose successor was sampled from finite logits."""

import sys
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from cadenza.batch.sequence import Sequence
from cadenza.kv.page_keys import Content

MIN_PREFIX = 16  # Tokens of the shortest prefix whose copy is worth more than its computation.

BLOCK = 256


@dataclass(frozen=True, slots=True)
class _Known:
    content: Content
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPrefix:
    """`is_most`: at least half of the slot, so that a takeover loses little."""

    slot: int
    num_tokens: int
    is_most: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Closest:
    """How many of a prompt's first tokens the closest slot has; `goes_on` after them."""

    num_common: int
    goes_on: bool


class SlotPrefixes:
    """`unit` 1: slots continue after any token; otherwise only after the last multiple of it before
    their prompt's last token, where a recurrent runner keeps a snapshot."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._slots: dict[int, _Known] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, sequence: Sequence, content: Content) -> SlotPrefix | None:
        """Without the last token."""
        most = len(content.token_ids) - 1
        if self._unit > 1:
            if sequence.request.needs_prompt_rows:
                return None
            most = min(most, sequence.num_prompt_tokens - 1)
        best, length = None, MIN_PREFIX - 1
        for slot, known in self._slots.items():
            common = self._common(known, content, most)
            if common > length:
                best, length = slot, common
        if best is None:
            return None
        is_most = self._unit == 1 and 2 * length >= self._slots[best].num_tokens
        return SlotPrefix(slot=best, num_tokens=length, is_most=is_most)

    def closest(self, content: Content, num_tokens: int) -> Closest:
        """Even if it cannot be continued there."""
        best, goes_on = 0, False
        for known in self._slots.values():
            own = known.content
            if own.salt != content.salt:
                continue
            limit = min(known.num_tokens, num_tokens, num_alike(own, content))
            common = common_length(own.token_ids, content.token_ids, limit)
            if common > best:
                best, goes_on = common, common < known.num_tokens
        return Closest(num_common=best, goes_on=goes_on)

    def publish(self, sequence: Sequence, content: Content, num_tokens: int) -> bool:
        if self._unit > 1:
            if sequence.request.needs_prompt_rows:
                return False
            num_tokens = (sequence.num_prompt_tokens - 1) // self._unit * self._unit
        if num_tokens < MIN_PREFIX:
            return False
        images = tuple(replace(each, payload=b"") for each in content.attachments)
        content = replace(content, attachments=images)
        self._slots[sequence.page_table[0]] = _Known(content, num_tokens)
        return True

    def forget(self, slot: int) -> None:
        del self._slots[slot]

    def _common(self, known: _Known, content: Content, most: int) -> int:
        """0 if it is another tenant's."""
        own = known.content
        if own.salt != content.salt:
            return 0
        limit = min(known.num_tokens, most, num_alike(own, content))
        if self._unit > 1 and limit < known.num_tokens:
            return 0
        common = common_length(own.token_ids, content.token_ids, limit)
        return common if self._unit == 1 or common == known.num_tokens else 0


def num_alike(one: Content, other: Content) -> int:
    """Tokens before the first image that one of two contents has and the other has not."""
    if not one.attachments and not other.attachments:
        return sys.maxsize
    ours, theirs = (
        {(image.start, image.digest) for image in each.attachments} for each in (one, other)
    )
    return min((start for start, _ in ours ^ theirs), default=sys.maxsize)


def common_length(one: SequenceOf[int], other: SequenceOf[int], limit: int) -> int:
    start = 0
    while start < limit:
        end = min(start + BLOCK, limit)
        ours, theirs = list(one[start:end]), list(other[start:end])
        if ours != theirs:
            pairs = zip(ours, theirs, strict=True)
            return start + next(place for place, pair in enumerate(pairs) if pair[0] != pair[1])
        start = end
    return limit
