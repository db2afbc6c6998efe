"""`/openapi.json`, generated from routes (`ApiRoute`), bodies and errors. Invariant: every status
that a route can answer with is in it."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import cadenza
from cadenza.server.errors import STATUSES
from cadenza.server.fields.body import Body, UnknownFields, UnknownMembers, taking_unknown
from cadenza.server.fields.types import Schema, or_null
from cadenza.server.http.exchange import Dialect, Exchange

Policy = Literal["open", "key"]
"""`open` needs no API key and reveals nothing about requests; `key` needs one, if keys are set."""

RouteHandler = Callable[[Any, Exchange], Awaitable[None]]
"""Answers a request; the first argument is the `Service`."""

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}

EVERYWHERE = (400, 401, 405)


def one_of(*texts: str) -> Schema:
    return {"type": "string", "enum": list(texts)}


def list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def object_of(required: dict[str, Schema]) -> Schema:
    return {"type": "object", "properties": required, "required": list(required)}


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """The body of a 200: component `name`, or text of a `media_type`; `also`: other text types, on
    request."""

    name: str
    schema: Schema | None
    also: tuple[str, ...] = ()
    media_type: str = "text/plain"


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """`statuses`: besides 200, and 400 (a head beyond its bounds), 401 and 405, which all have;
    `query`: its parameters. A generating endpoint's has no handler."""

    name: str
    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    answers: AnswerSchema
    handler: RouteHandler | None = None
    _: KW_ONLY
    policy: Policy = "key"
    statuses: tuple[int, ...] = ()
    body: type[Body] | None = None
    can_stream: bool = False
    query: Mapping[str, Schema] = field(default_factory=dict[str, Schema])


DESCRIPTION = ApiRoute(
    "openapi",
    "GET",
    "/openapi.json",
    "This description.",
    AnswerSchema("OpenApi", {"type": "object"}),
)

_ERROR = object_of(
    {"error": object_of({"message": TEXT, "type": TEXT, "param": or_null(TEXT), "code": TEXT})}
)
_MESSAGE_ERROR = object_of(
    {
        "type": one_of("error"),
        "error": object_of({"type": TEXT, "message": TEXT}),
        "request_id": TEXT,
    }
)

_ERRORS = {"Error": _ERROR, "MessageError": _MESSAGE_ERROR, "TextError": object_of({"error": TEXT})}
"""By the names that dialects give them."""


def describe_api(
    routes: Iterable[ApiRoute],
    dialect_of: Callable[[str], Dialect],
    *,
    needs_key: bool,
    unknown_fields: UnknownFields = "suggest",
) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    schemas: dict[str, Schema] = {**_ERRORS}
    for route in routes:
        path = route.path.replace(":path}", "}")
        with taking_unknown(UnknownMembers(unknown_fields)):
            operation = _operation(route, dialect_of(path), needs_key)
        paths.setdefault(path, {})[route.method.lower()] = operation
        if route.answers.schema is not None:
            schemas[route.answers.name] = route.answers.schema
    return {
        "openapi": "3.1.0",
        "info": {"title": "Cadenza", "version": cadenza.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute, dialect: Dialect, needs_key: bool) -> dict[str, Any]:
    statuses = sorted({*EVERYWHERE, *route.statuses})
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "security": [{"key": []}] if needs_key and route.policy == "key" else [],
        "responses": {
            "200": _answer(route, dialect),
            **{str(each): _error(each, dialect) for each in statuses},
        },
    }
    if route.body is not None:
        content = {"application/json": {"schema": route.body.object_schema()}}
        operation["requestBody"] = {"required": True, "content": content}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in route.query.items()
    ]
    if "{" in route.path:
        schema = {**TEXT, "minLength": 1}
        parameters.append({"name": "id", "in": "path", "required": True, "schema": schema})
    if parameters:
        operation["parameters"] = parameters
    return operation


def _answer(route: ApiRoute, dialect: Dialect) -> dict[str, Any]:
    name = route.answers.name
    content: dict[str, Any] = {kind: {"schema": TEXT} for kind in route.answers.also}
    if route.answers.schema is None:
        content[route.answers.media_type] = {"schema": TEXT}
        return {"description": f"{name}.", "content": content}
    content["application/json"] = {"schema": {"$ref": f"#/components/schemas/{name}"}}
    if route.can_stream:
        content[dialect.stream_type] = {"schema": TEXT}
    return {"description": route.summary, "content": content}


def _error(status: int, dialect: Dialect) -> dict[str, Any]:
    return {
        "description": STATUSES[status].summary,
        "content": {
            "application/json": {"schema": {"$ref": f"#/components/schemas/{dialect.error_schema}"}}
        },
    }
