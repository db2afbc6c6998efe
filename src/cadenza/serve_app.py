"""A Ray Serve application, the only module that imports ray: one front end, and engines on the
machines of a Ray cluster (`serve run cadenza.serve_app:app model=/models/m replicas=2`). The
keywords are the flags of `cadenza serve`, and those of `cli.app_flags`. Ray places, restarts and
scales; tokens pass through sockets between front ends and engines (`cluster.engine_host`)."""
# ray is an extra, which nothing that checks types has.
# pyright: basic, reportMissingImports=false

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from threading import Event, Thread
from typing import Any, cast

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address
from starlette.types import Message, Receive, Scope, Send

from cadenza.cli.app_flags import AppFlags
from cadenza.cli.serve_flags import server_options, with_template
from cadenza.cli.served_models import ReplicaPlace, make_service
from cadenza.cluster.engine_host import EngineHost, HostOptions
from cadenza.cluster.remote_engine import HostBook
from cadenza.cluster.scale_policy import EngineDemand, ScaleOptions, wanted_replicas
from cadenza.engine.request_ids import MAX_FRONT
from cadenza.server.access import Hosts
from cadenza.server.app import App
from cadenza.server.service import Service

logger = logging.getLogger(__name__)

TELL_EVERY_S, FORGET_AFTER_S = 1.0, 5.0
ANSWER_S = 5.0  # the longest that the directory may take to answer

MOVE_S = 30.0  # Ray gives an engine that it stops so long; its streams are elsewhere within seconds

KEEP_S = 60.0  # an engine whose front ends are all lost waits so long for the next

SCALE_EVERY_S = 2.0


def app(args: dict[str, Any]) -> serve.Application:
    """For `serve run` and `import_path` of a config file. Raises ConfigError."""
    flags = AppFlags.of(args)
    secret, directory = secrets.token_bytes(32), cast(Any, HostDirectory).bind()
    engine = cast(Any, Engine).options(
        ray_actor_options=dict(flags.engine_resources), **_numbers(flags)
    )
    front = cast(Any, Ingress).options(
        num_replicas=flags.fronts,
        max_ongoing_requests=flags.max_ongoing_requests,
        ray_actor_options=dict(flags.front_resources),
        graceful_shutdown_timeout_s=flags.serve.shutdown_timeout + MOVE_S,
        logging_config={"enable_access_log": not flags.serve.disable_log_requests},
    )
    return front.bind(args, secret, directory, engine.bind(secret, directory))


def _numbers(flags: AppFlags) -> dict[str, Any]:
    """Fixed, or by demand. Ray's own delays and factors are left out."""
    if flags.scale is None:
        return {"num_replicas": flags.serve.replicas}
    policy = AutoscalingPolicy(policy_function=ScalePolicy, policy_kwargs=asdict(flags.scale))
    scaling = AutoscalingConfig(
        min_replicas=flags.scale.min_replicas,
        max_replicas=flags.scale.max_replicas,
        policy=policy,
        metrics_interval_s=SCALE_EVERY_S,
        look_back_period_s=5 * SCALE_EVERY_S,
        upscale_delay_s=0,
        downscale_delay_s=0,
    )
    return {"autoscaling_config": scaling}


class ScalePolicy:
    """`wanted_replicas`, as Serve's controller asks for it. `options`: of `ScaleOptions`."""

    def __init__(self, **options: Any) -> None:
        self._options = ScaleOptions(**options)
        self._quiet_since_s: float | None = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        found: dict[Any, dict[str, float]] = {}
        for name, of_replicas in (context.raw_metrics or {}).items():
            for replica, readings in of_replicas.items():
                if name in {each.name for each in fields(EngineDemand)} and readings:
                    found.setdefault(replica, {})[name] = readings[-1].value
        demands = [EngineDemand(**each) for each in found.values()]
        current = context.target_num_replicas
        count, self._quiet_since_s = wanted_replicas(
            self._options, demands, current, time.monotonic(), self._quiet_since_s
        )
        if count != current:
            logger.info("%d engines in place of %d: %s", count, current, demands)
        return count, {}


@serve.deployment(
    num_replicas=1,
    max_ongoing_requests=1000,
    ray_actor_options={"num_cpus": 0},
    logging_config={"enable_access_log": False},
)
class HostDirectory:
    """Where engine hosts are. They register again and again, so that it may be lost."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], float] = {}

    def register(self, address: tuple[str, int]) -> None:
        self._seen[address] = time.monotonic()

    def leave(self, address: tuple[str, int]) -> None:
        self._seen.pop(address, None)

    def hosts(self) -> list[tuple[str, int]]:
        since_s = time.monotonic() - FORGET_AFTER_S
        self._seen = {each: seen_s for each, seen_s in self._seen.items() if seen_s >= since_s}
        return list(self._seen)


@serve.deployment(
    max_ongoing_requests=1_000_000,
    health_check_period_s=2.0,
    health_check_timeout_s=10.0,
    graceful_shutdown_timeout_s=MOVE_S,
    graceful_shutdown_wait_loop_s=0.1,
)
class Engine:
    """An engine host on one node. When it stops, its streams go on in the others."""

    def __init__(self, secret: bytes, directory: DeploymentHandle) -> None:
        logging.basicConfig(level=logging.INFO)
        options = HostOptions(keep_s=KEEP_S)
        self._host = EngineHost((get_node_ip_address(), 0), secret, options)
        self._directory = directory
        self._has_ended = Event()
        self._thread = Thread(target=self._tell, daemon=True)
        self._thread.start()

    def check_health(self) -> None:
        """Raises RuntimeError. An engine that makes no progress is ended by its host, and started
        again by the front ends."""
        if not self._host.is_listening:
            raise RuntimeError("the engine host does not listen any more")

    def record_autoscaling_stats(self) -> dict[str, float]:
        stats = self._host.stats
        if stats is None:
            return {}
        return asdict(
            EngineDemand(queued_s=stats.numbers["queued_seconds"], kv_usage=stats.kv_cache_usage)
        )

    def __del__(self) -> None:
        self._has_ended.set()
        self._directory.leave.remote(self._host.address)
        self._host.close()

    def _tell(self) -> None:
        while not self._has_ended.wait(TELL_EVERY_S):
            self._directory.register.remote(self._host.address)


class DeferredApp:
    """The ASGI application that Serve is given before there is a service."""

    front: "FrontEnd | None" = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = DeferredApp.front
        assert front is not None, "the deployment is constructed first"
        if scope["type"] == "lifespan":
            await front.live(receive, send)
        elif scope["type"] == "http":
            front.start()
            await front.app(scope, receive, lambda message: send(_without_id(message)))


def _without_id(message: Message) -> Message:
    """Serve adds the request's id to what is answered, which is the same one."""
    if message["type"] == "http.response.start":
        headers = [each for each in message["headers"] if each[0].lower() != b"x-request-id"]
        return {**message, "headers": headers}
    return message


class FrontEnd:
    """The service of one replica, on the event loop of its requests."""

    def __init__(self, args: Mapping[str, Any], secret: bytes, directory: DeploymentHandle) -> None:
        flags = AppFlags.of(args)

        def find_hosts() -> Sequence[tuple[str, int]]:
            try:
                return directory.hosts.remote().result(timeout_s=ANSWER_S)
            except Exception as error:  # Ray has many, and each means the same
                raise OSError(f"the directory does not answer: {error}") from error

        number = secrets.randbelow(MAX_FRONT) + 1
        book = HostBook(find_hosts, secret, number)
        places = [
            ReplicaPlace(
                open_child=book.opener(at), device=flags.config.device, is_local=False, front=number
            )
            for at in range(flags.serve.replicas)
        ]
        self.service: Service = make_service(
            (flags.serve.model,),
            flags.serve,
            with_template(flags.serve, flags.config),
            # It is not this process that listens, so it does not know its own names.
            replace(server_options(flags.serve), hosts=Hosts()),
            places,
        )
        self.app = App(self.service)
        self._is_started = False

    def start(self) -> None:
        """On the event loop; the engines then load."""
        if not self._is_started:
            self._is_started = True
            self.service.start()

    async def live(self, receive: Receive, send: Send) -> None:
        await receive()
        self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def stop(self) -> None:
        self.service.drain()
        end_s = time.monotonic() + self.service.options.limits.drain_s
        while self.service.num_open and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        await self.service.stop()


@serve.deployment(health_check_period_s=2.0, health_check_timeout_s=10.0)
@serve.ingress(DeferredApp())
class Ingress:
    """The front end: HTTP, tokens in and out, and which engine has which stream."""

    def __init__(
        self,
        args: Mapping[str, Any],
        secret: bytes,
        directory: DeploymentHandle,
        engines: DeploymentHandle,
    ) -> None:
        del engines  # Serve deploys what is bound here
        DeferredApp.front = FrontEnd(args, secret, directory)

    def check_health(self) -> None:
        """Raises RuntimeError where every engine was given up."""
        front = DeferredApp.front
        if front is not None and front.service.models.first.engine.status().state == "dead":
            raise RuntimeError("no engine can be started; the log has why")
