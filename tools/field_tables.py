"""docs/fields.md: the endpoints and the fields of their bodies, from what requests are checked by.

Owns the page's form; `reference_tables` writes it. Invariant: a row has nothing that is not
derived: a field's type, bounds and default are those of its declaration.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cadenza.server.fields.body import Body, Effect, Field
from cadenza.server.openapi import ApiRoute
from cadenza.server.routes import ROUTES

HEAD = """# Endpoints and their fields

Every endpoint, and the fields of the bodies that it takes, in tables that a script writes from the
declarations by which requests are checked. `/openapi.json` of a server has them with the members of
nested objects and the answers. [serving.md](serving.md#what-there-is) says what is done with other
fields. `null` counts as absent everywhere.
"""
REFUSED_HEAD = """## Taken only where they ask for nothing

These fields of other engines would change an answer. They may have the value that changes nothing;
with another one the request is a 400.
"""
SHARING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_SHOWN = 1 << 20  # bounds beyond it are there to bound memory, and say nothing to a reader
NOT_BUILT = "Not built: "

Row = tuple[str, ...]


def table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def fields_page(routes: Sequence[ApiRoute] = ROUTES) -> str:
    paths = paths_of(routes)
    sharing = [body for body, own in paths.items() if set(own) & set(SHARING)]
    shared = set[Row | str].intersection(*({*rows_of(body), *labels_of(body)} for body in sharing))

    def own_section(title: str, body: type[Body], left_out: set[Row | str]) -> str:
        rows = [row for row in rows_of(body) if row not in left_out]
        return section(title, rows, [name for name in labels_of(body) if name not in left_out])

    first = sharing[0]
    parts = [
        HEAD,
        f"## Endpoints\n\n{table(('endpoint', 'key', ''), map(endpoint_row, routes))}",
        own_section(
            "Fields of chat, completions, Responses and Messages",
            first,
            {*rows_of(first), *labels_of(first)} - shared,
        ),
    ]
    for body, own in paths.items():
        parts.append(own_section(", ".join(own), body, shared if body in sharing else set()))
    refused = table(("field", "what it would ask for"), refused_rows(paths))
    return "\n".join((*parts, REFUSED_HEAD, refused))


def paths_of(routes: Iterable[ApiRoute]) -> dict[type[Body], list[str]]:
    """The paths of the endpoints that take each kind of body."""
    found: dict[type[Body], list[str]] = {}
    for route in routes:
        if route.body is not None:
            found.setdefault(route.body, []).append(route.path)
    return found


def endpoint_row(route: ApiRoute) -> Row:
    path = route.path.replace(":path}", "}")
    streams = " Answers whole, or as a stream." if route.can_stream else ""
    key = "" if route.policy == "open" else "yes"
    return (f"`{route.method} {path}`", key, route.summary + streams)


def section(title: str, rows: list[Row], labels: Sequence[str] = ()) -> str:
    parts = [f"## {title}\n"]
    if rows:
        parts.append(table(("field", "value", "default", ""), rows))
    if labels:
        names = ", ".join(f"`{name}`" for name in labels)
        parts.append(f"Without an effect here, whatever their value: {names}.\n")
    return "\n".join(parts)


def rows_of(body: type[Body]) -> list[Row]:
    """Of the fields that change something."""
    return [row_of(body, body.fields[name]) for name in body.effective_names]


def row_of(body: type[Body], field: Field[Any]) -> Row:
    others = [each.name for each in body.fields.values() if each.is_alias]
    also = [name for name in others if body.fields[name].target == field.name]
    names = f"`{field.name}`" + (" (needed)" if field.is_required else "")
    listed = ", ".join(f"`{name}`" for name in also)
    help = " ".join(filter(None, (field.help, f"Also {listed}." if also else "")))
    default = "" if field.default in (None, ()) else f"`{shown(field.default)}`"
    return (names, value_of(field.type.schema()), default, help)


def labels_of(body: type[Body]) -> list[str]:
    fields = body.fields.values()
    return [each.name for each in fields if each.effect is Effect.NONE and not is_refused(each)]


def refused_rows(bodies: Iterable[type[Body]]) -> Iterator[Row]:
    """Each field once, although several bodies have it."""
    by_reason: dict[str, list[str]] = {}
    for body in bodies:
        for field in filter(is_refused, body.fields.values()):
            names = by_reason.setdefault(field.help.removeprefix(NOT_BUILT).rstrip("."), [])
            if field.name not in names:
                names.append(field.name)
    for reason, names in by_reason.items():
        yield ", ".join(f"`{name}`" for name in names), reason


def is_refused(field: Field[Any]) -> bool:
    return field.help.startswith(NOT_BUILT)


def value_of(schema: dict[str, Any]) -> str:
    """A JSON Schema in a few words."""
    if "anyOf" in schema:
        parts = [value_of(each) for each in schema["anyOf"] if each != {"type": "null"}]
        return " or ".join(dict.fromkeys(parts))
    if "enum" in schema:
        return ", ".join(f"`{shown(each)}`" for each in schema["enum"] if each is not None)
    kinds: str | list[str] = schema.get("type", "anything")
    if not isinstance(kinds, str):
        return " or ".join(value_of({"type": each}) for each in kinds if each != "null")
    if kinds == "array":
        return f"list of {value_of(schema.get('items', {}))}"
    if kinds == "boolean":
        return "`true` or `false`"
    return ("text" if kinds == "string" else kinds) + bounds_of(schema)


def bounds_of(schema: dict[str, Any]) -> str:
    if schema.get("type") == "string":
        most = schema.get("maxLength", MAX_SHOWN)
        return f" of at most {most} characters" if most < MAX_SHOWN else ""
    least, most = schema.get("minimum"), schema.get("maximum", MAX_SHOWN)
    if least is None or least < -MAX_SHOWN:
        return ""
    return f" from {least:g}" + (f" to {most:g}" if most < MAX_SHOWN else "")


def shown(value: object) -> str:
    """As JSON, without the quotes of a text."""
    return value if isinstance(value, str) and value else json.dumps(value)
