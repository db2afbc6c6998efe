"""`PrefixCache`: finds pages whose KV exists; `SlotPrefixes`: slots (`--kv-layout dense`) that
begin alike; `InFlightPrefixes`: who computes others; `Prefix`: what exists of a sequence.
Invariants: a hit is confirmed by comparing contents, so that a key collision is a miss; a slot is
known up to the last token whose successor was sampled from finite logits."""

import sys
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import NamedTuple

from cadenza.batch.sequence import Sequence
from cadenza.kv.page_keys import Content, PageContent, PageKeys, PrefixDigest

# Waiting sequences of which it is remembered what they would find; the oldest is forgotten.
MAX_LOOKUPS = 16

MAX_EVICTED_KEYS = 1 << 16  # Keys of removed pages that are remembered

# Pages after one prefix, newest first, with which a page that is missing is compared.
MAX_COMPARED_PAGES = 16

# Prefixes of which the content of the newest removed page after them is remembered.
MAX_REMOVED_PAGES = 1 << 12

ROOT = 0  # The parent serial of a first page


# A sequence waits for one that computes at most this many times the tokens to be shared.
MAX_WAIT_RATIO = 2

MIN_PREFIX = 16  # Tokens of the shortest prefix whose copy is worth more than its computation.
BLOCK = 256


def kv_content_of(sequence: Sequence) -> Content:
    request, kept = sequence.request, sequence.prompt.kept
    return Content(sequence.token_ids, request.attachments, request.cache_salt, kept)


@dataclass(frozen=True, slots=True)
class CachedPage:
    """Serials are unique, so `parent_serial` identifies the complete prefix before the page, which
    the parent's key alone would not."""

    serial: int
    key: bytes
    parent_serial: int
    parent_key: bytes
    content: PageContent


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lookup:
    """Valid until one of its pages is forgotten or a page with `missing_key` is published."""

    keys: SequenceOf[bytes]
    num_pages: int
    page_ids: tuple[int, ...]
    page_set: frozenset[int]
    serial: int
    missing_key: bytes | None


class _Branches:
    def __init__(self) -> None:
        self._pages: dict[bytes, dict[int, PageContent]] = {}
        self._removed: OrderedDict[bytes, PageContent] = OrderedDict()

    def add(self, parent: bytes, page_id: int, page: PageContent) -> None:
        self._pages.setdefault(parent, {})[page_id] = page

    def remove(self, parent: bytes, page_id: int) -> None:
        pages = self._pages[parent]
        self._removed[parent] = pages.pop(page_id)
        self._removed.move_to_end(parent)
        if not pages:
            del self._pages[parent]
        if len(self._removed) > MAX_REMOVED_PAGES:
            self._removed.popitem(last=False)

    def has_any(self, parent: bytes) -> bool:
        return parent in self._pages

    def num_common(self, parent: bytes, page: PageContent) -> int | None:
        """With the most similar page after `parent`; None without one."""
        pages = self._pages.get(parent, {})
        others = list(islice(reversed(pages.values()), MAX_COMPARED_PAGES))
        if parent in self._removed:
            others.append(self._removed[parent])
        return max((page.num_common(other) for other in others), default=None)


class PrefixCache:
    """Index of full pages by keyed hashes, so that clients cannot construct collisions. Lookups are
    memoised: waiting sequences repeat theirs in every step. `digest`: None while nobody asks for
    it."""

    def __init__(self, page_keys: PageKeys) -> None:
        self.page_size = page_keys.page_size
        self.page_keys = page_keys
        self.digest: PrefixDigest | None = None
        self._page_of_key: dict[bytes, int] = {}
        self._pages: dict[int, CachedPage] = {}
        self._num_published = 0
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._lookups: dict[int, _Lookup] = {}  # By the identity of their lists of keys
        self._branches = _Branches()

    def __len__(self) -> int:
        return len(self._pages)

    def watch(self) -> PrefixDigest:
        """The digest, which has all pages of the index from now on."""
        if self.digest is None:
            self.digest = PrefixDigest()
            for cached in self._pages.values():
                self.digest.add(cached.key)
        return self.digest

    def find(
        self, keys: list[bytes], content: Content, *, num_pages: int
    ) -> tuple[tuple[int, ...], int]:
        """Page ids and last serial of the longest cached prefix; `keys` must be the same list each
        time."""
        known = self._lookups.get(id(keys))
        if known is None or known.num_pages != num_pages:
            known = self._lookups[id(keys)] = self._look_up(keys, content, num_pages)
            if len(self._lookups) > MAX_LOOKUPS:
                del self._lookups[next(iter(self._lookups))]
        return known.page_ids, known.serial

    def leave(self, keys: list[bytes]) -> None:
        self._lookups.pop(id(keys), None)

    def known(self, keys: SequenceOf[bytes]) -> list[int]:
        pages = self._page_of_key
        return [pages[key] for key in takewhile(pages.__contains__, keys)]

    def goes_on(self, key: bytes) -> bool:
        return self._branches.has_any(key)

    def num_common(self, keys: SequenceOf[bytes], content: Content, index: int) -> int | None:
        """Tokens that page `index` shares with a page known after the same prefix; None if none
        is."""
        parent = self._parent_key(keys, content, index)
        return self._branches.num_common(parent, content.page(index, self.page_size))

    def _look_up(self, keys: list[bytes], content: Content, num_pages: int) -> _Lookup:
        found: list[int] = []
        parent = ROOT
        missing_key: bytes | None = None
        for index in range(num_pages):
            key = keys[index]
            page_id = self._page_of_key.get(key)
            cached = None if page_id is None else self._pages[page_id]
            page = content.page(index, self.page_size)
            if page_id is None or cached is None or not self._is_same(cached, parent, page):
                missing_key = key
                break
            found.append(page_id)
            parent = cached.serial
        return _Lookup(
            keys=keys,
            num_pages=num_pages,
            page_ids=tuple(found),
            page_set=frozenset(found),
            serial=parent,
            missing_key=missing_key,
        )

    def page_of(self, key: bytes) -> int | None:
        return self._page_of_key.get(key)

    def serial_of(self, page_id: int) -> int:
        return self._pages[page_id].serial

    def key_of(self, page_id: int) -> bytes:
        return self._pages[page_id].key

    @property
    def page_ids(self) -> list[int]:
        return list(self._pages)

    def tokens_of(self, page_id: int) -> tuple[int, ...]:
        return self._pages[page_id].content.token_ids

    def publish(
        self,
        page_id: int,
        index: int,
        keys: SequenceOf[bytes],
        content: Content,
        parent_serial: int,
    ) -> tuple[int | None, bool]:
        """The next page's parent serial (None if the key belongs to a different prefix), and
        whether this page was added: not if its key is in the index."""
        page, key = content.page(index, self.page_size), keys[index]
        known = self._page_of_key.get(key)
        if known is not None:
            cached = self._pages[known]
            is_same = self._is_same(cached, parent_serial, page)
            return (cached.serial if is_same else None), False
        self._num_published += 1
        serial, parent_key = self._num_published, self._parent_key(keys, content, index)
        self._page_of_key[key] = page_id
        self._evicted.pop(key, None)
        if self._lookups:
            self._drop([each for each in self._lookups.values() if each.missing_key == key])
        self._pages[page_id] = CachedPage(serial, key, parent_serial, parent_key, page)
        self._branches.add(parent_key, page_id, page)
        if self.digest is not None:
            self.digest.add(key)
        return serial, True

    def forget(self, page_id: int) -> None:
        if self._lookups:
            self._drop([each for each in self._lookups.values() if page_id in each.page_set])
        cached = self._pages.pop(page_id)
        self._branches.remove(cached.parent_key, page_id)
        del self._page_of_key[cached.key]
        if self.digest is not None:
            self.digest.remove(cached.key)
        self._evicted[cached.key] = None
        if len(self._evicted) > MAX_EVICTED_KEYS:
            self._evicted.popitem(last=False)

    def was_evicted(self, key: bytes) -> bool:
        return key in self._evicted

    def check_invariants(self) -> None:
        assert len(self._page_of_key) == len(self._pages), "index and contents differ in size"
        for page_id, cached in self._pages.items():
            assert self._page_of_key[cached.key] == page_id, f"page {page_id}: wrong key"

    def _drop(self, lookups: list[_Lookup]) -> None:
        for each in lookups:
            del self._lookups[id(each.keys)]

    @staticmethod
    def _is_same(cached: CachedPage, parent_serial: int, page: PageContent) -> bool:
        return cached.parent_serial == parent_serial and cached.content == page

    def _parent_key(self, keys: SequenceOf[bytes], content: Content, index: int) -> bytes:
        return keys[index - 1] if index else self.page_keys.root(content.salt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Pages that already hold the KV of a sequence's first `num_tokens` tokens."""

    page_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    num_published: int = 0  # of `page_ids`, those from the prefix cache
    serial: int = ROOT  # of the last of these
    partial_page: int | None = None  # has the remaining tokens; copied, as others follow them
    may_take_over: bool = False  # in place of a copy, if unreferenced
    num_cached_tokens: int = 0  # what the sequence reports
    is_fork: bool = False  # of a sample's sibling
    state_slot: int | None = None  # the recurrent state after these tokens
    num_matched: int = 0  # pages in the prefix cache, with a snapshot of the state or without


class Coming(NamedTuple):
    """A running sequence, and how many of its pages a waiting one shares and lacks."""

    sequence: Sequence
    num_pages: int


class InFlightPrefixes:
    """Keys of one prefix cache, each with the sequence that started first to compute its page."""

    def __init__(self) -> None:
        self._sequence_of: dict[bytes, Sequence] = {}
        self._computing: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._sequence_of)

    def add(self, sequence: Sequence, keys: SequenceOf[bytes]) -> None:
        for key in keys:
            if self._sequence_of.setdefault(key, sequence) is sequence:
                self._computing.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence not in self._computing:
            return
        self._computing.remove(sequence)
        for key in sequence.page_keys:
            if self._sequence_of.get(key) is sequence:
                del self._sequence_of[key]

    def is_being_computed(self, key: bytes | None) -> bool:
        return key in self._sequence_of

    def coming(self, keys: SequenceOf[bytes], page_size: int) -> Coming | None:
        """The sequence that computes the first missing pages of `keys`, if waiting saves work: they
        are published with its whole prompt, of which little more than the shared part may be
        left."""
        other = self._sequence_of.get(keys[0]) if keys else None
        if other is None:
            return None
        shared = takewhile(lambda key: self._sequence_of.get(key) is other, keys)
        num_shared = sum(1 for _ in shared)
        is_near = other.num_uncomputed_tokens <= MAX_WAIT_RATIO * num_shared * page_size
        return Coming(other, num_shared) if is_near else None

    def check_invariants(self, running: SequenceOf[Sequence]) -> None:
        assert self._computing == set(self._sequence_of.values()), "sequences and keys differ"
        assert self._computing <= set(running), "a page is awaited of a sequence that does not run"


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
            return start + next(index for index, pair in enumerate(pairs) if pair[0] != pair[1])
        start = end
    return limit
