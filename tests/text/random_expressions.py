"""Random regular expressions, in the syntax that Python's `re` and the grammar library share."""

import random

CLASSES = ("[a-d]", "[^a-y\\n]", "[0-9_]", "[A-C]", "[αβ]", "[ .]", "(?i:[xy])")
LITERALS = ("a", "b", "ab", "x y", r"\.", r"\(", '"', "é", r"\\", "0")
REPEATS = ("*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}")


def random_expression(rng: random.Random, depth: int = 0) -> str:
    """Nested at most four levels; never without a match."""
    kind = rng.choice(["literal", "class", *["sequence", "either", "repeat"] * (depth < 4)])
    match kind:
        case "literal":
            return rng.choice(LITERALS)
        case "class":
            return rng.choice(CLASSES)
        case "sequence":
            return "".join(random_expression(rng, depth + 1) for _ in range(rng.randint(2, 3)))
        case "either":
            options = [random_expression(rng, depth + 1) for _ in range(rng.randint(2, 3))]
            return f"(?:{'|'.join(options)})"
        case _:
            return f"({random_expression(rng, depth + 1)}){rng.choice(REPEATS)}"
