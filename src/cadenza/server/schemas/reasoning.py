"""The fields of bodies that say how much a model reasons, and how much it writes.

Owns the efforts with their bounds, and the verbosities. Knows no model. Invariant: an effort bounds
reasoning, or says nothing; it never asks for more than the model gives. A verbosity is advice.
"""

from collections.abc import Mapping

from cadenza.server.schemas.field_types import Integer, OneOf

EFFORTS: Mapping[str, int | None] = {
    "none": None,
    "minimal": 256,
    "low": 1024,
    "medium": None,
    "high": None,
    "xhigh": None,
    "max": None,
}
"""And the most tokens of thinking that each means where the chat template has no efforts of its
own; None: as many as the model likes. With `none` the template's switch turns thinking off."""

EFFORT = OneOf(tuple(EFFORTS))
EFFORT_HELP = (
    "For the chat template, where it has efforts or a switch; otherwise minimal and low bound the "
    "tokens of thinking."
)

VERBOSITY = OneOf(("low", "medium", "high"))
VERBOSITY_HELP = "For the chat template, where it reads `verbosity`; otherwise without effect."

UNBOUNDED = -1
BUDGET = Integer(UNBOUNDED, 1 << 31)
BUDGET_HELP = "Most tokens of thinking, which is then ended; -1 is no bound."


def bound_of(budget: int | None) -> int | None:
    """None: no bound."""
    return None if budget == UNBOUNDED else budget
