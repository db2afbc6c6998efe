"""How many tokens answers in JSON take, and whether they end: ten schemas as libraries write them.

    python benchmarks/schemas.py MODEL [--max-tokens 300]

Each is answered once, at temperature 0. The table has the tokens of each answer, why it ended, and
whether it is JSON of its schema's keys; the text follows with --show.
"""

import argparse
import json
from typing import Any

from cadenza import LLM, SamplingParams
from cadenza.structured import StructuredOutput

STRING, NUMBER = {"type": "string"}, {"type": "number"}


def closed(**properties: Any) -> dict[str, Any]:
    """An object whose members are all required, as the official clients write one."""
    members = {"properties": properties, "required": list(properties)}
    return {"type": "object", **members, "additionalProperties": False}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linked list": (
        "Give a linked list of the numbers -1 and 4 as nodes with v and next.",
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "v": {"type": "integer"},
                        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    },
                    "required": ["v", "next"],
                }
            },
            "$ref": "#/$defs/node",
        },
    ),
    "place": ("Where is Paris?", closed(city=STRING, country=STRING)),
    "person": (
        "Describe Marie Curie.",
        closed(name=STRING, born={"type": "integer"}, fields={"type": "array", "items": STRING}),
    ),
    "enum": (
        "Is 'I love it' positive or negative?",
        closed(sentiment={"enum": ["positive", "negative", "neutral"]}, confidence=NUMBER),
    ),
    "open object": (
        "Give a book with title and year.",
        {"type": "object", "properties": {"title": STRING, "year": {"type": "integer"}}},
    ),
    "number": ("What is the price of a coffee in dollars?", closed(price=NUMBER)),
    "nested": (
        "Give an address in London.",
        closed(person=closed(name=STRING, address=closed(street=STRING, city=STRING))),
    ),
    "optional": (
        "Give a user called Ann.",
        {
            "type": "object",
            "properties": {
                "name": STRING,
                "email": {"anyOf": [STRING, {"type": "null"}], "default": None},
                "age": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            },
            "required": ["name"],
        },
    ),
    "steps": (
        "Solve 2x + 4 = 10 step by step.",
        closed(
            steps={"type": "array", "items": closed(explanation=STRING, output=STRING)},
            answer=STRING,
        ),
    ),
    "union": (
        "Give a circle of radius 2.",
        closed(
            shape={
                "anyOf": [
                    closed(kind={"const": "circle"}, radius=NUMBER),
                    closed(kind={"const": "square"}, side=NUMBER),
                ]
            }
        ),
    ),
}


def is_of_keys(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is a JSON object, with the members that a schema requires at its top."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and set(schema.get("required", [])) <= set(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    with LLM(options.model) as llm:
        print("| schema | tokens | ended by | complete |\n|---|---|---|---|")
        for name, (question, schema) in CASES.items():
            params = SamplingParams(
                max_tokens=options.max_tokens,
                temperature=0,
                structured=StructuredOutput(json=schema),
            )
            (answer,) = llm.chat([{"role": "user", "content": question}], params)
            output = answer.outputs[0]
            is_complete = is_of_keys(output.text, schema)
            count = len(output.token_ids)
            print(f"| {name} | {count} | {output.finish_reason} | {is_complete} |", flush=True)
            if options.show:
                print(repr(output.text))


if __name__ == "__main__":
    main()
