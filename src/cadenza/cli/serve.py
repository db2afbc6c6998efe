"""`cadenza serve`: the OpenAI-compatible server, its engine in a process of its own.

Owns the command's flags and the order of starting. Knows the server through `Service` and
`run_server`. Invariant: what cannot work is said before a port is open; a model that cannot be
loaded ends the command with exit code 3.
"""

import asyncio
import logging
import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza import __version__
from cadenza.cli.options import ENVIRONMENT_PREFIX, ModelFlag
from cadenza.cli.prompts import only_model
from cadenza.cli.unbuilt import UnbuiltFlags
from cadenza.config import EngineConfig
from cadenza.errors import CadenzaError, ConfigError

if TYPE_CHECKING:
    from cadenza.engine.process.engine_process import EngineProcess
    from cadenza.server.listening import Address
    from cadenza.server.run import Shutdown
    from cadenza.server.service import ServerOptions, Service

logger = logging.getLogger(__name__)

MAX_LOAD_S = 24 * 3600.0
LOG_LEVELS = ("debug", "info", "warning", "error")
SOCKET_MODE_DIGITS = 3


def _option(*names: str, environment: str, **settings: Any) -> Any:
    return typer.Option(
        *names, envvar=ENVIRONMENT_PREFIX + environment, show_envvar=False, **settings
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """The flags of this command alone."""

    model: ModelFlag = None
    host: Annotated[str, _option("--host", environment="HOST", help="Address to listen at.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int,
        _option("--port", environment="PORT", min=0, max=65535, help="Port; 0 takes a free one."),
    ] = 8000
    uds: Annotated[
        str | None,
        _option(
            "--uds",
            environment="UDS",
            metavar="PATH",
            help="A Unix socket in place of a port; --uds-mode says for whom.",
        ),
    ] = None
    uds_mode: Annotated[
        str,
        _option(
            "--uds-mode",
            environment="UDS_MODE",
            metavar="OCTAL",
            help="The socket's permissions: 600 is its owner only, 660 its group too.",
        ),
    ] = "600"
    served_model_name: Annotated[
        list[str] | None,
        _option(
            "--served-model-name",
            environment="SERVED_MODEL_NAME",
            help="What clients call the model; may be repeated (default: a folder's last part, or "
            "the name as it was given).",
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        _option(
            "--api-key",
            environment="API_KEY",
            metavar="KEY",
            help="A key that clients must send; may be repeated. Safer in the environment.",
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        _option(
            "--api-key-file", environment="API_KEY_FILE", metavar="FILE", help="Keys, one a line."
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        _option(
            "--allowed-origins",
            environment="ALLOWED_ORIGINS",
            metavar="ORIGIN",
            help="Origins of web pages that may call this server, as scheme://host:port, or * for "
            "any; may be repeated (default: none).",
        ),
    ] = None
    ignore_unknown_fields: Annotated[
        bool,
        _option(
            "--ignore-unknown-fields",
            environment="IGNORE_UNKNOWN_FIELDS",
            help="Ignore fields of a request's body that this server does not know, which are "
            "refused otherwise; for gateways that add their own.",
        ),
    ] = False
    ssl_certfile: Annotated[
        str | None,
        _option("--ssl-certfile", environment="SSL_CERTFILE", metavar="FILE", help="TLS, in PEM."),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        _option("--ssl-keyfile", environment="SSL_KEYFILE", metavar="FILE", help="Its key."),
    ] = None
    queue_timeout: Annotated[
        float,
        _option(
            "--queue-timeout",
            environment="QUEUE_TIMEOUT",
            help="Seconds a request may wait for its first step.",
        ),
    ] = 60.0
    request_timeout: Annotated[
        float,
        _option(
            "--request-timeout", environment="REQUEST_TIMEOUT", help="Seconds a request may take."
        ),
    ] = 600.0
    shutdown_timeout: Annotated[
        float,
        _option(
            "--shutdown-timeout",
            environment="SHUTDOWN_TIMEOUT",
            help="Seconds that open requests get when the server is told to end.",
        ),
    ] = 30.0
    sse_keep_alive_interval: Annotated[
        float,
        _option(
            "--sse-keep-alive-interval",
            environment="SSE_KEEP_ALIVE_INTERVAL",
            help="Seconds of silence in a stream before a comment is sent.",
        ),
    ] = 15.0
    max_logprobs: Annotated[
        int,
        _option(
            "--max-logprobs", environment="MAX_LOGPROBS", help="Most likeliest tokens told of."
        ),
    ] = 20
    max_bodies_bytes: Annotated[
        int,
        _option(
            "--max-bodies-bytes",
            environment="MAX_BODIES_BYTES",
            help="Bytes of all bodies that are being read at once.",
        ),
    ] = 256 << 20
    log_format: Annotated[
        str, _option("--log-format", environment="LOG_FORMAT", metavar="text|json", help="Lines.")
    ] = "text"
    log_level: Annotated[
        str,
        _option(
            "--log-level",
            environment="LOG_LEVEL",
            metavar="|".join(LOG_LEVELS),
            help="Least level of a line that is logged; debug has the resolved configuration.",
        ),
    ] = "info"
    disable_log_requests: Annotated[
        bool,
        _option(
            "--disable-log-requests",
            environment="DISABLE_LOG_REQUESTS",
            help="No line for each request.",
        ),
    ] = False


def serve(
    folder: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A model's folder or hub id; without, the bundled one.",
        ),
    ] = None,
    *,
    flags: ServeFlags,
    config: EngineConfig,
    unbuilt: UnbuiltFlags,
) -> None:
    """Serve a model over HTTP, with the API of OpenAI.

    The engine runs in a process of its own, which is started again when it fails. Ctrl-C or SIGTERM
    lets open requests finish; a second one ends at once. SIGHUP lets them finish, too.
    """
    del unbuilt  # each of them has refused itself
    from cadenza.cli.interrupts import terminable
    from cadenza.server.listening import listening, raise_descriptor_limit
    from cadenza.server.log_output import set_up_logging

    raise_descriptor_limit()
    name = only_model(folder, flags.model)
    options, address = _options(name, flags), _address(flags)
    if flags.log_format not in ("text", "json"):
        raise ConfigError(f"--log-format {flags.log_format!r} is not one of text, json")
    if flags.log_level not in LOG_LEVELS:
        raise ConfigError(f"--log-level {flags.log_level!r} is not one of {', '.join(LOG_LEVELS)}")
    level = logging.getLevelNamesMapping()[flags.log_level.upper()]
    lines = set_up_logging("json" if flags.log_format == "json" else "text", level)
    options = replace(options, num_dropped_log_lines=lambda: lines.num_dropped)
    engine, service = _make(name, flags, config, options)
    logger.debug("resolved configuration: %s %s", config, _told(flags))
    if flags.ignore_unknown_fields:
        logger.warning("--ignore-unknown-fields: unknown fields of requests have no effect")
    with terminable(), listening(address) as bound:
        logger.info(
            "cadenza %s serves %s at %s", __version__, options.model_names[0], address.url(bound)
        )
        asyncio.run(_run(engine, service, address, bound))


async def _run(engine: "EngineProcess", service: "Service", address: "Address", bound: Any) -> None:
    """Raises what kept the model from being loaded."""
    from cadenza.server.run import run_server, shut_down_on_signals

    loop = asyncio.get_running_loop()
    shutdowns: list[Shutdown] = []
    failures: list[CadenzaError] = []

    def take(shutdown: "Shutdown") -> None:
        shutdowns.append(shutdown)
        shut_down_on_signals(loop, shutdown)

    async def watch_load() -> None:
        try:
            await asyncio.to_thread(engine.wait_ready, MAX_LOAD_S)
        except CadenzaError as error:
            if not service.is_draining:
                failures.append(error)
                shutdowns[0].ask()

    watching = asyncio.create_task(watch_load())
    await run_server(service, address, bound, take)
    await watching
    if failures:
        raise failures[0]


def _make(
    name: str | None, flags: ServeFlags, config: EngineConfig, options: "ServerOptions"
) -> "tuple[EngineProcess, Service]":
    from cadenza.engine.open_requests import RequestTimeouts
    from cadenza.engine.process.engine_process import EngineProcess, ProcessOptions
    from cadenza.frontend.loaded_model import open_text
    from cadenza.loading.build import find_checkpoint
    from cadenza.server.service import Service

    checkpoint = find_checkpoint(name, revision=config.revision)
    text = open_text(checkpoint, config)
    # The engine process opens the same commit, now and at each restart, wherever a branch moves.
    config = replace(config, revision=checkpoint.revision)
    timeouts = RequestTimeouts(queue_s=flags.queue_timeout, total_s=flags.request_timeout)
    engine = EngineProcess(name, config, ProcessOptions(timeouts=timeouts))
    return engine, Service(engine, text, options)


def _options(name: str | None, flags: ServeFlags) -> "ServerOptions":
    from cadenza.server.access import ApiKeys, Cors, read_keys
    from cadenza.server.limits import ServerLimits
    from cadenza.server.service import ServerOptions

    file = None if flags.api_key_file is None else Path(flags.api_key_file)
    names, aliases = _names(name, flags.served_model_name)
    return ServerOptions(
        model_names=names,
        model_aliases=aliases,
        secret=secrets.token_bytes(32),
        keys=ApiKeys(read_keys(flags.api_key or (), file)),
        cors=Cors(flags.allowed_origins or ()),
        unknown_fields="ignore" if flags.ignore_unknown_fields else "refuse",
        is_logging_requests=not flags.disable_log_requests,
        limits=ServerLimits(
            keep_alive_s=flags.sse_keep_alive_interval,
            drain_s=flags.shutdown_timeout,
            max_logprobs=flags.max_logprobs,
            max_bodies_bytes=flags.max_bodies_bytes,
        ),
    )


def _names(name: str | None, asked: list[str] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What clients are told the model is called, and what they may call it besides.

    Of a folder its last part is told: where it lies on this machine is not for everybody to know.
    Who knows, and names the model as this command did, is understood.
    """
    if asked:
        return tuple(asked), ()
    if name is None:
        return ("bundled",), ()
    if not Path(name).exists():
        return (name,), ()
    told = os.path.basename(os.path.abspath(name)) or "model"
    return (told,), (name,)


def _address(flags: ServeFlags) -> "Address":
    from cadenza.server.listening import Address

    def path(text: str | None) -> Path | None:
        return None if text is None else Path(os.path.expanduser(text))

    return Address(
        host=flags.host,
        port=flags.port,
        uds=path(flags.uds),
        uds_mode=_socket_mode(flags.uds_mode),
        ssl_certfile=path(flags.ssl_certfile),
        ssl_keyfile=path(flags.ssl_keyfile),
    )


def _socket_mode(text: str) -> int:
    """Raises ConfigError where `text` is no mode."""
    digits = text.removeprefix("0o").removeprefix("0")
    if len(digits) != SOCKET_MODE_DIGITS or not set(digits) <= set("01234567"):
        raise ConfigError(
            f"--uds-mode {text!r} is not three octal digits; 600 is the owner only, 660 the group "
            f"too, 666 everybody"
        )
    return int(digits, 8)


def _told(flags: ServeFlags) -> str:
    """The flags as the log has them: keys are counted, not shown."""
    shown = {name: getattr(flags, name) for name in ServeFlags.__dataclass_fields__}
    shown["api_key"] = len(flags.api_key or ())
    return " ".join(f"{name}={value!r}" for name, value in shown.items())
