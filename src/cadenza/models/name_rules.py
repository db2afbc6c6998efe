"""Names of stored tensors and the declared ones, as rules: `by_rules`. A rule has a stored name and
the declared one, or None for what is no part of the model. `{layer}` in both stands for the number
of a layer, and `*` at their ends for any rest. The first rule that fits a name holds; other names
are declared ones."""

import re
from collections.abc import Callable, Iterable

NameRule = tuple[str, str | None]

LAYER, REST = "{layer}", "*"


def by_rules(rules: Iterable[NameRule]) -> Callable[[str], str | None]:
    """The declared name of a stored tensor, or None, for `Weights.renamed`."""
    compiled = [(*_compile(stored), own) for stored, own in rules]

    def own_name(name: str) -> str | None:
        for beginning, pattern, own in compiled:
            if name.startswith(beginning) and (found := pattern.fullmatch(name)) is not None:
                if own is None:
                    return None
                return own.removesuffix(REST).replace(LAYER, found["layer"]) + found["rest"]
        return name

    return own_name


def _compile(stored: str) -> tuple[str, re.Pattern[str]]:
    """The start of the names that a rule may fit, and their pattern."""
    before, _, after = stored.removesuffix(REST).partition(LAYER)
    layer = r"(?P<layer>\d{1,4})" if LAYER in stored else "(?P<layer>)"
    rest = "(?P<rest>.*)" if stored.endswith(REST) else "(?P<rest>)"
    pattern = f"{re.escape(before)}{layer}{re.escape(after)}{rest}"
    return before, re.compile(pattern, re.DOTALL)
