"""Random JSON Schemas of the keywords that can be enforced."""

import random
from typing import Any

PATTERNS = ("^[a-c]{2,4}$", "^x[0-9]+y?$", "[A-Z][a-z]*", "^(one|two|three)$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
NAMES = ("a", "b", "name", "age", "x y", 'q"u', "é")


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf", "ref"] * (2 if depth == 0 else 1)
    match rng.choice(kinds):
        case "string":
            return _string(rng)
        case "integer":
            return _integer(rng)
        case "number":
            return {"type": "number", **rng.choice([{}, {"minimum": -2.5, "maximum": 1e3}])}
        case "object":
            return _object(rng, depth)
        case "array":
            items = rng.choice([{"items": random_schema(rng, depth + 1)}, _tuple(rng, depth)])
            least = rng.randint(0, 2)
            return {"type": "array", "minItems": least, "maxItems": least + 2, **items}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case "ref":
            name = rng.choice(["d", "e"])
            return {"$defs": {name: random_schema(rng, 3)}, **_referring(name, depth)}
        case "enum":
            return {"enum": rng.sample([1, "one", None, True, 2.5, {"k": [1]}, "é\n"], 3)}
        case "const":
            return {"const": rng.choice([0, "c", [1, {"z": None}], False])}
        case kind:
            return {"type": kind}


def _referring(name: str, depth: int) -> dict[str, Any]:
    # A pointer is resolved from the whole schema's root.
    return {"$ref": f"#/$defs/{name}"} if depth == 0 else {"type": "null"}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"prefixItems": [random_schema(rng, depth + 1)], "items": {"type": "integer"}}


def _string(rng: random.Random) -> dict[str, Any]:
    bounds = [{}, {"maxLength": 5}, {"minLength": 2, "maxLength": 9}]
    texts = [{"pattern": rng.choice(PATTERNS)}, {"format": rng.choice(FORMATS)}]
    return {"type": "string", **rng.choice([*bounds, *texts])}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-200, 200)
    bounds = [{}, {"minimum": low}, {"minimum": low, "maximum": low + rng.randint(0, 500)}]
    return {
        "type": "integer",
        **rng.choice([*bounds, {"exclusiveMinimum": low}, {"multipleOf": 3}]),
    }


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    if rng.random() < 0.7:
        schema["additionalProperties"] = rng.choice([False, False, {"type": "integer"}])
    return schema
