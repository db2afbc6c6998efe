"""`IgnoredNames`: the header and the log lines about what a request has and this server ignores.

Invariant: a name is logged once, however many requests have it, and no value is ever shown.
"""

import logging
from collections.abc import Sequence
from urllib.parse import quote

from cadenza.server.errors import Headers
from cadenza.text.templates.notices import Notices

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
