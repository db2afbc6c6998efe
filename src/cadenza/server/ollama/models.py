"""Ollama's routes about models, and llama.cpp's /props. Invariant: a listed name can be used; what
would change this server's models is refused, with what to do instead."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import cadenza
from cadenza.errors import CadenzaError
from cadenza.server.errors import ApiError, invalid_value, not_built
from cadenza.server.fields.body import Body, label, optional
from cadenza.server.fields.types import AnyJson, Boolean, Schema, String
from cadenza.server.http.exchange import Exchange, send_object
from cadenza.server.ollama.generate import time_of
from cadenza.server.openapi import (
    COUNT,
    TEXT,
    AnswerSchema,
    ApiRoute,
    RouteHandler,
    list_of,
    object_of,
)
from cadenza.server.served_model import DEFAULT_TAG, ServedModel
from cadenza.server.service import Service

API_VERSION = "0.13.0"
"""Of Ollama, whose API this is; clients refuse servers that are too old for them."""

_NEVER_S = 4_102_444_800  # when a model that stays loaded is unloaded: at the end of the century
_NEUTRAL_PARAMETERS = {
    "temperature": ("temperature", None),
    "top_k": ("top_k", 0),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 0.0),
    "repeat_penalty": ("repetition_penalty", 1.0),
}
"""Ollama's names, `SamplingParams`' names, and the values that are not shown."""


class NamedModelBody(Body):
    """A body that names a model and asks for no tokens."""

    name = optional(String(min_chars=1, max_chars=256), "Older name of model.")
    verbose = label(Boolean())
    stream = label(Boolean())
    insecure = label(Boolean())
    system = label(AnyJson(max_chars=1 << 16))
    template = label(AnyJson(max_chars=1 << 16))
    options = label(AnyJson(max_chars=1 << 16))

    @property
    def asked(self) -> str | None:
        return self.model or self.name


def tagged(name: str) -> str:
    """A model's name as Ollama's clients expect it: with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + DEFAULT_TAG


async def _version(service: Service, exchange: Exchange) -> None:
    del service
    await send_object(exchange, {"version": API_VERSION, "cadenza": cadenza.__version__})


async def _tags(service: Service, exchange: Exchange) -> None:
    await send_object(exchange, {"models": _cards(service, service.models.models)})


async def _ps(service: Service, exchange: Exchange) -> None:
    found: list[dict[str, Any]] = []
    for model in service.models.models:
        if model.engine.status().is_ready:
            left_s = service.models.idle_left_s(model)
            ends_s = _NEVER_S if left_s is None else service.options.now() + left_s
            loaded = {
                "expires_at": time_of(ends_s),
                "size_vram": 0,
                "context_length": _context_length(model),
            }
            found += [card | loaded for card in _cards(service, [model])]
    await send_object(exchange, {"models": found})


async def _show(service: Service, exchange: Exchange) -> None:
    asked = (await _read(service, exchange)).asked
    model = service.models.find(asked)
    await send_object(exchange, _shown(service, model, model.names.in_answer(asked)))


async def _pull(service: Service, exchange: Exchange) -> None:
    """A model that is here is pulled already."""
    asked = (await _read(service, exchange)).asked
    if asked is None:
        raise invalid_value("model is missing; it is needed here", "model")
    try:
        service.models.find(asked)
    except ApiError:
        names = ", ".join(service.models.names)
        advice = f"this server has {names}; {_INSTEAD}"
        raise not_built("/api/pull", "fetching a model", advice=advice) from None
    await send_object(exchange, {"status": "success"})


async def _props(service: Service, exchange: Exchange) -> None:
    model = service.models.first
    limits = model.limits
    described: dict[str, Any] = {}
    with suppress(CadenzaError):  # there may be no tokenizer
        described = model.text.describe_tokenizer()
    props = {
        "default_generation_settings": {
            "n_ctx": _context_length(model),
            "params": _parameters(model),
        },
        "total_slots": 0 if limits is None else limits.max_num_seqs,
        "model_alias": model.name,
        "model_path": model.name,
        "chat_template": model.text.prompts.source or "",
        "bos_token": described.get("bos_token") or "",
        "eos_token": described.get("eos_token") or "",
        "modalities": {"vision": model.text.prompts.takes_images, "audio": False},
        "build_info": f"cadenza {cadenza.__version__}",
        "is_sleeping": service.models.state_of(model) == "unloaded",
    }
    await send_object(exchange, props)


async def _read(service: Service, exchange: Exchange) -> NamedModelBody:
    unknown = service.options.unknown_fields
    async with exchange.body() as raw:
        body = await service.work.do(
            "tokenize", len(raw), lambda: NamedModelBody.read(raw, unknown)
        )
    exchange.extra_headers += service.ignored_names.headers(body.ignored)
    return body


def _cards(service: Service, models: Iterable[ServedModel]) -> list[dict[str, Any]]:
    return [_card(service, model, name) for model in models for name in model.names.listed]


def _card(service: Service, model: ServedModel, name: str) -> dict[str, Any]:
    facts = model.text.facts
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": time_of(service.created),
        "size": facts.num_bytes or 0,
        "digest": facts.digest,
        "details": _details(model),
    }


def _shown(service: Service, model: ServedModel, name: str) -> dict[str, Any]:
    text = model.text
    facts, family = text.facts, text.facts.family
    info = {
        "general.architecture": family,
        "general.basename": name,
        "general.parameter_count": facts.num_parameters,
        f"{family}.context_length": _context_length(model),
        f"{family}.embedding_length": facts.hidden_size,
        f"{family}.block_count": facts.num_layers,
        f"{family}.vocab_size": facts.vocab_size,
    }
    parameters = _parameters(model)
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(f"{key} {value}" for key, value in parameters.items()),
        "template": text.prompts.source or "",
        "details": _details(model),
        "model_info": {key: value for key, value in info.items() if value is not None},
        "capabilities": _capabilities(model),
        "modified_at": time_of(service.created),
    }


def _details(model: ServedModel) -> dict[str, Any]:
    facts = model.text.facts
    return {
        "parent_model": "",
        "format": facts.format,
        "family": facts.family,
        "families": [facts.family],
        "parameter_size": _shown_count(facts.num_parameters),
        "quantization_level": facts.stored_type,
    }


def _capabilities(model: ServedModel) -> list[str]:
    text = model.text
    if not text.facts.can_generate:
        return ["embedding"]
    has = {
        "vision": text.prompts.takes_images,
        "tools": text.prompts.takes_tools,
        "thinking": text.prompts.has_reasoning,
    }
    return ["completion", *(name for name, is_there in has.items() if is_there)]


def _parameters(model: ServedModel) -> dict[str, Any]:
    params = model.text.defaults.complete({"max_tokens": None})
    found = {
        name: (getattr(params, field), neutral)
        for name, (field, neutral) in _NEUTRAL_PARAMETERS.items()
    }
    return {name: value for name, (value, neutral) in found.items() if value != neutral}


def _context_length(model: ServedModel) -> int:
    if model.limits is None:
        return model.text.facts.max_position_embeddings
    return model.limits.max_model_len


def _shown_count(count: int | None) -> str:
    """In Ollama's units, such as 135M or 1.2B."""
    if count is None:
        return ""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)


_INSTEAD = "a model is chosen when the server starts: cadenza serve MODEL"
_REFUSED: Mapping[str, tuple[str, str]] = {
    "push": ("publishing a model", "leave it out"),
    "create": ("making a model of another", _INSTEAD),
    "blobs": ("taking a model's file", _INSTEAD),
    "copy": ("a copy under another name", "start the server with one more --served-model-name"),
    "delete": ("deleting a model", "end the server, and remove the model's files yourself"),
}
"""What each would do, and what to do instead."""

_DETAILS = object_of({"format": TEXT, "family": TEXT, "parameter_size": TEXT})
_CARD: dict[str, Schema] = {
    "name": TEXT,
    "model": TEXT,
    "modified_at": TEXT,
    "size": COUNT,
    "digest": TEXT,
    "details": _DETAILS,
}
_LOADED = {**_CARD, "expires_at": TEXT, "size_vram": COUNT, "context_length": COUNT}
_SHOWN = object_of(
    {
        "modelfile": TEXT,
        "template": TEXT,
        "details": _DETAILS,
        "model_info": {"type": "object"},
        "capabilities": list_of(TEXT),
    }
)
_PROPS = object_of(
    {
        "default_generation_settings": object_of({"n_ctx": COUNT}),
        "total_slots": COUNT,
        "model_path": TEXT,
        "chat_template": TEXT,
        "build_info": TEXT,
    }
)
_STATUS = AnswerSchema("OllamaStatus", object_of({"status": TEXT}))


def _get(name: str, path: str, summary: str, schema: Schema, handler: RouteHandler) -> ApiRoute:
    answers = AnswerSchema(name.title().replace("_", ""), schema)
    return ApiRoute(name, "GET", path, summary, answers, handler)


def _post(name: str, summary: str, answers: AnswerSchema, handler: RouteHandler) -> ApiRoute:
    return ApiRoute(
        f"ollama_{name}",
        "POST",
        f"/api/{name}",
        summary,
        answers,
        handler,
        statuses=(404, 413, 415, 429, 503),
        body=NamedModelBody,
    )


def _refused(name: str) -> ApiRoute:
    what, advice = _REFUSED[name]

    async def refuse(service: Service, exchange: Exchange) -> None:
        del service, exchange  # whatever it asks for
        raise not_built(f"/api/{name}", what, advice=advice)

    method = "DELETE" if name == "delete" else "POST"
    path = "/api/blobs/{id:path}" if name == "blobs" else f"/api/{name}"
    return ApiRoute(f"ollama_{name}", method, path, f"Not built: {what}.", _STATUS, refuse)


OLLAMA_ROUTES: tuple[ApiRoute, ...] = (
    _get(
        "ollama_version",
        "/api/version",
        "The version of Ollama whose API this is.",
        object_of({"version": TEXT}),
        _version,
    ),
    _get(
        "ollama_tags",
        "/api/tags",
        "The models that are served, as Ollama lists them.",
        object_of({"models": list_of(object_of(_CARD))}),
        _tags,
    ),
    _get(
        "ollama_ps",
        "/api/ps",
        "Those that are loaded.",
        object_of({"models": list_of(object_of(_LOADED))}),
        _ps,
    ),
    _post("show", "One of them.", AnswerSchema("OllamaShow", _SHOWN), _show),
    _post("pull", "Succeeds for a model that is served.", _STATUS, _pull),
    *(_refused(name) for name in _REFUSED),
    _get("props", "/props", "What llama.cpp tells of its model.", _PROPS, _props),
)
