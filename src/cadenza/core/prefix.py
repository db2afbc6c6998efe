"""`Prefix`: what exists of a sequence before it starts: pages, and the state behind them."""

from dataclasses import dataclass

from cadenza.core.prefix_cache import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Pages that already hold the KV of a sequence's first `num_tokens` tokens.

    The first `num_published` of `page_ids` came from the prefix cache; `serial` is the serial of
    the last of them. `partial_page` holds the remaining tokens; it is copied, because the sequences
    write different tokens after them. An unreferenced one is taken over instead if `may_take_over`,
    or if no other page is left. `num_cached_tokens` is what the sequence reports as cached. With
    `is_fork` they are those of a sample's sibling.

    `state_slot` has the recurrent state behind these tokens: a prefix of a model with one ends
    where there is a snapshot. `num_matched` pages are in the prefix cache, with or without one.
    """

    page_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    num_published: int = 0
    serial: int = ROOT
    partial_page: int | None = None
    may_take_over: bool = False
    num_cached_tokens: int = 0
    is_fork: bool = False
    state_slot: int | None = None
    num_matched: int = 0
