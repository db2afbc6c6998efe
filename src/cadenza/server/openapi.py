"""`/openapi.json`: the API's description, made of the tables of routes, fields and errors.

Owns the shapes of answers in JSON Schema. Invariant: every status that a route can answer with is
in it.
"""

from typing import Any

import cadenza
from cadenza.server.errors import KINDS
from cadenza.server.fields import UnknownFields, body_schema
from cadenza.server.kinds import Schema, or_null
from cadenza.server.routes import ROUTES, ApiRoute

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_ANY_OBJECT: Schema = {"type": "object"}
_IDS: Schema = {"type": "array", "items": _COUNT}

EVERYWHERE = (400, 401, 405)


def _object(required: dict[str, Schema]) -> Schema:
    return {"type": "object", "properties": required, "required": list(required)}


def _constant(value: str) -> Schema:
    return {"type": "string", "enum": [value]}


_USAGE = _object({"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT})
_HEAD: dict[str, Schema] = {
    "id": _TEXT,
    "created": _COUNT,
    "model": _TEXT,
    "system_fingerprint": or_null(_TEXT),
    "usage": _USAGE,
}
_PROMPT_LOGPROBS: Schema = or_null({"type": "array", "items": or_null(_ANY_OBJECT)})
_OF_PROMPT = {"prompt_token_ids": or_null(_IDS), "prompt_logprobs": _PROMPT_LOGPROBS}
_FINISH: Schema = {"type": "string", "enum": ["stop", "length", "abort"]}
_MODEL = _object(
    {
        "id": _TEXT,
        "object": _constant("model"),
        "created": _COUNT,
        "owned_by": _TEXT,
        "max_model_len": or_null(_COUNT),
    }
)
_MESSAGE = _object({"role": _constant("assistant"), "content": or_null(_TEXT)})


def _choices(content: dict[str, Schema]) -> Schema:
    choice = _object({"index": _COUNT, **content, "finish_reason": _FINISH})
    return {"type": "array", "items": choice, "minItems": 1}


SCHEMAS: dict[str, Schema] = {
    "Completion": _object(
        {
            **_HEAD,
            "object": _constant("text_completion"),
            "choices": _choices({"text": _TEXT, "token_ids": or_null(_IDS), **_OF_PROMPT}),
        }
    ),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "object": _constant("chat.completion"),
            "choices": _choices({"message": _MESSAGE, "token_ids": or_null(_IDS)}),
            **_OF_PROMPT,
        }
    ),
    "Cancelled": _object(
        {"id": _TEXT, "object": _constant("request"), "cancelled": {"type": "boolean"}}
    ),
    "Model": _MODEL,
    "ModelList": _object(
        {"object": _constant("list"), "data": {"type": "array", "items": _MODEL, "minItems": 1}}
    ),
    "Tokenized": _object({"count": _COUNT, "max_model_len": or_null(_COUNT), "tokens": _IDS}),
    "Detokenized": _object({"prompt": _TEXT}),
    "Health": _object({"status": _TEXT}),
    "Load": _object({"server_load": _COUNT}),
    "TokenizerInfo": _object(
        {
            "tokenizer_class": _TEXT,
            "vocab_size": _COUNT,
            "model_max_length": or_null(_COUNT),
            "chat_template": or_null(_TEXT),
            "bos_token": or_null(_TEXT),
            "eos_token": or_null(_TEXT),
            "pad_token": or_null(_TEXT),
            "unk_token": or_null(_TEXT),
        }
    ),
    "Version": _object({"version": _TEXT}),
    "OpenApi": _ANY_OBJECT,
    "Error": _object(
        {
            "error": _object(
                {"message": _TEXT, "type": _TEXT, "param": or_null(_TEXT), "code": _TEXT}
            )
        }
    ),
}


def describe_api(*, needs_key: bool, unknown_fields: UnknownFields = "refuse") -> dict[str, Any]:
    """OpenAPI 3.1, of a server that has keys or none."""
    paths: dict[str, Any] = {}
    for route in ROUTES:
        path = route.path.replace(":path}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(
            route, needs_key, unknown_fields
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Cadenza", "version": cadenza.__version__},
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute, needs_key: bool, unknown_fields: UnknownFields) -> dict[str, Any]:
    statuses = sorted({*EVERYWHERE, *route.statuses})
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "security": [{"key": []}] if needs_key and route.policy == "key" else [],
        "responses": {"200": _answer(route), **{str(each): _error(each) for each in statuses}},
    }
    if route.body is not None:
        content = {"application/json": {"schema": body_schema(route.body, unknown_fields)}}
        operation["requestBody"] = {"required": True, "content": content}
    if "{" in route.path:
        schema = {**_TEXT, "minLength": 1}
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": schema}]
    return operation


def _answer(route: ApiRoute) -> dict[str, Any]:
    if route.answers == "Metrics":
        return {"description": "Metrics.", "content": {"text/plain": {"schema": _TEXT}}}
    schema = {"$ref": f"#/components/schemas/{route.answers}"}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if route.body in ("completions", "chat"):
        content["text/event-stream"] = {"schema": _TEXT}
    return {"description": route.summary, "content": content}


def _error(status: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {
        "description": KINDS[status].summary,
        "content": {"application/json": {"schema": schema}},
    }
