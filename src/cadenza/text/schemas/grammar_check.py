"""`check_grammar`: whether a grammar can be followed, and what is wrong with it: a trial over
single bytes shows whether it stays within `LIMITS`. Invariant: a grammar without a problem enforces
everything that was asked for; a keyword that cannot be enforced is refused by its name, never left
out."""

import json
import random
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cadenza.text.schemas.grammar import LIMITS, FormChecks
from cadenza.text.schemas.json_schema import NO_TEXT
from cadenza.text.schemas.schema_check import is_valid

MAX_ERROR_CHARS = 300

MAX_CACHED = 64
"""Results of this process; a grammar has some 100 KB."""

TRIAL_BYTES = 64
"""Of a trial, which takes one of the bytes that may follow at each place."""

TRIAL_LIMITS: Mapping[str, Any] = {**LIMITS, "step_max_items": 2_000, "verbose_errors": True}
"""A byte has fewer continuations than a token, of which one mask looks at all."""

_IMPOSSIBLE = NO_TEXT.partition(";")[0]

_UNSATISFIABLE = "Unsatisfiable schema: "
_NO_MATCH = "Regex is empty"
_STATES = "its expressions have too many states"
_SIZE = "its rules have too many parts"
_PLACE = re.compile(r"(at \d+\(\d+\): )?failed to compile JSON schema: ")
"""Of a schema within a grammar that the client has not written."""

_BOUNDS: Mapping[str, str] = {
    "Current row has": "at one place of it over {max_items_in_row} parts of rules may follow",
    "Too many items": "its rules can be read in too many ways at once",
    "lexer error": _STATES,
    "lexer precomputation": _STATES,
    "fuel exhausted": _STATES,
    "Unable to determine if regex is empty": _STATES,
    "grammar size": _SIZE,
    "grammar.symbols.len": _SIZE,
}
"""Bounds that messages name, in words; the advice follows them."""

ADVICE = "use fewer alternatives, optional properties and counted repetitions"


@lru_cache(maxsize=MAX_CACHED)
def check_grammar(grammar: str) -> str | None:
    """A `GrammarCheck` in this process, bounded only by `LIMITS`; the newest results are kept."""
    from llguidance import LLMatcher, LLParserLimits

    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        grammar, limits=LLParserLimits(**LIMITS)
    )
    if is_error:
        return described(messages[0])
    if any("no tokenizer" in each for each in messages):
        return "it names special tokens, which are not supported here; write their text"
    unenforced = [each for each in messages if "Unimplemented" in each]
    return described(unenforced[0]) if unenforced else _try(grammar)


IN_PROCESS = FormChecks(start=lambda: check_grammar, is_valid=is_valid)
"""Without bounds but `LIMITS`: for forms of one's own."""


def described(message: str) -> str:
    """The library's message about the client's own text, in one line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "it cannot be read"
    lines[0] = _PLACE.sub("", lines[0])
    if lines[0].startswith("Unimplemented keys: "):
        names = ", ".join(json.loads(lines[0].removeprefix("Unimplemented keys: ")))
        return f"it uses {names}, which cannot be enforced; leave it out"
    if lines[0].startswith("NoExtension"):
        return NO_TEXT
    if lines[0].startswith(_UNSATISFIABLE):
        reason = lines[0].removeprefix(_UNSATISFIABLE)
        return (
            NO_TEXT
            if reason.startswith(_NO_MATCH)
            else f"{_IMPOSSIBLE}: {reason}"[:MAX_ERROR_CHARS]
        )
    for begin, words in _BOUNDS.items():
        if begin in lines[0]:
            return f"{words.format_map(LIMITS)}; {ADVICE}"
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (causes or lines)[0][:MAX_ERROR_CHARS]


def _try(grammar: str) -> str | None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    matcher = LLMatcher(
        LLTokenizer("byte"), grammar, log_level=0, limits=LLParserLimits(**TRIAL_LIMITS)
    )
    rng = random.Random(0)  # noqa: S311  the same way each time, not a secret
    forced: list[int] = []  # bytes that must follow, found once: each mask would find them anew
    for _ in range(TRIAL_BYTES):
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = forced[:1] or _allowed_bytes(matcher.compute_bitmask())
        if matcher.is_error() or not allowed:
            break
        if len(allowed) == 1 and not forced:
            forced = matcher.compute_ff_tokens()
        byte = rng.choice(allowed)
        matcher.consume_token(byte)
        forced = forced[1:] if forced[:1] == [byte] else []
    return described(matcher.get_error()) if matcher.is_error() else None


def _allowed_bytes(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [byte for byte in range(256) if bits >> byte & 1]
