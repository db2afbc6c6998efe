"""The front end's handle on a process: what it prints, and what is left where it cannot start."""

import logging
import selectors
import sys

from cadenza.engine.process.child_process import ChildProcess
from cadenza.engine.process.log_lines import FOREIGN

TIMEOUT_S = 60.0
MANY_LINES = 10_000
"""More than a pipe holds."""
PRINTING = "import os\nwhile True: os.write(2, b'x' * 99 + b'\\n')"


class Follow(logging.Handler):
    """Takes lines no faster than the process prints them."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        super().__init__()
        self.selector = selector
        self.num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        assert record.getMessage() == "x" * 99
        self.num_lines += 1
        assert self.num_lines < MANY_LINES, "it goes on as long as the process does"
        assert self.selector.select(TIMEOUT_S)


def test_a_process_that_prints_without_end_does_not_keep_its_front_end() -> None:
    child = ChildProcess((sys.executable, "-c", PRINTING))
    logger = logging.getLogger(FOREIGN)
    with selectors.DefaultSelector() as selector:
        child.register(selector)
        follow = Follow(selector)
        logger.addHandler(follow)
        assert selector.select(TIMEOUT_S)
        assert child.log_output()
        logger.removeHandler(follow)
        child.unregister(selector)
    assert 0 < follow.num_lines < MANY_LINES
    assert child.close(within_s=0) < 0
