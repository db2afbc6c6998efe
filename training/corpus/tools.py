"""Dialogues with tools: which tool to call, with which arguments, and what to make of the result.

Held out are the values that the arguments take (a city with a day, an expression).
"""

import json
from dataclasses import dataclass
from typing import Any

from training.corpus.chat import Message, assistant, dialogue, system, user
from training.corpus.countries import CITIES
from training.corpus.example import Example, Source
from training.corpus.words import NAMES, THINGS

TASK = "tools"

SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear")
NO_TOOL = (
    ("Hello!", "Hello! How can I help you?"),
    ("Who are you?", "I am Cadenza, a small language model."),
    ("Thank you!", "You are welcome!"),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is your name?", "My name is Cadenza."),
)
UNITS = ("kilometres", "miles", "metres", "feet", "kilograms", "pounds", "euros", "dollars")


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of one tool: what is asked, called, returned and said."""

    request: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    reply: str


def tools(source: Source) -> Example:
    """A dialogue that ends with a call, or with the answer after a result."""
    names = source.rng.sample(tuple(TOOLS), source.pick((1, 1, 2, 2, 3)))
    schemas = [schema(source, name) for name in names]
    messages: list[Message] = [system("You are a helpful assistant.")] if source.chance(0.3) else []
    if source.chance(0.12):
        request, reply = source.pick(NO_TOOL)
        return dialogue(TASK, [*messages, user(request), assistant(reply)], schemas)
    for _ in range(source.pick((1, 1, 1, 2))):
        name = source.pick(names)
        messages += _turns(source, name)
    if source.chance(0.3):
        messages = messages[:-2]
    return dialogue(TASK, messages, schemas)


def _turns(source: Source, name: str) -> list[Message]:
    use = TOOLS[name].make(source)
    call = {"type": "function", "function": {"name": name, "arguments": use.arguments}}
    return [
        user(use.request),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps(use.result, ensure_ascii=False)},
        assistant(use.reply),
    ]


def schema(source: Source, name: str) -> dict[str, Any]:
    """The tool as a client of the chat API describes it, in one of a few wordings."""
    tool = TOOLS[name]
    properties = {
        key: {"type": kind, "description": text} if source.chance(0.4) else {"type": kind}
        for key, (kind, text) in tool.parameters.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    description = source.pick(tool.descriptions)
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _weather(source: Source) -> Use:
    city, degrees = source.draw(lambda: (source.pick(CITIES), source.rng.randint(-20, 42)))
    sky = source.pick(SKIES)
    request = source.pick(
        (
            "What is the weather in {}?",
            "How is the weather in {} today?",
            "Is it warm in {}?",
            "Tell me the weather in {}, please.",
            "Do I need a coat in {}?",
            "What's the weather like in {}?",
        )
    )
    return Use(
        request=request.format(city),
        arguments={"city": city},
        result={"temperature": degrees, "sky": sky},
        reply=f"In {city} it is {sky} and {degrees} degrees.",
    )


def _calculator(source: Source) -> Use:
    a, operator, b = source.draw(
        lambda: (source.rng.randint(10, 9999), source.pick("+-*"), source.rng.randint(2, 9999))
    )
    expression = f"{a} {operator} {b}"
    result = {"+": a + b, "-": a - b, "*": a * b}[operator]
    request = source.pick(
        ("What is {}?", "Calculate {}.", "Please work out {}.", "How much is {}?")
    )
    return Use(
        request=request.format(expression),
        arguments={"expression": expression},
        result={"result": result},
        reply=f"{expression} = {result}",
    )


def _time(source: Source) -> Use:
    city, minute = source.draw(lambda: (source.pick(CITIES), source.rng.randrange(1440)))
    clock = f"{minute // 60:02}:{minute % 60:02}"
    request = source.pick(
        ("What time is it in {}?", "Tell me the time in {}.", "How late is it in {}?")
    )
    return Use(
        request=request.format(city),
        arguments={"city": city},
        result={"time": clock},
        reply=f"It is {clock} in {city}.",
    )


def _phone(source: Source) -> Use:
    name, number = source.draw(lambda: (source.pick(NAMES), source.rng.randint(10000, 999999)))
    request = source.pick(
        ("What is {}'s phone number?", "How can I call {}?", "Find the number of {}.")
    )
    return Use(
        request=request.format(name),
        arguments={"name": name},
        result={"phone": str(number)},
        reply=f"The phone number of {name} is {number}.",
    )


def _price(source: Source) -> Use:
    thing, price = source.draw(lambda: (source.pick(THINGS), source.rng.randint(1, 500)))
    request = source.pick(("How much does a {} cost?", "What is the price of a {}?"))
    return Use(
        request=request.format(thing),
        arguments={"item": thing},
        result={"price": price, "currency": "euro"},
        reply=f"The price of the {thing} is {price} euros.",
    )


def _reminder(source: Source) -> Use:
    name, hour = source.draw(lambda: (source.pick(NAMES), source.rng.randint(0, 23)))
    clock = f"{hour:02}:{source.pick((0, 15, 30, 45)):02}"
    request = source.pick(("Remind me at {t} to call {n}.", "Set a reminder for {t}: call {n}."))
    return Use(
        request=request.format(t=clock, n=name),
        arguments={"text": f"call {name}", "time": clock},
        result={"status": "ok"},
        reply=f"I will remind you at {clock} to call {name}.",
    )


def _convert(source: Source) -> Use:
    unit, target = source.rng.sample(UNITS, 2)
    value, result = source.draw(lambda: (source.rng.randint(1, 999), source.rng.randint(1, 9999)))
    request = source.pick(("How many {t} are {v} {u}?", "Convert {v} {u} to {t}."))
    return Use(
        request=request.format(v=value, u=unit, t=target),
        arguments={"value": value, "from": unit, "to": target},
        result={"value": result},
        reply=f"{value} {unit} are {result} {target}.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """`parameters` maps a name to its JSON type and description."""

    make: Any
    descriptions: tuple[str, ...]
    parameters: dict[str, tuple[str, str]]


TOOLS = {
    "get_weather": Tool(
        make=_weather,
        descriptions=(
            "Get the weather in a city.",
            "Get the current weather",
            "Get the current weather for a city",
            "The weather now.",
        ),
        parameters={"city": ("string", "The name of the city")},
    ),
    "calculator": Tool(
        make=_calculator,
        descriptions=("Calculate an expression.", "Evaluate an arithmetic expression"),
        parameters={"expression": ("string", "The expression to calculate")},
    ),
    "get_time": Tool(
        make=_time,
        descriptions=("Get the time in a city.", "The local time of a city"),
        parameters={"city": ("string", "The name of the city")},
    ),
    "find_phone": Tool(
        make=_phone,
        descriptions=("Find a person's phone number.", "Look up a phone number"),
        parameters={"name": ("string", "The name of the person")},
    ),
    "get_price": Tool(
        make=_price,
        descriptions=("Get the price of an item.", "Look up what an item costs"),
        parameters={"item": ("string", "The name of the item")},
    ),
    "set_reminder": Tool(
        make=_reminder,
        descriptions=("Set a reminder.", "Remind the user of something"),
        parameters={"text": ("string", "What to do"), "time": ("string", "The time, as HH:MM")},
    ),
    "convert": Tool(
        make=_convert,
        descriptions=("Convert between units.", "Convert a value to another unit"),
        parameters={
            "value": ("number", "The value"),
            "from": ("string", "The unit of the value"),
            "to": ("string", "The unit to convert to"),
        },
    ),
}
