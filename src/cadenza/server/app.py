"""The ASGI application: what is checked before a handler, routing, and errors as answers. It
decides by `scope["path"]` alone, never by a URL; a Host header can only have a request refused.
Invariant: a path that is not declared open needs a key, even to be answered with 404."""

from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from cadenza.server.errors import (
    ApiError,
    bounds_exceeded,
    invalid_api_key,
    method_not_allowed,
    server_error,
    unknown_url,
)
from cadenza.server.fields.types import String
from cadenza.server.generation import log_unexpected
from cadenza.server.http.exchange import (
    NO_CONTENT,
    ClientDisconnected,
    Exchange,
    Handler,
    Response,
    new_request_id,
)
from cadenza.server.operations.status import METRICS_PATH
from cadenza.server.routes import (
    OPEN_PATHS,
    ROUTES,
    base_url_advice,
    dialect_of,
    make_handlers,
    make_ui_handlers,
)
from cadenza.server.service import Service

MAX_SHOWN_PATH = 256
PROBE_PATHS = ("/live", "/ready", "/health", "/ping")
_AT_METRICS_PORT = f"at this port there are {METRICS_PATH} and the probes only"
_BODY_PATHS = frozenset(route.path for route in ROUTES if route.body is not None)
"""Paths of long requests, refused while connections are scarce."""

_REQUEST_ID = String(min_chars=1, max_chars=128, is_identifier=True)


class App:
    """Serves `service` over ASGI."""

    def __init__(self, service: Service) -> None:
        self._service = service
        handlers = make_handlers(service)
        by_path: dict[str, dict[str, Handler]] = {}
        for route in ROUTES:
            for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
                by_path.setdefault(route.path, {})[method] = handlers[route.name]
        for path, handler in make_ui_handlers(service).items():
            by_path[path] = {"GET": handler, "HEAD": handler}
        self._routes = [(compile_path(path)[0], found) for path, found in by_path.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "lifespan and websockets are switched off"
        exchange = Exchange(
            scope=scope,
            receive=receive,
            send=send,
            limits=self._service.limits,
            bodies=self._service.bodies,
            request_id=self._request_id(scope),
            tenant="",
            dialect=dialect_of(scope["path"]),
        )
        exchange.extra_headers = self._service.options.cors.response_headers(scope["headers"])
        try:
            await self._authenticate_and_route(exchange)
        except ClientDisconnected:
            pass  # there is no connection to answer on
        except ApiError as error:
            await _fail(exchange, error)
        except Exception as error:  # noqa: BLE001  logged without what the client sent
            log_unexpected(error)
            await _fail(exchange, server_error())

    async def _authenticate_and_route(self, exchange: Exchange) -> None:
        scope = exchange.scope
        self._check_head(exchange)
        self._service.options.hosts.check(scope["headers"])
        if scope["method"] == "OPTIONS":
            preflight = self._service.options.cors.preflight_headers(scope["headers"])
            if preflight is not None:
                await exchange.answer(Response(status=NO_CONTENT, headers=preflight))
                return
        path: str = scope["path"]
        is_at_metrics_port = self._is_at_metrics_port(scope)
        if is_at_metrics_port and path not in (METRICS_PATH, *PROBE_PATHS):
            raise unknown_url(
                method=scope["method"], path=path[:MAX_SHOWN_PATH], advice=_AT_METRICS_PORT
            )
        if path not in OPEN_PATHS:
            exchange.tenant = self._tenant_of(exchange, is_at_metrics_port=is_at_metrics_port)
        if exchange.dialect.version_header is not None:
            version = exchange.header(exchange.dialect.version_header)
            if version is not None:
                exchange.dialect.check_version(version)
        if path in _BODY_PATHS:
            self._service.check_connections()
        await self._handler_of(exchange)(exchange)

    def _handler_of(self, exchange: Exchange) -> Handler:
        method, path = exchange.scope["method"], exchange.scope["path"]
        for pattern, by_method in self._routes:
            found = pattern.match(path)
            if found is None:
                continue
            if method not in by_method:
                raise method_not_allowed(method=method, listed=", ".join(sorted(by_method)))
            exchange.path_params = found.groupdict()
            return by_method[method]
        advice = base_url_advice(path, exchange.address) if len(path) <= MAX_SHOWN_PATH else None
        raise unknown_url(
            method=method,
            path=path[:MAX_SHOWN_PATH],
            advice=advice or "GET /openapi.json has what is",
        )

    def _is_at_metrics_port(self, scope: Scope) -> bool:
        """By the connection's own address, which no header changes."""
        port = self._service.options.metrics_port
        return port is not None and scope["server"] is not None and scope["server"][1] == port

    def _tenant_of(self, exchange: Exchange, *, is_at_metrics_port: bool) -> str:
        options, path = self._service.options, exchange.scope["path"]
        keys = exchange.header(b"authorization"), exchange.header(b"x-api-key")
        tenant = options.keys.tenant_of(*keys)
        if path == METRICS_PATH and (is_at_metrics_port or not options.metrics_keys.is_open):
            # The API's keys are good for the metrics, too; that there are none is not.
            is_known = not options.keys.is_open and tenant is not None
            if not is_known:
                tenant = options.metrics_keys.tenant_of(*keys)
        if tenant is None:
            raise invalid_api_key()
        return tenant

    def _check_head(self, exchange: Exchange) -> None:
        limits, scope = exchange.limits, exchange.scope
        url_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if url_bytes > limits.max_url_bytes:
            raise bounds_exceeded(
                "url_too_long", f"the URL has over {limits.max_url_bytes} bytes; send less"
            )
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        num_bytes = sum([len(name) + len(value) + 4 for name, value in headers])
        if len(headers) > limits.max_num_headers or num_bytes > limits.max_head_bytes:
            raise bounds_exceeded(
                "headers_too_large",
                f"there are {len(headers)} headers of {num_bytes} bytes; at most "
                f"{limits.max_num_headers} of {limits.max_head_bytes} bytes are read",
            )

    def _request_id(self, scope: Scope) -> str:
        """The client's own, if it is valid and not in use; otherwise a new one."""
        found = [value for name, value in scope["headers"] if name == b"x-request-id"]
        if len(found) == 1:
            try:
                asked = _REQUEST_ID.check("x-request-id", found[0].decode("latin-1"))
            except ApiError:
                return new_request_id()
            if not self._service.has_open(asked):
                return asked
        return new_request_id()


async def _fail(exchange: Exchange, error: ApiError) -> None:
    if exchange.has_answered:
        raise error  # part of an answer was sent, so the connection has to be closed
    await exchange.fail(error)
