"""`UnknownMembers`: undeclared members of a request; `IgnoredNames`: their header and log lines.
Invariant: a member that was not refused is either declared or among the ignored names, as far as
there is room for them."""

import logging
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal
from urllib.parse import quote

from cadenza.server.errors import ApiError, Headers
from cadenza.text.templates.notices import Notices

UnknownFields = Literal["refuse", "suggest", "ignore"]
"""`refuse` refuses all that have a value, `suggest` likely typing errors, `ignore` none."""

MAX_IGNORED = 32
"""Names that are kept of a request."""
MAX_NEAR_CHECKS = 64
"""Unknown fields of a request whose names are compared with the known ones."""
MAX_SHOWN_NAME_CHARS = 64

_LONG_NAME_CHARS, _SHORT_NAME_CHARS = 10, 5


class UnknownMembers:
    """The unknown members of one request."""

    def __init__(self, policy: UnknownFields = "suggest") -> None:
        self.policy: UnknownFields = policy
        self._ignored: dict[str, None] = {}
        self._compared: dict[tuple[str, str], str | None] = {}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Each with the field that it is in, as `messages.frob`, in the order of the request."""
        return tuple(self._ignored)

    def suggestion(self, place: str, name: str, known: Iterable[str]) -> str | None:
        """The known name that may be meant. Raises ApiError (400) where a request has too many
        unknown names to compare."""
        if self.policy == "ignore":
            return None
        if (place, name) not in self._compared:
            if len(self._compared) == MAX_NEAR_CHECKS:
                message = f"the request has over {MAX_NEAR_CHECKS} unknown fields; leave them out"
                raise ApiError(400, "unknown_field", message)
            self._compared[place, name] = near_name(name, known)
        return self._compared[place, name]

    def ignore(self, name: str) -> None:
        if len(self._ignored) < MAX_IGNORED:
            self._ignored[name[:MAX_SHOWN_NAME_CHARS]] = None


_CURRENT: ContextVar[UnknownMembers] = ContextVar("unknown members")


@contextmanager
def taking_unknown(members: UnknownMembers) -> Generator[UnknownMembers]:
    """Within it `unknown_members` returns `members`: those of the request being checked."""
    token = _CURRENT.set(members)
    try:
        yield members
    finally:
        _CURRENT.reset(token)


def unknown_members() -> UnknownMembers:
    """Those of the request being checked; outside of a check, new ones that are not read."""
    return _CURRENT.get(None) or UnknownMembers()


def near_name(name: str, known: Iterable[str]) -> str | None:
    """Equal but for case and separators, or one edit away, two for long names; short names have no
    edits."""
    wanted = _plain(name[: 2 * MAX_SHOWN_NAME_CHARS])
    letters = frozenset(wanted)
    most = 0 if len(wanted) < _SHORT_NAME_CHARS else 1 if len(wanted) < _LONG_NAME_CHARS else 2
    found: tuple[int, str] | None = None
    for each in known:
        plain = _plain(each)
        if plain == wanted:
            return each
        is_far = abs(len(plain) - len(wanted)) > most or len(
            letters.symmetric_difference(plain)
        ) > (2 * most)
        if is_far or len(plain) < _SHORT_NAME_CHARS - 1:
            continue
        distance = _edits(wanted, plain)
        if distance <= most and (found is None or distance < found[0]):
            found = (distance, each)
    return None if found is None else found[1]


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def _edits(left: str, right: str) -> int:
    before: list[int] = []
    row = list(range(len(right) + 1))
    for place, letter in enumerate(left, 1):
        before, last, row = row, before, [place]
        for at, other in enumerate(right, 1):
            cost = min(before[at] + 1, row[at - 1] + 1, before[at - 1] + (letter != other))
            is_swap = place > 1 and at > 1 and (letter, left[place - 2]) == (right[at - 2], other)
            row.append(min(cost, last[at - 2] + 1) if is_swap else cost)
    return row[-1]


logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-cadenza-ignored"
_FIELD = (
    "ignored %s in a request, which is unknown here (said once for each name; --strict-fields "
    "refuses such fields)"
)
_FORMAT = (
    "%s of a schema is an annotation here, which no answer is held to (said once for each name)"
)


class IgnoredNames:
    """Of all requests of a server."""

    def __init__(self) -> None:
        self._notices = Notices(logger)

    def headers(self, names: Sequence[str]) -> Headers:
        """The header of the answer to a request in which these fields were ignored."""
        return self._headers([_quoted(name) for name in names], _FIELD)

    def format_headers(self, names: Sequence[str]) -> Headers:
        """Of the formats in a request's schema that are not followed."""
        return self._headers(["format." + _quoted(name)[:64] for name in names], _FORMAT, 16)

    def _headers(self, names: list[str], line: str, most: int | None = None) -> Headers:
        """The header has `most` of the names; None: all."""
        for name in names:
            self._notices.tell(name, line, name)
        return ((IGNORED_HEADER, ", ".join(names[:most])),) if names else ()


def _quoted(name: str) -> str:
    return quote(name, safe="", errors="backslashreplace")
