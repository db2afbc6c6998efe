"""`ServeFlags`: the flags of `cadenza serve`, and what each of its parts takes from them: the
server's options and address, the engine's config. Invariant: an API key is in no log line.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from cadenza.cli.options import ModelFlag
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError
from cadenza.option import flag

if TYPE_CHECKING:
    from cadenza.server.fields.body import UnknownFields
    from cadenza.server.http.listening import Address
    from cadenza.server.service import ServerOptions

SOCKET_MODE_DIGITS = 3

LogLevel = Literal["debug", "info", "warning", "error"]


def _flag(default: Any, help: str, **settings: Any) -> Any:
    return flag(default, help, has_variable=True, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """The flags of this command alone."""

    model: ModelFlag = None
    host: str = _flag("127.0.0.1", "Address to listen at.")
    port: int = _flag(8000, "Port; 0 takes a free one.", min=0, max=65535)
    uds: str | None = _flag(
        None, "A Unix socket in place of a port; --uds-mode sets who may connect.", metavar="PATH"
    )
    uds_mode: str = _flag(
        "600",
        "The socket's permissions: 600 is its owner only, 660 its group too.",
        metavar="OCTAL",
    )
    served_model_name: list[str] | None = _flag(
        None,
        "The model's name in the API; may be repeated. Of several models, one name each, in their "
        "order (default: a folder's last part, or the name as it was given). * beside them: any "
        "other name means the first model.",
    )
    max_loaded_models: int = _flag(
        1,
        "Most of several models that are loaded at the same time. A request for another one has a "
        "loaded one finish its requests and make room.",
        min=1,
    )
    replicas: int = _flag(
        1,
        "Engines of each model that serve as one: the CPUs are split among them, with --device "
        "cuda each has a card. When one is lost, its streams go on in another, with the same bits.",
        min=1,
        max=64,
    )
    idle_unload: float | None = _flag(
        None,
        "Seconds without a request after which a model is unloaded, and its memory is free; the "
        "next request loads it again (default: never).",
        metavar="SECONDS",
    )
    api_key: list[str] | None = _flag(
        None,
        "A key that clients must send; may be repeated. Safer in the environment.",
        metavar="KEY",
    )
    api_key_file: str | None = _flag(None, "Keys, one a line.", metavar="FILE")
    tenants: str | None = _flag(
        None,
        "Weights and limits of tenants by their API keys, in TOML (docs/serving.md).",
        metavar="FILE",
    )
    metrics_port: int | None = _flag(
        None,
        "A further port, of --host, for /metrics and the probes alone; without --metrics-key it "
        "needs no key.",
        min=1,
        max=65535,
    )
    otlp_traces_endpoint: str | None = _flag(
        None,
        "A collector to which spans of each request are sent by OTLP over HTTP, such as "
        "http://HOST:4318/v1/traces; needs the extra otel (default: none are made).",
        metavar="URL",
    )
    metrics_key: str | None = _flag(
        None,
        "A key for /metrics alone, beside those of the API. Safer in the environment.",
        metavar="KEY",
    )
    allowed_origins: list[str] | None = _flag(
        None,
        "Origins of web pages that may call this server, as scheme://host:port, or * for any; may "
        "be repeated (default: none).",
        metavar="ORIGIN",
    )
    allowed_hosts: list[str] | None = _flag(
        None,
        "Further names of this server in the Host header, where it listens at a loopback address "
        "without a key: others than localhost and IP addresses are refused there. * for any; may "
        "be repeated (default: none).",
        metavar="NAME",
    )
    allowed_media_domains: list[str] | None = _flag(
        None,
        "A host from which images may be fetched by https, as a request's image URL names it, such "
        "as images.example.com, or with a port; may be repeated (default: none, images are data: "
        "URLs).",
        metavar="HOST",
    )
    no_ui: bool = _flag(
        False, "Serve no page with scripts at /; a page that names what is here stays."
    )
    ignore_unknown_fields: bool = _flag(
        False,
        "Ignore unknown fields of a request's body even where their names are near known ones, "
        "which are refused otherwise as typing errors.",
    )
    strict_messages: bool = _flag(
        False,
        "Refuse a conversation that the chat template refuses as it is, instead of rendering it in "
        "another form: later system messages in user turns, neighbours of one role joined.",
    )
    stable_prompts: bool = _flag(
        False,
        "Move the lines of system prompts that agents change from call to call (dates, counters, "
        "the state of the working folder) behind the newest message, and remove billing headers, "
        "so that the prefix cache finds the rest.",
    )
    strict_fields: bool = _flag(False, "Refuse unknown fields of a request's body.")
    handover: bool = _flag(
        False,
        "Take over from the server at this address once the model is loaded, without refusing a "
        "connection; that server finishes its open requests and ends. Without one: start as usual.",
    )
    tool_call_parser: str = _flag(
        "auto",
        "How the model writes tool calls: hermes, qwen3_coder, glm45, mistral, llama3_json, "
        "pythonic, lfm2, functiongemma, gemma4, harmony, deepseek_v3, deepseek_v31 or json; auto "
        "is as the chat template shows.",
    )
    structured_max_string: int = _flag(
        4096,
        "Most characters of a text that a response format's schema does not bound; 0: as many as "
        "the model likes.",
        min=0,
    )
    strict_tools: bool = _flag(
        False,
        "Refuse tools where the chat template has no place for them; otherwise the system message "
        "describes them.",
    )
    reasoning_parser: str = _flag(
        "auto",
        "How the model marks its reasoning: think, mistral, harmony, gemma4 or granite; auto is as "
        "the chat template shows, none leaves it in the content.",
    )
    ssl_certfile: str | None = _flag(None, "The TLS certificate, in PEM.", metavar="FILE")
    ssl_keyfile: str | None = _flag(None, "The certificate's key.", metavar="FILE")
    queue_timeout: float | None = _flag(
        None,
        "Seconds a request may wait for its first step; by default as many as it may take in all. "
        "One that would wait for longer, as is forecast, is refused at once.",
    )
    request_timeout: float = _flag(600.0, "Seconds a request may take.")
    shutdown_timeout: float = _flag(
        30.0, "Seconds that open requests have to finish after the signal to shut down."
    )
    on_engine_failure: Literal["resume", "error"] = _flag(
        "resume",
        "What becomes of open requests when the engine process ends or hangs: resume has the next "
        "one go on with them, error ends each with an error. An engine that fails three times in a "
        "row with the same error while it loads is given up: the server ends with exit code 1, for "
        "systemd or Kubernetes to start it again.",
    )
    sse_keep_alive_interval: float = _flag(
        15.0, "Seconds without an event after which a stream sends a comment."
    )
    no_chat_template: bool = _flag(
        False, "Use no chat template: chat is refused, completions are served."
    )
    max_logprobs: int = _flag(20, "Most logprobs for each token that a request may ask for.")
    max_bodies_bytes: int = _flag(
        256 << 20, "Bytes of all bodies that are being read at once; the default is 256 MiB."
    )
    max_stored_responses: int = _flag(
        1024, "Most responses of /v1/responses that are stored; 0 stores none."
    )
    max_stored_responses_bytes: int = _flag(
        64 << 20, "Bytes of all stored responses; the default is 64 MiB."
    )
    stored_responses_ttl: float = _flag(
        3600.0, "Seconds after its last use in which a response stays stored."
    )
    log_format: Literal["text", "json"] = _flag("text", "The format of log lines.")
    log_level: LogLevel = _flag(
        "info", "The lowest level that is logged; debug includes the resolved configuration."
    )
    disable_log_requests: bool = _flag(False, "Log no line for each request.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedFlags:
    """Flags of other servers that ask for what Cadenza does anyway."""

    enable_auto_tool_choice: bool = _flag(False, "", hidden=True)


def server_options(flags: ServeFlags) -> "ServerOptions":
    from cadenza.media.fetching import AllowedHosts, MediaFetcher
    from cadenza.server.access import ApiKeys, Cors, Hosts, read_keys
    from cadenza.server.limits import ServerLimits
    from cadenza.server.response_store import StoreBounds
    from cadenza.server.service import ServerOptions
    from cadenza.server.tenants import TenantFile, read_tenants

    tenants = TenantFile() if flags.tenants is None else read_tenants(Path(flags.tenants))
    file = None if flags.api_key_file is None else Path(flags.api_key_file)
    keys = ApiKeys(read_keys(flags.api_key or (), file), tenants.keys)
    is_checked = keys.is_open and flags.uds is None
    return ServerOptions(
        keys=keys,
        hosts=Hosts.of_loopback(flags.host, flags.allowed_hosts or ()) if is_checked else Hosts(),
        has_ui=not flags.no_ui,
        tenants=tenants,
        metrics_keys=ApiKeys(() if flags.metrics_key is None else (flags.metrics_key,)),
        metrics_port=flags.metrics_port,
        cors=Cors(flags.allowed_origins or ()),
        fetcher=MediaFetcher(AllowedHosts(flags.allowed_media_domains or ())),
        stored_responses=StoreBounds(
            max_count=flags.max_stored_responses,
            max_bytes=flags.max_stored_responses_bytes,
            ttl_s=flags.stored_responses_ttl,
        ),
        unknown_fields=_unknown_fields(flags),
        is_logging_requests=not flags.disable_log_requests,
        limits=ServerLimits(
            keep_alive_s=flags.sse_keep_alive_interval,
            drain_s=flags.shutdown_timeout,
            max_logprobs=flags.max_logprobs,
            max_bodies_bytes=flags.max_bodies_bytes,
        ),
    )


def _unknown_fields(flags: ServeFlags) -> "UnknownFields":
    if flags.ignore_unknown_fields and flags.strict_fields:
        raise typer.BadParameter(
            "--ignore-unknown-fields and --strict-fields are both given; give one"
        )
    return (
        "refuse" if flags.strict_fields else "ignore" if flags.ignore_unknown_fields else "suggest"
    )


def address_of(flags: ServeFlags) -> "Address":
    from cadenza.server.http.listening import Address

    def path(text: str | None) -> Path | None:
        return None if text is None else Path(os.path.expanduser(text))

    return Address(
        host=flags.host,
        port=flags.port,
        uds=path(flags.uds),
        uds_mode=_socket_mode(flags.uds_mode),
        metrics_port=_metrics_port(flags),
        ssl_certfile=path(flags.ssl_certfile),
        ssl_keyfile=path(flags.ssl_keyfile),
    )


def _metrics_port(flags: ServeFlags) -> int | None:
    """Raises ConfigError where it is the API's own."""
    if flags.metrics_port is not None and flags.uds is None and flags.metrics_port == flags.port:
        raise ConfigError(
            f"--metrics-port {flags.metrics_port} is --port too; give another one, or leave it "
            f"out: /metrics is at --port in any case"
        )
    return flags.metrics_port


def _socket_mode(text: str) -> int:
    digits = text.removeprefix("0o").removeprefix("0")
    if len(digits) != SOCKET_MODE_DIGITS or not set(digits) <= set("01234567"):
        raise ConfigError(
            f"--uds-mode {text!r} is not three octal digits; 600 is the owner only, 660 the group "
            f"too, 666 everybody"
        )
    return int(digits, 8)


def with_template(flags: ServeFlags, config: EngineConfig) -> EngineConfig:
    """As `--no-chat-template` asks. Raises BadParameter."""
    if not flags.no_chat_template:
        return config
    if config.chat_template not in (None, "none"):
        raise typer.BadParameter("--chat-template and --no-chat-template are both given; give one")
    return replace(config, chat_template="none")


def without_keys(flags: ServeFlags) -> str:
    """The flags for the log, with the number of API keys in place of the keys."""
    shown = {name: getattr(flags, name) for name in ServeFlags.__dataclass_fields__}
    shown["api_key"] = len(flags.api_key or ())
    shown["metrics_key"] = flags.metrics_key is not None
    return " ".join(f"{name}={value!r}" for name, value in shown.items())
