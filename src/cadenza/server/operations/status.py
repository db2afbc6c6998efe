"""Routes without the engine: health, models, cancel, metrics, version. Invariant: health, metrics
and version never wait for the engine."""

from dataclasses import asdict
from typing import Any, Literal

import cadenza
from cadenza.errors import CadenzaError
from cadenza.server.errors import UNAVAILABLE_CODES, unavailable
from cadenza.server.fields.types import Schema, or_null
from cadenza.server.http.exchange import Exchange, Response, send_object
from cadenza.server.metrics import OPEN_METRICS
from cadenza.server.openapi import COUNT, TEXT, AnswerSchema, ApiRoute, list_of, object_of, one_of
from cadenza.server.served_model import ServedModel
from cadenza.server.service import Service


async def _live(service: Service, exchange: Exchange) -> None:
    del service  # the answer is that somebody answers
    await send_object(exchange, {"status": "live"})


async def _ready(service: Service, exchange: Exchange) -> None:
    status = service.models.status()
    if service.is_draining:
        raise unavailable("draining")
    if not status.is_ready:
        raise unavailable(UNAVAILABLE_CODES[status.state], status.retry_after_s, status.cause)
    await send_object(exchange, {"status": "ready"})


async def _health(service: Service, exchange: Exchange) -> None:
    """As `_ready`, with what was compared of the kernels of the first model, if anything was."""
    status = service.models.status()
    if service.is_draining or not status.is_ready or status.kernel_proof is None:
        await _ready(service, exchange)
        return
    await send_object(exchange, {"status": "ready", "kernel_proof": asdict(status.kernel_proof)})


async def _load(service: Service, exchange: Exchange) -> None:
    await send_object(exchange, {"server_load": service.num_open})


async def _tokenizer_info(service: Service, exchange: Exchange) -> None:
    model = service.models.first
    try:
        described = model.text.describe_tokenizer()
    except CadenzaError as error:
        raise model.error_of(error) from error
    await send_object(exchange, described)


async def _version(service: Service, exchange: Exchange) -> None:
    del service
    await send_object(exchange, {"version": cadenza.__version__})


async def _metrics(service: Service, exchange: Exchange) -> None:
    body, kind = service.metrics.render(exchange.accept)
    await exchange.answer(Response(body=body, content_type=kind))


async def _models(service: Service, exchange: Exchange) -> None:
    models = service.models.models
    cards = [_card(service, model, name) for model in models for name in model.names.listed]
    await send_object(exchange, {"object": "list", "data": cards})


async def _model(service: Service, exchange: Exchange) -> None:
    name: str = exchange.path_params["id"]
    model = service.models.find(name)
    await send_object(exchange, _card(service, model, model.names.in_answer(name)))


async def _cancel(service: Service, exchange: Exchange) -> None:
    request_id: str = exchange.path_params["id"]
    service.abort(request_id, exchange.tenant)
    await send_object(exchange, {"id": request_id, "object": "request", "cancelled": True})


def _card(service: Service, model: ServedModel, name: str) -> dict[str, Any]:
    status, check = model.engine.status(), model.request_check
    fingerprint = model.text.with_forms(status.fingerprint) or model.fingerprint()
    defaults = model.text.defaults
    card = {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "cadenza",
        "root": model.name,
        "parent": None,
        "max_model_len": None if check is None else check.limits.max_model_len,
        "vocab_size": None if check is None else check.vocab_size,
        "system_fingerprint": None if fingerprint is None else fingerprint.digest,
        "default_sampling_params": {**defaults.described, "source": defaults.source},
        "input_modalities": ["text", "image"] if model.text.prompts.takes_images else ["text"],
    }
    if service.models.switches:
        card["state"] = service.models.state_of(model)
    return card


_NUMBER: Schema = {"type": "number"}
_MODEL = object_of(
    {
        "id": TEXT,
        "object": one_of("model"),
        "created": COUNT,
        "owned_by": TEXT,
        "max_model_len": or_null(COUNT),
        "system_fingerprint": or_null(TEXT),
        "default_sampling_params": object_of(
            {
                "temperature": _NUMBER,
                "top_k": {"type": "integer"},
                "top_p": _NUMBER,
                "min_p": _NUMBER,
                "repetition_penalty": _NUMBER,
                "source": one_of("model", "llama.cpp", "neutral"),
            }
        ),
        "input_modalities": list_of(one_of("text", "image")),
    }
)
_MODEL_LIST = object_of({"object": one_of("list"), "data": {**list_of(_MODEL), "minItems": 1}})
_CANCELLED = object_of({"id": TEXT, "object": one_of("request"), "cancelled": {"type": "boolean"}})
_TOKENIZER_INFO = object_of(
    {
        "tokenizer_class": TEXT,
        "vocab_size": COUNT,
        "model_max_length": or_null(COUNT),
        **dict.fromkeys(
            ("chat_template", "bos_token", "eos_token", "pad_token", "unk_token"), or_null(TEXT)
        ),
    }
)

METRICS_PATH = "/metrics"

_LIST, _ONE = AnswerSchema("ModelList", _MODEL_LIST), AnswerSchema("Model", _MODEL)
_HEALTH = AnswerSchema("Health", object_of({"status": TEXT}))
_PROOF = object_of(
    {
        "operations": list_of(TEXT),
        "step_sizes": list_of(COUNT),
        "num_single": COUNT,
        "elapsed_s": _NUMBER,
    }
)
_HEALTH_IN_DETAIL = AnswerSchema(
    "HealthInDetail",
    {**object_of({"status": TEXT}), "properties": {"status": TEXT, "kernel_proof": _PROOF}},
)
_LOAD = AnswerSchema("Load", object_of({"server_load": COUNT}))
_METRICS = AnswerSchema("Metrics", None, also=(OPEN_METRICS,))
_VERSION = AnswerSchema("Version", object_of({"version": TEXT}))


def _probe(name: str, path: str, summary: str, method: Literal["GET", "POST"] = "GET") -> ApiRoute:
    """Answers 503 while no requests are served."""
    return ApiRoute(name, method, path, summary, _HEALTH, _ready, policy="open", statuses=(503,))


STATUS_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "cancel",
        "POST",
        "/v1/requests/{id}/cancel",
        "End an open request of one's own.",
        AnswerSchema("Cancelled", _CANCELLED),
        _cancel,
        statuses=(404,),
    ),
    ApiRoute("models", "GET", "/v1/models", "The models that are served.", _LIST, _models),
    ApiRoute("model", "GET", "/v1/models/{id:path}", "One of them.", _ONE, _model, statuses=(404,)),
    ApiRoute(
        "health",
        "GET",
        "/health",
        "Are requests served? On a GPU, also which kernels were proved to be exact at the start.",
        _HEALTH_IN_DETAIL,
        _health,
        policy="open",
        statuses=(503,),
    ),
    ApiRoute("live", "GET", "/live", "Is the front end there?", _HEALTH, _live, policy="open"),
    _probe("ready", "/ready", "Are requests served?"),
    _probe("ping", "/ping", "Are requests served? For SageMaker."),
    _probe("ping_post", "/ping", "The same.", "POST"),
    ApiRoute("load", "GET", "/load", "Calls that are open, for load balancers.", _LOAD, _load),
    ApiRoute(
        "tokenizer_info",
        "GET",
        "/tokenizer_info",
        "The tokenizer's special tokens and chat template.",
        AnswerSchema("TokenizerInfo", _TOKENIZER_INFO),
        _tokenizer_info,
    ),
    ApiRoute("metrics", "GET", METRICS_PATH, "Counts, for Prometheus.", _METRICS, _metrics),
    ApiRoute("version", "GET", "/version", "Cadenza's version.", _VERSION, _version),
)
