"""`DraftLedger`: what drafts have saved and cost in time, by their group and the number of rows.

Owns whether a group may draft at a number of rows. The unit is a step without drafts at that
number of rows, so that accounts of different rows compare. Invariant: what drafts have cost more
than they have saved is at most `SHARE` of the steps in which sequences could have drafted, and once
`RESERVE`; beyond that only the last loss of each account, which is known only afterwards.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

# Looked up by each sequence, or made by the engine's second model.
DraftOrigin = Literal["ngram", "model"]


class DraftGroup(NamedTuple):
    """Sequences whose drafts have one account. Those whose requests ask for drafts have one of
    their own: what the drafts of others are worth says nothing of theirs."""

    origin: DraftOrigin
    is_asked: bool = False

    @property
    def opposite(self) -> "DraftGroup":
        """With the same source."""
        return self._replace(is_asked=not self.is_asked)


# Of the steps in which sequences could draft: what trying drafts that do not pay may cost.
SHARE = 0.015
# The share is divided by the trials in succession that did not pay, and at most by this.
MAX_PATIENCE = 2
# Steps for the first trials of all accounts after the start, and of these for one account.
RESERVE, FIRST_CREDIT = 3.0, 2.0
MAX_CREDIT = 6.0  # steps that a source may lose in succession, after it has saved as many
# Steps saved beyond that, which may be spent on what a second model lacks of a sequence.
MAX_CAPITAL = 64.0
WEIGHT_OF_NEWEST = 0.2
MOVED_CREDIT = 1.0
# Of what a sequence's own drafts have saved it may lose the time of so many tokens again, although
# drafts of its source do not pay.
TOKENS_AHEAD = 2.0


class DraftState(NamedTuple):
    """What is known of a source at some rows: whether it drafts, and what a step with drafts saved
    of late, as a share of a step without."""

    origin: str
    rows: str
    is_on: bool
    gain: float


OnDrafts = Callable[[DraftState], object]


@dataclass(slots=True)
class OwnCredit:
    """What the drafts of one sequence have saved, as far as it may lose it again; in steps."""

    steps: float = 0.0

    def is_enough(self, num_rows: int) -> bool:
        return self.steps * num_rows >= 1.0

    def take(self, gain: float, num_rows: int) -> float:
        """Adds a gain or takes off a loss; returns what is left of it for the account."""
        before = self.steps
        self.steps = min(TOKENS_AHEAD / num_rows, max(0.0, before + gain))
        return gain - (self.steps - before)


@dataclass(slots=True, eq=False)
class DraftAccount:
    """Of one group at about the same number of rows, in steps."""

    # what drafts may cost before they have saved anything again; negative: beyond that
    credit: float = 0.0
    capital: float = 0.0  # what they have saved beyond `MAX_CREDIT`
    gain: float = 0.0  # mean of the newest steps with drafts, without what prompts took
    is_on: bool = True  # drafts are made other than on trial
    num_observed: int = 0
    # of the other group with this source at this number of rows
    other: "DraftAccount | None" = field(default=None, repr=False)
    _num_losses: int = 0
    _wanted: float = 0.0

    @property
    def may_draft(self) -> bool:
        """Whether one more loss like the newest is within the credit."""
        return self.credit >= max(0.0, -self.gain)

    @property
    def is_known(self) -> bool:
        return self.num_observed > 0

    def accrue(self, share: float = SHARE) -> float:
        """A step passed in which the group could have drafted; returns what it leaves of the share,
        as it has credit enough or its trials do not pay."""
        most = max(MAX_CREDIT, self._wanted)
        patience = min(MAX_PATIENCE, max(1, self._num_losses))
        taken = min(share / patience, max(0.0, most - self.credit))
        self.credit += taken
        return share - taken

    def observe(self, gain: float, left: float) -> None:
        """A step with drafts gained so much, of which `left` is not its sequences' own."""
        self.num_observed += 1
        weight = max(WEIGHT_OF_NEWEST, 1 / (1 + self.num_observed))
        self.gain += weight * (gain - self.gain)
        self._num_losses = 0 if gain > 0 else self._num_losses + 1
        self._add(left)

    def invest(self, steps: float) -> None:
        """So much was spent on what a second model lacked of sequences."""
        from_capital = min(self.capital, steps)
        self.capital -= from_capital
        self.credit -= steps - from_capital - self._borrow(steps - from_capital)
        self._wanted = 0.0

    def may_invest(self, steps: float) -> bool:
        """Whether so much may be spent on it; if not, credit is saved up for it."""
        if self.capital + self.credit + self._backing >= steps:
            return True
        self._wanted = steps if not self._wanted else min(self._wanted, steps)
        return False

    def _add(self, steps: float) -> None:
        self.credit += steps
        over = self.credit - max(MAX_CREDIT, self._wanted)
        if over > 0 and steps > 0:
            over = min(over, steps)
            self.credit -= over
            self.capital = min(MAX_CAPITAL, self.capital + over)
        self.credit += self._borrow(max(0.0, -self.gain) - self.credit)

    @property
    def _backing(self) -> float:
        """The capital of the other group, while its drafts pay, and these do or have hardly been
        tried."""
        is_trusted = self.gain >= 0 or self.num_observed <= MAX_PATIENCE
        if self.other is None or self.other.gain <= 0 or not is_trusted:
            return 0.0
        return self.other.capital

    def _borrow(self, steps: float) -> float:
        taken = min(self._backing, max(0.0, steps))
        if taken and self.other is not None:
            self.other.capital -= taken
        return taken


@dataclass(slots=True, eq=False)
class DraftLedger:
    """`on_change` is called when drafts of a source begin or cease to pay at a number of rows."""

    on_change: OnDrafts | None = None
    _accounts: dict[tuple[DraftGroup, int], DraftAccount] = field(
        default_factory=dict[tuple[DraftGroup, int], DraftAccount]
    )
    _reserve: float = RESERVE
    # as reported last
    _off: set[tuple[DraftOrigin, int]] = field(default_factory=set[tuple[DraftOrigin, int]])

    def account(self, group: DraftGroup, num_rows: int) -> DraftAccount:
        """The one of a group at a number of rows; a new one starts from the nearest of the group
        of which anything is known, with a part of its credit, or else from the reserve."""
        key = group, _bucket(num_rows)
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = self._opened(*key)
            other = self._accounts.get((group.opposite, key[1]))
            if other is not None:
                account.other, other.other = other, account
        return account

    def accrue(self, groups: Iterable[DraftGroup], num_rows: int) -> None:
        """A step passed in which these could have drafted. Each source has one share: of those who
        ask for drafts first, and what they leave of it is for the others."""
        shares: dict[DraftOrigin, float] = {}
        for group in sorted(set(groups), key=lambda each: not each.is_asked):
            share = shares.get(group.origin, SHARE)
            shares[group.origin] = self.account(group, num_rows).accrue(share)

    def _opened(self, group: DraftGroup, bucket: int) -> DraftAccount:
        nearest = self._nearest(group, bucket)
        if nearest is None:
            credit = min(FIRST_CREDIT, self._reserve)
            self._reserve -= credit
            is_on = (group.origin, bucket) not in self._off
            return DraftAccount(credit=credit, is_on=is_on)
        moved = 0.0
        if nearest.gain > 0:
            moved = max(0.0, min(MOVED_CREDIT, nearest.credit))
            nearest.credit -= moved
        return DraftAccount(credit=moved, gain=nearest.gain, is_on=nearest.is_on)

    def _nearest(self, group: DraftGroup, bucket: int) -> DraftAccount | None:
        nearest, least = None, inf
        for (other, at), account in self._accounts.items():
            if other == group and account.is_known and abs(at - bucket) < least:
                nearest, least = account, abs(at - bucket)
        return nearest

    def note(self, group: DraftGroup, num_rows: int) -> None:
        """After steps of a group at a number of rows were observed: tells if drafts of its source
        begin or cease to pay."""
        account = self.account(group, num_rows)
        if account.gain > 0 and account.credit >= MOVED_CREDIT:
            account.is_on = True
        elif account.gain < 0 and not account.may_draft:
            account.is_on = False
        key = group.origin, _bucket(num_rows)
        state = self._state_of(*key)
        if state.is_on is (key not in self._off):
            return
        if state.is_on:
            self._off.discard(key)
        else:
            self._off.add(key)
        if self.on_change is not None:
            self.on_change(state)

    @property
    def states(self) -> tuple[DraftState, ...]:
        known: set[tuple[DraftOrigin, int]] = {
            (group.origin, at) for (group, at), each in self._accounts.items() if each.is_known
        }
        return tuple(self._state_of(*key) for key in sorted(known))

    def _state_of(self, origin: DraftOrigin, bucket: int) -> DraftState:
        """Drafts are made while those of any group are; the gain is that of the better one."""
        keys = [(DraftGroup(origin, is_asked), bucket) for is_asked in (False, True)]
        accounts = [self._accounts[key] for key in keys if key in self._accounts]
        known = [account for account in accounts if account.is_known]
        is_on, gain = any(each.is_on for each in known), max(each.gain for each in known)
        return DraftState(origin, _rows_of(bucket), is_on, gain)


def _bucket(num_rows: int) -> int:
    return (max(1, num_rows) - 1).bit_length()  # 1, 2, 3 to 4, 5 to 8, 9 to 16, ...


def _rows_of(bucket: int) -> str:
    least, most = (1 << bucket >> 1) + 1, 1 << bucket
    return str(most) if bucket < 2 else f"{least}-{most}"
