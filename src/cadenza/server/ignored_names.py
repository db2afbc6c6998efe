"""`IgnoredNames`: tells of fields that a request has and this server does not know.

Owns the header and the log lines. Knows no field. Invariant: a name is logged once, however many
requests have it, and no value is ever shown.
"""

import logging
from collections.abc import Sequence
from urllib.parse import quote

from cadenza.text.notices import Notices

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-cadenza-ignored"


class IgnoredNames:
    """Of all requests of a server."""

    def __init__(self) -> None:
        self._notices = Notices(logger)

    def headers(self, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """The header of the answer to a request in which these were ignored."""
        if not names:
            return ()
        shown = [quote(name, safe="", errors="backslashreplace") for name in names]
        for name in shown:
            self._notices.tell(
                name,
                "ignored %s in a request, which is unknown here (said once for each name; "
                "--strict-fields refuses such fields)",
                name,
            )
        return ((IGNORED_HEADER, ", ".join(shown)),)

    def format_headers(self, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Of the formats in a request's schema that are not followed."""
        if not names:
            return ()
        shown = ["format." + quote(name, safe="", errors="backslashreplace")[:64] for name in names]
        for name in shown:
            self._notices.tell(
                name,
                "%s of a schema is an annotation here, which no answer is held to (said once for "
                "each name)",
                name,
            )
        return ((IGNORED_HEADER, ", ".join(shown[:16])),)
