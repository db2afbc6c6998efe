"""What a parser makes of a text that comes in pieces, in a form that can be compared."""

from cadenza.outputs import OutputPart
from cadenza.text.answers.part_parser import PartParser, PartPlan

Joined = list[tuple[str, str | None, str]]


def joined(parts: list[OutputPart]) -> Joined:
    """Neighbours of one kind joined; calls stay apart."""
    found: Joined = []
    for part in parts:
        if found and found[-1][0] == part.kind and part.name is None:
            found[-1] = (part.kind, None, found[-1][2] + part.text)
        else:
            found.append((part.kind, part.name, part.text))
    return found


def parse(plan: PartPlan, *pieces: str) -> Joined:
    parser = PartParser(plan)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined([*parts, *parser.flush()])
