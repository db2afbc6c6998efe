"""The routes that do not use the engine: health, models, cancel, metrics, the description.

Owns their answers. Knows `Service` and `Exchange`. Invariant: health, metrics and version never
wait for the engine.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

import cadenza
from cadenza.errors import CadenzaError
from cadenza.server.errors import UNAVAILABLE_CODES, unavailable
from cadenza.server.http_exchange import Exchange, Handler, Response, send_object
from cadenza.server.metrics import OPEN_METRICS
from cadenza.server.openapi import COUNT, TEXT, AnswerSchema, ApiRoute, list_of, object_of, one_of
from cadenza.server.schemas.field_types import Schema, or_null
from cadenza.server.served_model import ServedModel
from cadenza.server.service import Service


class StatusHandlers:
    """One method for each of `STATUS_ROUTES`; routes with the same answer share one."""

    def __init__(self, service: Service, description: Mapping[str, Any]) -> None:
        self._service = service
        self._description = msgspec.json.encode(description)

    def by_route(self) -> Mapping[str, Handler]:
        return {
            "cancel": self._cancel,
            "models": self._models,
            "model": self._model,
            "health": self._ready,
            "live": self._live,
            "ready": self._ready,
            "ping": self._ready,
            "ping_post": self._ready,
            "load": self._load,
            "tokenizer_info": self._tokenizer_info,
            "metrics": self._metrics,
            "version": self._version,
            "openapi": self._openapi,
        }

    async def _live(self, exchange: Exchange) -> None:
        await send_object(exchange, {"status": "live"})

    async def _ready(self, exchange: Exchange) -> None:
        status = self._service.models.status()
        if self._service.is_draining:
            raise unavailable("draining")
        if not status.is_ready:
            raise unavailable(UNAVAILABLE_CODES[status.state], status.retry_after_s, status.cause)
        await send_object(exchange, {"status": "ready"})

    async def _load(self, exchange: Exchange) -> None:
        await send_object(exchange, {"server_load": self._service.num_open})

    async def _tokenizer_info(self, exchange: Exchange) -> None:
        model = self._service.models.first
        try:
            described = model.text.describe_tokenizer()
        except CadenzaError as error:
            raise model.error_of(error) from error
        await send_object(exchange, described)

    async def _version(self, exchange: Exchange) -> None:
        await send_object(exchange, {"version": cadenza.__version__})

    async def _metrics(self, exchange: Exchange) -> None:
        body, kind = self._service.metrics.render(exchange.accept)
        await exchange.answer(Response(body=body, content_type=kind))

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.answer(Response(body=self._description))

    async def _models(self, exchange: Exchange) -> None:
        models = self._service.models.models
        cards = [self._card(model, name) for model in models for name in model.names.listed]
        await send_object(exchange, {"object": "list", "data": cards})

    async def _model(self, exchange: Exchange) -> None:
        name: str = exchange.path_params["id"]
        await send_object(exchange, self._card(self._service.models.find(name), name))

    async def _cancel(self, exchange: Exchange) -> None:
        request_id: str = exchange.path_params["id"]
        self._service.abort(request_id, exchange.tenant)
        await send_object(exchange, {"id": request_id, "object": "request", "cancelled": True})

    def _card(self, model: ServedModel, name: str) -> dict[str, Any]:
        status, check = model.monitor.status(), model.request_check
        fingerprint = model.text.with_forms(status.fingerprint) or model.fingerprint()
        defaults = model.text.defaults
        card = {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "cadenza",
            "root": model.name,
            "parent": None,
            "max_model_len": None if check is None else check.limits.max_model_len,
            "vocab_size": None if check is None else check.vocab_size,
            "system_fingerprint": None if fingerprint is None else fingerprint.digest,
            "default_sampling_params": {**defaults.described, "source": defaults.source},
        }
        if self._service.models.switches:
            card["state"] = self._service.models.state_of(model)
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
    }
)
_MODELS: Schema = {**list_of(_MODEL), "minItems": 1}
_MODEL_LIST = object_of({"object": one_of("list"), "data": _MODELS})
_CANCELLED = object_of(
    {
        "id": TEXT,
        "object": one_of("request"),
        "cancelled": {"type": "boolean"},
    }
)
_TOKENIZER_INFO = object_of(
    {
        "tokenizer_class": TEXT,
        "vocab_size": COUNT,
        "model_max_length": or_null(COUNT),
        "chat_template": or_null(TEXT),
        "bos_token": or_null(TEXT),
        "eos_token": or_null(TEXT),
        "pad_token": or_null(TEXT),
        "unk_token": or_null(TEXT),
    }
)
_HEALTH = AnswerSchema(name="Health", schema=object_of({"status": TEXT}))

METRICS_PATH = "/metrics"

STATUS_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        name="cancel",
        method="POST",
        path="/v1/requests/{id}/cancel",
        policy="key",
        summary="End an open request of one's own.",
        answers=AnswerSchema(name="Cancelled", schema=_CANCELLED),
        statuses=(404,),
    ),
    ApiRoute(
        name="models",
        method="GET",
        path="/v1/models",
        policy="key",
        summary="The models that are served.",
        answers=AnswerSchema(name="ModelList", schema=_MODEL_LIST),
    ),
    ApiRoute(
        name="model",
        method="GET",
        path="/v1/models/{id:path}",
        policy="key",
        summary="One of them.",
        answers=AnswerSchema(name="Model", schema=_MODEL),
        statuses=(404,),
    ),
    ApiRoute(
        name="health",
        method="GET",
        path="/health",
        policy="open",
        summary="Are requests served?",
        answers=_HEALTH,
        statuses=(503,),
    ),
    ApiRoute(
        name="live",
        method="GET",
        path="/live",
        policy="open",
        summary="Is the front end there?",
        answers=_HEALTH,
    ),
    ApiRoute(
        name="ready",
        method="GET",
        path="/ready",
        policy="open",
        summary="Are requests served?",
        answers=_HEALTH,
        statuses=(503,),
    ),
    ApiRoute(
        name="ping",
        method="GET",
        path="/ping",
        policy="open",
        summary="Are requests served? For SageMaker.",
        answers=_HEALTH,
        statuses=(503,),
    ),
    ApiRoute(
        name="ping_post",
        method="POST",
        path="/ping",
        policy="open",
        summary="The same.",
        answers=_HEALTH,
        statuses=(503,),
    ),
    ApiRoute(
        name="load",
        method="GET",
        path="/load",
        policy="key",
        summary="Calls that are open, for load balancers.",
        answers=AnswerSchema(name="Load", schema=object_of({"server_load": COUNT})),
    ),
    ApiRoute(
        name="tokenizer_info",
        method="GET",
        path="/tokenizer_info",
        policy="key",
        summary="The tokenizer's special tokens and chat template.",
        answers=AnswerSchema(name="TokenizerInfo", schema=_TOKENIZER_INFO),
    ),
    ApiRoute(
        name="metrics",
        method="GET",
        path=METRICS_PATH,
        policy="key",
        summary="Counts, for Prometheus.",
        answers=AnswerSchema(name="Metrics", schema=None, also=(OPEN_METRICS,)),
    ),
    ApiRoute(
        name="version",
        method="GET",
        path="/version",
        policy="key",
        summary="Cadenza's version.",
        answers=AnswerSchema(name="Version", schema=object_of({"version": TEXT})),
    ),
    ApiRoute(
        name="openapi",
        method="GET",
        path="/openapi.json",
        policy="key",
        summary="This description.",
        answers=AnswerSchema(name="OpenApi", schema={"type": "object"}),
    ),
)
