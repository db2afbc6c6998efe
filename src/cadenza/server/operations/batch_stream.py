"""/debug/batch: what the engine's steps do, once; /debug/batch/stream: as server-sent events, while
somebody looks. Invariants: an event has numbers and words of this module, and nothing of any
prompt, text, key or request id; of other tenants' rows a viewer sees only the sum."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import msgspec

from cadenza.engine.step_watch import WAIT_REASONS, RowKind, RowSummary, StepSummary
from cadenza.errors import QueueFullError
from cadenza.frontend.live_steps import LiveEntry, Viewer
from cadenza.server.calls.endpoint import KEEP_ALIVE
from cadenza.server.errors import UNAVAILABLE_CODES, queue_full, unavailable
from cadenza.server.fields.types import Schema, or_null
from cadenza.server.http.exchange import Exchange, send_object
from cadenza.server.openapi import COUNT, TEXT, AnswerSchema, ApiRoute, list_of, object_of, one_of
from cadenza.server.served_model import ServedModel
from cadenza.server.service import Service

VERSION = 1
SUMMED = ("computed", "total", "cached", "new", "drafts", "preempted")
"""Fields of a row, which are summed for the rows that a viewer may not see."""

RATE_WAIT_S = 1.0  # how long an answer waits, where rows run, for a summary of at least one step
FIRST_WAIT_S = 2.0
"""How long it waits for any: an engine tells between two steps, and one may take long."""


async def _stream(service: Service, exchange: Exchange) -> None:
    service.check_connections()
    model = _model(service, exchange)
    limits = model.limits
    absence = _absence(service, model)
    if service.is_draining or limits is None:
        raise unavailable("draining" if service.is_draining else absence or "loading")
    hello = {
        "v": VERSION,
        "rows": limits.max_num_seqs,
        "pages": limits.num_pages,
        "page_size": limits.page_size,
        "model": model.name,
    }
    opening = _event("hello", hello)
    if absence is not None or not model.engine.status().is_ready:
        opening += _event("engine", {"state": absence or "lost"})
    with _viewing(model) as viewer:
        await exchange.while_connected(_send(exchange, viewer, opening))


async def _once(service: Service, exchange: Exchange) -> None:
    service.check_connections()
    model = _model(service, exchange)
    status = model.engine.status()
    absence = _absence(service, model)
    if service.is_draining or absence is not None or not model.live.is_attached:
        raise unavailable("draining" if service.is_draining else absence or "loading")
    if not status.is_ready:
        raise unavailable(UNAVAILABLE_CODES[status.state], status.retry_after_s, status.cause)
    with _viewing(model) as viewer:
        at_s, summary = await exchange.while_connected(_newest(viewer))
    await send_object(exchange, step_object(at_s, summary, exchange.tenant))


async def _newest(viewer: Viewer) -> tuple[float, StepSummary]:
    """Raises ApiError (503) where the engine is lost, or sends nothing for long. A watch's first
    summary has no steps: where rows run, waits for the next, which has the speed."""
    found, entries = None, viewer.history
    while True:
        for each in entries:
            if isinstance(each.news, StepSummary):
                found = each.at_s, each.news
            elif each.news != "ready" and entries is not viewer.history:
                raise unavailable("unloaded" if each.news == "unloaded" else "engine_restarting")
        if viewer.is_closed:
            raise unavailable("draining")
        if found is not None and (found[1].num_steps or not found[1].num_running):
            return found
        entries = await viewer.next(FIRST_WAIT_S if found is None else RATE_WAIT_S)
        if found is not None and not entries:
            return found
        if not entries and not viewer.is_closed:
            raise unavailable("engine_busy", cause=f"no step has ended for {FIRST_WAIT_S:g} s")


@contextmanager
def _viewing(model: ServedModel) -> Generator[Viewer]:
    try:
        with model.live.viewing() as viewer:
            yield viewer
    except QueueFullError as error:
        raise queue_full(message=error) from error


def _model(service: Service, exchange: Exchange) -> ServedModel:
    """The one that is named; otherwise the first that is loaded, or was."""
    name = exchange.query(_QUERY).get("model")
    if name is not None:
        return service.models.find(name)
    loaded = (each for each in service.models.models if each.live.is_attached)
    return next(loaded, service.models.first)


def _absence(service: Service, model: ServedModel) -> str | None:
    """`unloaded` or `loading` for a model that is not there now; None for one that is."""
    match service.models.state_of(model):
        case "unloaded" | "unloading":
            return "unloaded"
        case "loading":
            return "loading"
        case "ready" | "draining":
            return None


async def _send(exchange: Exchange, viewer: Viewer, opening: bytes) -> None:
    await exchange.start_stream()
    if exchange.scope["method"] == "HEAD":
        await exchange.end_stream(b"")
        return
    await exchange.stream(opening + _events(viewer.history, exchange.tenant))
    while not viewer.is_closed:
        entries = await viewer.next(exchange.limits.keep_alive_s)
        if entries:
            await exchange.stream(_events(entries, exchange.tenant))
        elif not viewer.is_closed:
            await exchange.stream(KEEP_ALIVE)
    await exchange.end_stream(b"")


def _events(entries: Sequence[LiveEntry], tenant: str) -> bytes:
    return b"".join(
        [
            _event("step", step_object(each.at_s, each.news, tenant))
            if isinstance(each.news, StepSummary)
            else _event("engine", {"state": each.news})
            for each in entries
        ]
    )


def _event(name: str, value: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))


def step_object(at_s: float, summary: StepSummary, tenant: str) -> dict[str, Any]:
    """A `step` event's object, as `tenant` may see it."""
    own = summary.tenants.index(tenant) if tenant in summary.tenants else None
    others = [row for row in summary.rows if row.tenant != own]
    return {
        "t": round(1000 * at_s),
        "tokens": summary.num_tokens,
        "steps": summary.num_steps,
        "waiting": summary.num_waiting,
        "running": summary.num_running,
        "pages": {
            "live": summary.pages_live,
            "cached": summary.pages_cached,
            "free": summary.pages_free,
        },
        "tok_s": round(summary.num_sampled / summary.seconds, 1) if summary.seconds else 0.0,
        "gap_ms": round(1000 * summary.longest_s, 1),
        "rows": [_row(row) for row in summary.rows if row.tenant == own],
        "others": _sum_of(others),
    }


def _row(row: RowSummary) -> dict[str, Any]:
    return {
        "id": row.label,
        "kind": row.kind,
        "computed": row.computed,
        "total": row.total,
        "cached": row.cached,
        "new": row.new,
        "drafts": row.drafts,
        "preempted": row.preempted,
        "waits_for": row.waits_for,
    }


def _sum_of(rows: Sequence[RowSummary]) -> dict[str, int] | None:
    if not rows:
        return None
    return {
        "rows": len(rows),
        **{name: sum([getattr(row, name) for row in rows]) for name in SUMMED},
    }


_QUERY = {"model": TEXT}

_COUNTS = dict.fromkeys(SUMMED, COUNT)
_ROW = object_of(
    {
        "id": COUNT,
        "kind": one_of(*get_args(RowKind)),
        **_COUNTS,
        "waits_for": or_null(one_of(*WAIT_REASONS)),
    }
)
_AMOUNT: Schema = {"type": "number", "minimum": 0}
_STEP = object_of(
    {
        **dict.fromkeys(("t", "tokens", "steps", "waiting", "running"), COUNT),
        "pages": object_of(dict.fromkeys(("live", "cached", "free"), COUNT)),
        "tok_s": _AMOUNT,
        "gap_ms": _AMOUNT,
        "rows": list_of(_ROW),
        "others": or_null(object_of({"rows": COUNT, **_COUNTS})),
    }
)

BATCH_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "batch",
        "GET",
        "/debug/batch",
        "What the engine's newest steps did.",
        AnswerSchema("Batch", _STEP),
        _once,
        statuses=(404, 429, 503),
        query=_QUERY,
    ),
    ApiRoute(
        "batch_stream",
        "GET",
        "/debug/batch/stream",
        "What the engine's steps do, as events, while somebody looks.",
        AnswerSchema("BatchEvents", None, media_type="text/event-stream"),
        _stream,
        statuses=(404, 429, 503),
        query=_QUERY,
    ),
)
