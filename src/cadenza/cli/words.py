"""How numbers and foreign text are written for people.

Invariant: what a model or a file wrote cannot move the cursor, change colours or ring the bell.
"""

_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
_KEPT = {ord("\n"): "\n", ord("\t"): "    "}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_UNIT = 1024

NOTHING = "–"


def harmless(text: str) -> str:
    """`text` without control characters other than the line's end."""
    return text.replace("\r\n", "\n").translate(_CONTROLS | _KEPT)


def on_one_line(text: str) -> str:
    """`text` with its line ends and runs of blanks as single blanks."""
    return harmless(" ".join(text.split()))


def clipped(text: str, width: int) -> str:
    """The start of `text` in at most `width` characters."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def bytes_text(count: int) -> str:
    """Say 12.5 MiB."""
    amount, unit = float(count), 0
    while amount >= _UNIT and unit < len(_UNITS) - 1:
        amount, unit = amount / _UNIT, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{count} bytes"


def magnitude_text(count: int) -> str:
    """Say 3.4 M, 1.2 B."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f} {letter}"
    return str(count)


def seconds_text(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds:.3f} s"


def rate_text(per_s: float | None) -> str:
    return NOTHING if per_s is None else f"{per_s:.1f}"


def counted(count: int, noun: str) -> str:
    """Say 1 prompt, 2 prompts."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
