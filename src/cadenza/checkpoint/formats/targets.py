"""Names and patterns that choose modules: `Target`. Checkpoints are not trusted, and a regular
expression can take exponential time: patterns have few repetitions and alternatives, and no
repeated group."""

import re
from dataclasses import dataclass

from cadenza.errors import CheckpointError
from cadenza.json_object import shorten

MAX_PATTERN = 1024
MAX_TARGETS = 4096
MAX_REPEATS = 4
MAX_GROUPS = 2
MAX_ALTERNATIVES = 64
PATTERN_PREFIX = "re:"

_LAZY_OR_ESCAPED = re.compile(r"\\.|\(\?:|(?<=[*+?}])\?")
_REPEATED_GROUP = re.compile(r"\)[*+?{]|\(\?")


@dataclass(frozen=True, slots=True)
class Target:
    """Chooses modules by their name, their class, or a pattern at the start of their name."""

    text: str
    pattern: re.Pattern[str] | None = None

    @classmethod
    def of(cls, value: object, where: str) -> "Target":
        """Reads a name, a class or "re:" with a pattern. Raises `CheckpointError`."""
        if not isinstance(value, str) or not value:
            raise CheckpointError(f"{where} has {shorten(value)}; it must have names or patterns")
        if not value.startswith(PATTERN_PREFIX):
            return cls(value)
        return cls(value, compile_pattern(value.removeprefix(PATTERN_PREFIX), where))

    def rank(self, module: str, kind: str) -> int | None:
        """How specific the match is: 0 for a name, 1 for a pattern, 2 for a class; else None."""
        if self.pattern is not None:
            return 1 if self.pattern.match(module) else None
        return 0 if self.text == module else 2 if self.text == kind else None


def compile_pattern(text: str, where: str) -> re.Pattern[str]:
    """A regular expression whose matching time is bounded. Raises `CheckpointError`."""
    plain = _LAZY_OR_ESCAPED.sub(lambda found: "(" if "(" in found[0] else "", text)
    is_bounded = (
        sum(map(plain.count, "*+?{")) <= MAX_REPEATS
        and plain.count("(") <= MAX_GROUPS
        and plain.count("|") < MAX_ALTERNATIVES
        and _REPEATED_GROUP.search(plain) is None
    )
    if len(text) > MAX_PATTERN or not is_bounded:
        raise CheckpointError(
            f"{where} has the pattern {shorten(text)}; allowed are at most {MAX_PATTERN} "
            f"characters, {MAX_REPEATS} repetitions, {MAX_GROUPS} groups and {MAX_ALTERNATIVES} "
            f"alternatives, and no repeated group; list the modules by name"
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{where} has {shorten(text)}, which is not a regular expression; correct it"
        ) from error
