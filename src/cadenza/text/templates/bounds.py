"""Limits on the time and memory of a template's rendering: `Budget` and the size checks. Invariant:
a check passes only if its operation yields at most `MAX_CHARS` characters or `MAX_ITEMS` items.
"""

import re
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import cast

MAX_TEMPLATE_STEPS = 500_000
MAX_SECONDS = 1.5
MAX_CHARS = 16 << 20
MAX_TOTAL_CHARS = 64 << 20
MAX_ITEMS = 1_000_000
MAX_NODES = 200_000
MAX_PADDED_WIDTH = 4096
MAX_BITS = 4096
_SIZED: tuple[type[Sized], ...] = (str, list, tuple)
_LARGE_WIDTH = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*")


class BoundExceededError(Exception):
    """The argument is a phrase such as "over 10 items"."""


@dataclass(slots=True, eq=False)
class Budget:
    """Of one rendering. `clock`, `deadline`: seconds of the thread's processor time, so that
    refusals do not depend on what else the machine does."""

    clock: Callable[[], float]
    deadline: float
    num_steps: int = 0
    num_chars: int = 0

    def step(self) -> None:
        """Counts a loop iteration or a call. Raises BoundExceededError."""
        self.num_steps += 1
        if self.num_steps > MAX_TEMPLATE_STEPS:
            raise BoundExceededError(f"over {MAX_TEMPLATE_STEPS} steps")
        if self.clock() > self.deadline:
            raise BoundExceededError(f"over {MAX_SECONDS:g} seconds of processor time")

    def charge(self, result: object) -> None:
        """Adds a result's characters, 8 for each item of a list. Raises BoundExceededError."""
        if isinstance(result, str):
            self.num_chars += len(result)
        elif isinstance(result, list):
            self.num_chars += 8 * len(cast(list[object], result))
        if self.num_chars > MAX_TOTAL_CHARS:
            raise BoundExceededError(f"over {MAX_TOTAL_CHARS} characters in all")


def start_budget(clock: Callable[[], float]) -> Budget:
    return Budget(clock=clock, deadline=clock() + MAX_SECONDS)


def check_chars(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise BoundExceededError(f"over {MAX_CHARS} characters")


def measure(value: object) -> int:
    """An upper bound of `len(str(value))` for JSON types: a list that holds another list many times
    is small in memory but large as text. Raises BoundExceededError."""
    num_chars = 0
    pending = [value]
    for _ in range(MAX_NODES):
        if not pending:
            return num_chars
        item = pending.pop()
        if isinstance(item, Mapping):
            members = cast(Mapping[object, object], item)
            pending += [*members.keys(), *members.values()]
            num_chars += 4 * len(members)
        elif isinstance(item, list | tuple | set | frozenset):
            pending += cast(Sequence[object], item)
            num_chars += 2 * len(cast(Sequence[object], item))
        num_chars += len(item) if isinstance(item, str) else 24
        check_chars(num_chars)
    raise BoundExceededError(f"over {MAX_NODES} values in one")


def check_operator(operator: str, left: object, right: object) -> None:
    if operator == "%" and isinstance(left, str):
        check_format(left, [right])
    if operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
        _check_length(len(left) + len(right), is_text=isinstance(left, str))
    if operator == "*":
        _check_product(left, right)
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        grown = bits + right.bit_length() if operator == "*" else bits * max(right, 1)
        if grown > MAX_BITS:
            raise BoundExceededError(f"a number of over {MAX_BITS} bits")


def check_format(pattern: str, values: Sequence[object]) -> None:
    if _LARGE_WIDTH.search(pattern):
        raise BoundExceededError(f"a width of over {MAX_PADDED_WIDTH}")
    if re.search(r":[^}]*\{", pattern):
        check_widths(values)
    num_fields = pattern.count("%") + pattern.count("{")
    check_chars(len(pattern) + num_fields * (MAX_PADDED_WIDTH + measure(list(values))))


def check_widths(values: Sequence[object]) -> None:
    for value in values:
        size = abs(value) if isinstance(value, int) else len(value) if isinstance(value, str) else 0
        if size > MAX_PADDED_WIDTH:
            raise BoundExceededError(f"a width of over {MAX_PADDED_WIDTH}")


def check_indent(text: object, values: Sequence[object]) -> None:
    check_widths(values)
    widths = [len(value) if isinstance(value, str) else value for value in values]
    width = max(
        [abs(width) for width in widths if isinstance(width, int)], default=MAX_PADDED_WIDTH
    )
    lines = text.count("\n") + 1 if isinstance(text, str) else 1
    check_chars(lines * width + measure(text))


def check_replace(text: str, old: str, new: str) -> None:
    num_places = len(text) // len(old) if old else len(text) + 1
    if len(new) > len(old):
        num_places = min(num_places, text.count(old))
        check_chars(len(text) + num_places * len(new))


def check_join(separator: str, parts: object) -> None:
    num_chars = measure(parts)
    num_parts = len(parts) if isinstance(parts, _SIZED) else 0
    check_chars(num_chars + num_parts * len(separator))


def _check_product(left: object, right: object) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, _SIZED) and isinstance(times, int):
            _check_length(len(sequence) * max(times, 0), is_text=isinstance(sequence, str))


def _check_length(length: int, *, is_text: bool) -> None:
    if is_text:
        check_chars(length)
    elif length > MAX_ITEMS:
        raise BoundExceededError(f"over {MAX_ITEMS} items")
