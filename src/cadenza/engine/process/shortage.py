"""Which errors mean that the machine, not the engine, lacks something for a start.

What is lacking may be given back, so such a start is tried again and counts as no crash.
"""

import errno

CANNOT_START = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""Of making a process: descriptors, processes, memory to fork."""
_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


def is_for_want_of_descriptors(error: BaseException) -> bool:
    """Whether a file or a socket that could not be opened for want of one is the cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _DESCRIPTORS:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
