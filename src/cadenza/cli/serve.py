"""`cadenza serve`: the OpenAI-compatible server, its engine in a process of its own. Invariant:
what cannot work is refused before a port is open, as far as it can be known then; a server that
cannot come up prints one line with the error and has exit code 2.
"""

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from cadenza import __version__
from cadenza.cli.options import EngineFlags
from cadenza.cli.serve_flags import (
    AcceptedFlags,
    ServeFlags,
    address_of,
    server_options,
    with_template,
    without_keys,
)
from cadenza.cli.served_models import local_places, make_service
from cadenza.cli.words import several_models
from cadenza.config import EngineConfig
from cadenza.errors import CadenzaError, ConfigError, EngineUnavailableError

if TYPE_CHECKING:
    from cadenza.engine.process.launch import FirstLaunch
    from cadenza.server.http.listening import Address
    from cadenza.server.lifecycle.handover import ServerSockets
    from cadenza.server.lifecycle.run import Lifecycle
    from cadenza.server.operations.log_output import LogQueue
    from cadenza.server.operations.tracing import SpanExport
    from cadenza.server.service import Service

logger = logging.getLogger(__name__)

METRICS_PATIENCE_S = 5.0

ModelArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]...",
        help="Models' folders, GGUF files or hub ids; the first is loaded at the start, others "
        "when they are asked for (default: the bundled model).",
        show_default=False,
    ),
]


def serve(
    models: ModelArguments = None,
    *,
    flags: ServeFlags,
    config: EngineFlags,
    accepted: AcceptedFlags,
) -> None:
    """Serve models over HTTP, with the APIs of OpenAI, Anthropic and Ollama.

    The engine runs in a process of its own, which is restarted when it fails. Ctrl-C, SIGTERM and
    SIGHUP let open requests finish; a second Ctrl-C or SIGTERM ends them at once.
    """
    del accepted
    with _one_exit_code():
        _serve(several_models(models, flags.model), flags, config)


@contextmanager
def _one_exit_code() -> Generator[None]:
    """Whatever keeps the server from coming up is wrong use: flags, a model, a device or memory. An
    engine that was given up is not: it may come up when it is tried again."""
    try:
        yield
    except (ConfigError, EngineUnavailableError):
        raise
    except CadenzaError as error:
        raise ConfigError(str(error)) from error


def _serve(words: Sequence[str | None], flags: ServeFlags, config: EngineConfig) -> None:
    from cadenza.server.operations.log_output import set_up_logging

    lines = set_up_logging(flags.log_format, getattr(logging, flags.log_level.upper()))
    logger.info("cadenza %s is starting: %s", __version__, words[0] or "the bundled model")
    from cadenza.engine.process.launch import FirstLaunch, loading, raise_descriptor_limit

    raise_descriptor_limit()
    # The first process loads its libraries while those below are loaded.
    with closing(FirstLaunch()) as first, loading():
        _serve_with(first, words, flags, config, lines)


def _serve_with(
    first: "FirstLaunch",
    words: Sequence[str | None],
    flags: ServeFlags,
    config: EngineConfig,
    lines: "LogQueue",
) -> None:
    from cadenza.cli.interrupts import terminable
    from cadenza.server.access import is_open_to_others
    from cadenza.server.lifecycle.handover import find_predecessor, opened, taken_over

    options, address, config = (
        server_options(flags),
        address_of(flags),
        with_template(flags, config),
    )
    spans = _span_export(flags.otlp_traces_endpoint)
    options = replace(
        options,
        num_dropped_log_lines=lambda: lines.num_dropped,
        begin_trace=None if spans is None else spans.begin,
    )
    service = make_service(words, flags, config, options, local_places(flags, config, first))
    logger.debug("resolved configuration: %s %s", config, without_keys(flags))
    if flags.uds is None and is_open_to_others(options.keys, flags.host):
        logger.warning(
            "no API key: whoever reaches %s may use this server; --api-key-file or "
            "CADENZA_API_KEY closes it",
            flags.host,
        )
    if flags.ignore_unknown_fields:
        logger.warning("--ignore-unknown-fields: fields with misspelt names have no effect")
    loading = f"loading {service.models.first.name} with cadenza {__version__}"
    with terminable(), ExitStack() as held:
        if spans is not None:
            held.callback(spans.close)
        predecessor = find_predecessor(address) if flags.handover else None
        if predecessor is None:
            if flags.handover:
                logger.info("--handover: there is no server to take over from")
            opening = Opening(address, lambda: _open(held, opened(address), address))
            opening.open()
            logger.info("%s for %s", loading, opening.url)
        else:
            opening = Opening(address, lambda: _take_over(held, taken_over(address), address))
            pid, version = predecessor.pid, predecessor.version
            logger.info("%s, to take over from process %d, cadenza %s", loading, pid, version)
        for model in service.models.models:
            of = f"{model.name}: " if service.models.is_several else ""
            logger.info(
                "%ssampling of requests that set none: %s", of, model.text.defaults.sentence
            )
        asyncio.run(_run(service, opening))


def _span_export(endpoint: str | None) -> "SpanExport | None":
    """Raises ConfigError."""
    if endpoint is None:
        return None
    try:
        from cadenza.server.operations.tracing import SpanExport
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs the package {error.name}; install the extra otel: pip "
            f"install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from error
    return SpanExport(endpoint)


@dataclass(slots=True, eq=False)
class Opening:
    """Opens the server's sockets, at once or when the model is loaded."""

    address: "Address"
    open_sockets: Callable[[], "ServerSockets"]
    sockets: "ServerSockets | None" = None

    def open(self) -> "ServerSockets":
        self.sockets = self.open_sockets()
        return self.sockets

    @property
    def url(self) -> str:
        assert self.sockets is not None, "nothing is opened"
        return self.address.url(self.sockets.bound)


def _open(
    held: ExitStack, sockets: "AbstractContextManager[ServerSockets]", address: "Address"
) -> "ServerSockets":
    from cadenza.server.http.listening import listening_for_metrics

    metrics = held.enter_context(listening_for_metrics(address))
    return replace(held.enter_context(sockets), metrics=metrics)


def _take_over(
    held: ExitStack, sockets: "AbstractContextManager[ServerSockets]", address: "Address"
) -> "ServerSockets":
    """As `_open`, but the metrics' port is another server's until it has handed over, and what is
    wrong with that port must not end the only server that there is then."""
    from cadenza.server.http.listening import listening_for_metrics

    taken = held.enter_context(sockets)
    try:
        metrics = held.enter_context(listening_for_metrics(address, METRICS_PATIENCE_S))
    except ConfigError as error:
        logger.error("%s; /metrics is at --port only", error)
        return taken
    return replace(taken, metrics=metrics)


async def _run(service: "Service", opening: Opening) -> None:
    """Until the server is shut down. Raises the error of a load, or of an address that cannot be
    had."""
    from cadenza.engine.process.launch import freeze_heap
    from cadenza.server.lifecycle.run import run_server, shut_down_on_signals

    loop = asyncio.get_running_loop()
    lifecycles: list[Lifecycle] = []
    failures: list[CadenzaError] = []

    def start(lifecycle: "Lifecycle") -> None:
        lifecycles.append(lifecycle)
        if opening.sockets is not None:
            lifecycle.listen(opening.sockets)
        shut_down_on_signals(loop, lifecycle)

    def end(error: CadenzaError) -> None:
        if not service.is_draining:
            failures.append(error)
            lifecycles[0].leave()

    async def watch_load() -> None:
        try:
            await service.models.wait_loaded()
            freeze_heap()
            if opening.sockets is None and not service.is_draining:
                lifecycles[0].listen(await asyncio.to_thread(opening.open))
            logger.info("ready at %s", opening.url)
        except CadenzaError as error:
            end(error)

    service.models.call_at_death(lambda error: loop.call_soon_threadsafe(end, error))
    watching = asyncio.create_task(watch_load())
    await run_server(service, opening.address, start)
    await watching
    if failures:
        raise failures[0]
