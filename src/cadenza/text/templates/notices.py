"""`Notices`: log lines of which each is written once, however often its cause comes back. Their
number is bounded, since clients choose what they are about.
"""

import logging

MAX_NOTICES = 256


class Notices:
    """Those of one owner."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._written: set[str] = set()

    def tell(self, subject: str, message: str, *arguments: object) -> None:
        if subject not in self._written and len(self._written) < MAX_NOTICES:
            self._written.add(subject)
            self._logger.info(message, *arguments)
