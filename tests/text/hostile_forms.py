"""Forms of answers that are made to cost much, by their size."""


def optional(count: int) -> dict[str, object]:
    names = {f"p{i}": {"type": "integer"} for i in range(count)}
    return {"type": "object", "properties": names, "additionalProperties": False}


def any_of_objects(count: int) -> dict[str, object]:
    names = {f"p{i}": {"type": "string"} for i in range(20)}
    each = {"type": "object", "properties": names}
    return {"anyOf": [{**each, "required": [f"p{i % 20}"]} for i in range(count)]}


def alternatives(count: int) -> str:
    rules = "\n".join(f'r{i} ::= "x{i}"' for i in range(count))
    return f"root ::= {' | '.join(f'r{i}' for i in range(count))}\n{rules}"


def optional_rules(count: int) -> str:
    rules = "\n".join(f'r{i}: "a"?' for i in range(count))
    return f"start: {' '.join(f'r{i}' for i in range(count))}\n{rules}"


def doubling(count: int) -> str:
    return "\n".join(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(count))


def repeated(*lengths: int) -> list[object]:
    return [{"type": "string", "pattern": f"^([ab]{{{length}}})*$"} for length in lengths]


def nested(levels: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(levels):
        found = {"items": found}
    return found
