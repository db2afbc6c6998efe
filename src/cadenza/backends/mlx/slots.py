"""KV and state of a model's layers in dense slots, under the interface of mlx-lm's caches.
`RaggedCall` computes one token of several slots, `SlotCall` consecutive tokens of one. Invariants:
arrays are updated in place; a call writes its own positions and the last, which is padding and
never attended to. Legend: B slots · S capacity · C tokens of a call · H KV heads · D head size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import mlx.core as mx

from cadenza.errors import CheckpointError

Masks = dict[int | None, mx.array]

# mlx-lm's layers from latents to keys and values, which a call of one token applies to queries.
_LATENT_LAYERS = ("MultiLinear", "QuantizedMultiLinear")

# What is kept of a slot's recurrent state: after the last whole chunk of its prompt, from where
# other prompts can go on, and before the prompt's last token, where its samples part.
Snapshot = Literal["border", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedCall:
    """One token of each active slot; the other slots compute one that is dropped."""

    positions: mx.array  # [B]; 0 if inactive
    write_positions: mx.array  # [B]; the position to write: the padding one if inactive
    is_active: mx.array  # [B]
    masks: Masks = field(default_factory=dict)

    @property
    def offset(self) -> mx.array:
        return self.positions

    def mask(self, capacity: int, num_tokens: int, window: int | None) -> mx.array:
        assert num_tokens == 1
        return _mask(self.masks, self.positions[:, None], capacity, window)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCall:
    """Tokens of one slot from position `start` on. `write_positions` has the padding position for
    padding; `is_fresh` if the slot's state starts anew."""

    slot: int
    start: int
    write_positions: mx.array  # [C]
    is_fresh: bool
    masks: Masks = field(default_factory=dict)

    @property
    def offset(self) -> int:
        return self.start

    def mask(self, capacity: int, num_tokens: int, window: int | None) -> mx.array:
        positions = mx.arange(self.start, self.start + num_tokens)[None]
        return _mask(self.masks, positions, capacity, window)


Call = RaggedCall | SlotCall


def _mask(masks: Masks, positions: mx.array, capacity: int, window: int | None) -> mx.array:
    if window not in masks:
        keys = mx.arange(capacity)
        mask = keys <= positions[:, :, None]
        if window is not None:
            mask = mask & (keys > positions[:, :, None] - window)
        masks[window] = mask[:, None]
    return masks[window]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSizes:
    """`fill` is the initial value of keys and values."""

    num_slots: int
    capacity: int
    fill: float = 0.0

    @property
    def padding_position(self) -> int:
        return self.capacity - 1


class LayerSlots:
    """The slots of one layer; a kind overrides what it needs."""

    def clear(self, slot: int, start: int, stop: int) -> None:
        """Clears positions of a slot. Not needed where a fresh call starts from an empty state."""

    def save(self, slot: int, snapshot: Snapshot) -> None:
        """Saves the state of a slot. Not needed where each position remains."""

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Restores a saved state. Not needed where a call attends only to earlier positions."""


class KVSlots(LayerSlots):
    """Keys and values of one layer, in place of mlx-lm's `KVCache` or `RotatingKVCache`. Positions
    out of a window are masked, not dropped. MLX multiplies masked values by 0, so values that are
    not finite must not remain in a slot that is used again: `clear`."""

    def __init__(self, sizes: SlotSizes, window: int | None) -> None:
        self.max_size = window
        self.keys: Any = None  # [B, H, S, D]
        self.values: Any = None  # [B, H, S, D']
        self.offset: Any = 0
        self._sizes = sizes
        self._call: Call | None = None

    def begin(self, call: Call) -> None:
        self._call = call
        self.offset = call.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        call, count = self._call, keys.shape[2]
        if self.keys is None:
            self.keys, self.values = self._new(keys), self._new(values)
        self.offset = self.offset + count
        if isinstance(call, RaggedCall):
            rows = mx.arange(self._sizes.num_slots)
            self.keys[rows, :, call.write_positions] = keys[:, :, 0]
            self.values[rows, :, call.write_positions] = values[:, :, 0]
            return self.keys, self.values
        assert call is not None
        slots = mx.full(count, call.slot, mx.int32)
        self.keys[slots, :, call.write_positions] = keys[0].swapaxes(0, 1)
        self.values[slots, :, call.write_positions] = values[0].swapaxes(0, 1)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        if isinstance(self._call, SlotCall):
            slot = self._call.slot
            return self.keys[slot : slot + 1], self.values[slot : slot + 1]
        return self.keys, self.values

    @property
    def state(self) -> tuple[mx.array, mx.array, Any]:
        return (*self.keys_and_values(), self.offset)

    def make_mask(
        self,
        N: int,
        return_array: bool = False,  # noqa: ARG002 (it is always an array)
        window_size: int | None = None,
    ) -> mx.array:
        assert self._call is not None
        return self._call.mask(self._sizes.capacity, N, window_size or self.max_size)

    def arrays(self) -> list[mx.array]:
        return [] if self.keys is None else [self.keys, self.values]

    def copy(self, source: int, destination: int, num_tokens: int) -> None:
        for each in self.arrays():
            each[destination, :, :num_tokens] = each[source, :, :num_tokens]

    def clear(self, slot: int, start: int, stop: int) -> None:
        if self.values is not None:
            self.values[slot, :, start:stop] = 0
            self.values[slot, :, self._sizes.padding_position] = 0

    def drop(self) -> None:
        self.keys = self.values = None

    def _new(self, like: mx.array) -> mx.array:
        _, num_heads, _, size = like.shape
        shape = (self._sizes.num_slots, num_heads, self._sizes.capacity, size)
        return mx.full(shape, self._sizes.fill, like.dtype)


class StateSlots(LayerSlots):
    """The arrays of one recurrent layer, in place of mlx-lm's `ArraysCache`. A state cannot be cut:
    `save` keeps the present one, `copy` gives the kept ones to another slot, `restore` goes back to
    one."""

    lengths = None
    left_padding = None

    def __init__(self, sizes: SlotSizes, size: int) -> None:
        self._sizes = sizes
        self._pools: list[Any] = [None] * size  # [B, ...] each
        self._saved: dict[Snapshot, list[Any]] = self._no_snapshots()
        self._fresh: set[int] = set()
        self._call: Call | None = None

    def begin(self, call: Call) -> None:
        self._call = call
        is_fresh = isinstance(call, SlotCall) and call.is_fresh
        self._fresh = set(range(len(self._pools))) if is_fresh else set()

    @property
    def cache(self) -> list[Any]:
        return [self[index] for index in range(len(self._pools))]

    @property
    def state(self) -> list[Any]:
        return self.cache

    def __getitem__(self, index: int) -> Any:
        pool = self._pools[index]
        if pool is None or index in self._fresh:
            return None
        if isinstance(self._call, SlotCall):
            return pool[self._call.slot : self._call.slot + 1]
        return pool

    def __setitem__(self, index: int, value: mx.array) -> None:
        call = self._call
        if self._pools[index] is None:
            shape = (self._sizes.num_slots, *value.shape[1:])
            self._pools[index] = mx.zeros(shape, value.dtype)
            for saved in self._saved.values():
                saved[index] = mx.zeros(shape, value.dtype)
        if isinstance(call, SlotCall):
            self._pools[index][call.slot : call.slot + 1] = value
            self._fresh.discard(index)
            return
        assert call is not None
        is_active = call.is_active.reshape(-1, *[1] * (value.ndim - 1))
        self._pools[index] = mx.where(is_active, value, self._pools[index])

    def make_mask(self, N: int) -> None:
        """No mask: a call of a recurrent layer has no padding."""

    def advance(self, N: int) -> None:
        """Nothing to count: there is no padding."""

    def empty(self) -> bool:
        return self[0] is None

    def arrays(self) -> list[mx.array]:
        lists = (self._pools, *self._saved.values())
        return [each for arrays in lists for each in arrays if each is not None]

    def copy(self, source: int, destination: int, num_tokens: int) -> None:  # noqa: ARG002 (a state is whole)
        for saved in self._saved.values():
            for each in saved:
                if each is not None:
                    each[destination] = each[source]

    def drop(self) -> None:
        self._pools = [None] * len(self._pools)
        self._saved = self._no_snapshots()

    def save(self, slot: int, snapshot: Snapshot) -> None:
        for pool, saved in zip(self._pools, self._saved[snapshot], strict=True):
            if pool is not None:
                saved[slot] = pool[slot]

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        for pool, saved in zip(self._pools, self._saved[snapshot], strict=True):
            if pool is not None:
                pool[slot] = saved[slot]

    def _no_snapshots(self) -> dict[Snapshot, list[Any]]:
        return {each: [None] * len(self._pools) for each in get_args(Snapshot)}


class ListSlots:
    """In place of mlx-lm's `CacheList`."""

    def __init__(self, parts: Sequence["CacheSlots"]) -> None:
        self.caches = tuple(parts)

    def __getitem__(self, index: int) -> "CacheSlots":
        return self.caches[index]


CacheSlots = KVSlots | StateSlots | ListSlots


def new_slots(caches: Sequence[Any], sizes: SlotSizes) -> list[CacheSlots]:
    """In place of mlx-lm's `caches`. Raises CheckpointError for a cache that has no slots."""
    return [_slots_for(cache, sizes) for cache in caches]


def layers_of(slots: Sequence[CacheSlots]) -> Iterator[KVSlots | StateSlots]:
    for each in slots:
        if isinstance(each, ListSlots):
            yield from layers_of(each.caches)
        else:
            yield each


def has_state(slots: Sequence[CacheSlots]) -> bool:
    return any(isinstance(each, StateSlots) for each in layers_of(slots))


def depends_on_cuts(model: Any, slots: Sequence[CacheSlots]) -> bool:
    """Whether a token's bits depend on the cuts of its sequence into calls: with recurrent layers,
    and with attention over latents, whose call of one token has products of its own."""
    return has_state(slots) or any(
        type(each).__name__ in _LATENT_LAYERS for _, each in model.named_modules()
    )


def _slots_for(cache: Any, sizes: SlotSizes) -> CacheSlots:
    makers: dict[str, Callable[[], CacheSlots]] = {
        "KVCache": lambda: KVSlots(sizes, None),
        "RotatingKVCache": lambda: KVSlots(sizes, cache.max_size),
        "ArraysCache": lambda: StateSlots(sizes, len(cache.cache)),
        "CacheList": lambda: ListSlots([_slots_for(each, sizes) for each in cache.caches]),
    }
    kind = type(cache).__name__
    if kind not in makers or getattr(cache, "keep", 0):
        raise CheckpointError(
            f"the model keeps its context in mlx-lm's {kind}, which the mlx backend cannot share "
            f"among requests; supported are {', '.join(makers)}"
        )
    return makers[kind]()
