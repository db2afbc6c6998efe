"""Answers in JSON: fields taken out of a sentence, and facts as an object.

Held out are combinations of values (a name with a city, a country with its keys).
"""

import json
from typing import Any

from training.corpus.chat import assistant, dialogue, system, user
from training.corpus.countries import CITIES, COUNTRIES
from training.corpus.example import Example, Source
from training.corpus.words import COLOURS, FRUITS, HOBBIES, JOBS, NAMES, THINGS

TASK = "json"

REQUESTS = (
    "Answer in JSON with the keys {keys}: {text}",
    "{text} Answer in JSON with the keys {keys}.",
    "Extract {keys} as JSON: {text}",
    "Give me a JSON object with {keys}. {text}",
)
FACT_REQUESTS = (
    "Give {keys} of {name} as JSON.",
    "Answer in JSON with the keys {keys}: tell me about {name}.",
    "Write a JSON object about {name} with the keys {keys}.",
)
JSON_SYSTEM = "Answer in JSON."


def json_answers(source: Source) -> Example:
    make = source.pick((_person, _person, _order, _country, _country, _list, _event))
    request, value = make(source)
    messages = [user(request), assistant(json.dumps(value, ensure_ascii=False))]
    if source.chance(0.15):
        messages.insert(0, system(JSON_SYSTEM))
    return dialogue(TASK, messages)


def _request(source: Source, text: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Asks for some of the fields, in random order."""
    keys = source.rng.sample(tuple(fields), source.rng.randint(2, len(fields)))
    request = source.pick(REQUESTS).format(keys=_joined(keys), text=text)
    return request, {key: fields[key] for key in keys}


def _joined(keys: list[str]) -> str:
    return ", ".join(keys[:-1]) + " and " + keys[-1]


def _person(source: Source) -> tuple[str, dict[str, Any]]:
    name, city = source.draw(lambda: (source.pick(NAMES), source.pick(CITIES)))
    fields = {
        "name": name,
        "age": source.rng.randint(3, 99),
        "city": city,
        "job": source.pick(JOBS),
        "hobby": source.pick(HOBBIES),
    }
    text = source.pick(
        (
            "{name} is {age} years old, lives in {city} and works as a {job}. "
            "{name} likes {hobby}.",
            "{name}, a {job} from {city}, is {age} and enjoys {hobby}.",
            "In {city} lives {name}, who is {age}. {name} is a {job} and loves {hobby}.",
        )
    ).format(**fields)
    return _request(source, text, fields)


def _order(source: Source) -> tuple[str, dict[str, Any]]:
    name, item = source.draw(lambda: (source.pick(NAMES), source.pick(THINGS)))
    fields = {
        "customer": name,
        "item": item,
        "colour": source.pick(COLOURS),
        "quantity": source.rng.randint(1, 40),
        "paid": source.chance(0.5),
    }
    paid = "has paid" if fields["paid"] else "has not paid yet"
    text = source.pick(
        (
            "{customer} ordered {quantity} of the {colour} {item} and {paid_text}.",
            "{customer} {paid_text} for {quantity} pieces of the {colour} {item}.",
        )
    ).format(**fields, paid_text=paid)
    return _request(source, text, fields)


def _event(source: Source) -> tuple[str, dict[str, Any]]:
    host, city = source.draw(lambda: (source.pick(NAMES), source.pick(CITIES)))
    fields = {
        "host": host,
        "city": city,
        "day": source.pick("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()),
        "hour": source.rng.randint(1, 12),
        "guests": source.rng.randint(2, 90),
    }
    text = "{host} gives a party in {city} on {day} at {hour} o'clock for {guests} guests."
    return _request(source, text.format(**fields), fields)


def _country(source: Source) -> tuple[str, dict[str, Any]]:
    country = source.pick(COUNTRIES)
    fields = {
        "country": country.name,
        "capital": country.capital,
        "continent": country.continent,
        "currency": country.currency,
        "language": country.language,
    }
    _, keys = source.draw(
        lambda: (country.name, source.rng.sample(tuple(fields), source.rng.randint(2, 5)))
    )
    request = source.pick(FACT_REQUESTS).format(keys=_joined(keys), name=country.name)
    return request, {key: fields[key] for key in keys}


def _list(source: Source) -> tuple[str, dict[str, Any]]:
    key, words = source.draw(lambda: _some_of_a_kind(source))
    request = source.pick(
        (
            "Put these {key} into a JSON object with the key {key}: {words}",
            "Answer in JSON with the key {key}, a list: {words}",
        )
    ).format(key=key, words=", ".join(words))
    return request, {key: words}


def _some_of_a_kind(source: Source) -> tuple[str, list[str]]:
    key, words = source.pick((("colours", COLOURS), ("fruits", FRUITS), ("jobs", JOBS)))
    return key, source.rng.sample(words, source.rng.randint(2, 5))
