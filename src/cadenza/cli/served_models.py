"""`make_service`: the models of `cadenza serve`, with their names, text front ends and engine
processes. Invariant: a model that cannot be served is refused before a port is open, as far as that
is known without loading it."""

import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cadenza.cli.serve_flags import ServeFlags
from cadenza.config import EngineConfig, EngineLimits
from cadenza.errors import ConfigError, show

logger = logging.getLogger(__name__)

MAX_NAME_CHARS = 256  # of a model's name, as in requests

ANY_NAME = "*"  # among the names: every name that no model has

if TYPE_CHECKING:
    from cadenza.checkpoint.folder import Checkpoint
    from cadenza.engine.process.child_process import EngineChild
    from cadenza.engine.process.launch import FirstLaunch
    from cadenza.engine.process.process_link import ProcessLink, ProcessOptions
    from cadenza.frontend.answers import AnswerParsers
    from cadenza.frontend.text_frontend import TextFrontend
    from cadenza.server.served_model import ModelNames, ServedModel
    from cadenza.server.service import ServerOptions, Service


def make_service(
    words: Sequence[str | None],
    flags: ServeFlags,
    config: EngineConfig,
    options: "ServerOptions",
    places: "Sequence[ReplicaPlace]",
) -> "Service":
    """Each model has an engine at each of the places. Raises CheckpointError, ConfigError."""
    from cadenza.engine.process.process_link import ProcessOptions
    from cadenza.engine.timeouts import RequestTimeouts
    from cadenza.frontend.answers import AnswerParsers
    from cadenza.loading.memory import private_memory_bytes
    from cadenza.server.model_pool import ModelPool, PoolOptions
    from cadenza.server.service import Service

    pool_options = PoolOptions(
        max_loaded=min(flags.max_loaded_models, len(words)),
        idle_unload_s=flags.idle_unload,
        max_waiting=most_waiting(config),
        max_waiting_bytes=flags.max_bodies_bytes,
    )
    named = names_of(words, flags.served_model_name)
    parsers = AnswerParsers(
        reasoning=flags.reasoning_parser,
        tool_calls=flags.tool_call_parser,
        strict_tools=flags.strict_tools,
        strict_messages=flags.strict_messages,
        stable_prompts=flags.stable_prompts,
        max_string=flags.structured_max_string or None,
    )
    opened = open_models(words, config, parsers)
    is_local = any(each.is_local for each in places)
    process = ProcessOptions(
        timeouts=RequestTimeouts.of(flags.queue_timeout, flags.request_timeout),
        on_failure=flags.on_engine_failure,
        front_end_bytes=(private_memory_bytes() or 0) if is_local else 0,
        bodies_bytes=flags.max_bodies_bytes if is_local else 0,
    )
    processes = shared_out(process, opened, pool_options.max_loaded, places)
    models = [
        each.served(names, own, places)
        for each, names, own in zip(opened, named, processes, strict=True)
    ]
    return Service(ModelPool(models, pool_options, options.clock), options)


def names_of(words: Sequence[str | None], asked: Sequence[str] | None) -> "list[ModelNames]":
    """A folder is named by its last part, so that answers do not disclose its path, which is an
    alias. With "*" the first model takes names that none has. Raises ConfigError where the number
    of names does not fit, or no request could have a name."""
    from cadenza.server.served_model import ModelNames

    asked, takes_any = [each for each in asked or () if each != ANY_NAME], ANY_NAME in (asked or ())
    for name in asked:
        if not (0 < len(name) <= MAX_NAME_CHARS and name.isprintable()):
            raise ConfigError(
                f"--served-model-name {show(name)} must have from 1 to {MAX_NAME_CHARS} characters "
                f"that can be printed"
            )
    if not asked:
        found = [_names_of(word) for word in words]
    elif len(words) == 1:
        found = [ModelNames(listed=tuple(dict.fromkeys(asked)))]
    elif len(asked) == len(words):
        found = [ModelNames(listed=(name,)) for name in asked]
    else:
        raise ConfigError(
            f"--served-model-name is given {len(asked)} times for {len(words)} models; give it "
            f"once for each model, in their order, or leave it out"
        )
    return [replace(found[0], takes_any=takes_any), *found[1:]]


def _names_of(word: str | None) -> "ModelNames":
    from cadenza.server.served_model import ModelNames

    if word is None:
        return ModelNames(listed=("bundled",))
    if not Path(word).exists():
        return ModelNames(listed=(word,))
    last = os.path.basename(os.path.abspath(word)) or "model"
    return ModelNames(listed=(last,), aliases=(word,))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """`config` has its engine read the same commit at each start, even if a branch moves, and the
    same template, even if its file changes."""

    word: str | None
    checkpoint: "Checkpoint"
    text: "TextFrontend"
    config: EngineConfig

    def served(
        self, names: "ModelNames", process: "ProcessOptions", places: "Sequence[ReplicaPlace]"
    ) -> "ServedModel":
        """Several engines serve as one."""
        from cadenza.cluster.engine_group import EngineGroup
        from cadenza.cluster.group_stats import replica_limits
        from cadenza.engine.batch_engine import ServedEngine
        from cadenza.engine.front import EngineFront
        from cadenza.engine.request_ids import ids_of
        from cadenza.server.served_model import ServedModel

        prefix_secret = secrets.token_bytes(32)
        if len(places) > 1:
            process = replace(process, prefix_secret=prefix_secret)

        def make_engine(limits: EngineLimits | None) -> ServedEngine:
            front = places[0].front
            if len(places) == 1:
                return EngineFront(self._link(process, limits, places[0]), ids_of(front))
            known = None if limits is None else replica_limits(limits, len(places))

            def make_replica(
                place: int, own: EngineLimits | None, ids: Iterator[int]
            ) -> EngineFront:
                link = self._link(process, own or known, places[place])
                return EngineFront(link, ids, self.config.seed)

            return EngineGroup(make_replica, len(places), prefix_secret, front=front)

        return ServedModel(names, self.text, make_engine)

    def _link(
        self, process: "ProcessOptions", limits: EngineLimits | None, at: "ReplicaPlace"
    ) -> "ProcessLink":
        from cadenza.engine.process.process_link import ProcessLink, pinned

        config = self.config if limits is None else pinned(self.config, limits)
        options = replace(process, open_child=at.open_child)
        return ProcessLink(self.word, replace(config, device=at.device), options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlace:
    """Where an engine computes. `is_local`: on this machine, whose memory it takes; `front`: the
    number of this front end among those that share the engine."""

    open_child: "Callable[[Sequence[str]], EngineChild]"
    device: str
    is_local: bool = True
    front: int = 0


def local_places(
    flags: ServeFlags, config: EngineConfig, first: "FirstLaunch"
) -> "list[ReplicaPlace]":
    """Of this machine; the first engine process has been launched already."""
    from cadenza.engine.process.child_process import ChildProcess

    def open_child(command: Sequence[str]) -> ChildProcess:
        return ChildProcess(command, launched=first.take())

    return replica_places(config.device, flags.replicas, open_child)


def replica_places(
    device: str, num_replicas: int, open_child: "Callable[[Sequence[str]], EngineChild]"
) -> list[ReplicaPlace]:
    """A card for each where the device is `cuda`; the CPUs are split among several."""
    if num_replicas == 1:
        return [ReplicaPlace(open_child=open_child, device=device)]
    from cadenza.cluster.cores import own_cpus, place_on, split_cpus

    def opener(cpus: Sequence[int]) -> "Callable[[Sequence[str]], EngineChild]":
        def open_placed(command: Sequence[str]) -> "EngineChild":
            child = open_child(command)
            place_on(child.pid, cpus)
            return child

        return open_placed

    return [
        ReplicaPlace(open_child=opener(cpus), device=f"cuda:{at}" if device == "cuda" else device)
        for at, cpus in enumerate(split_cpus(own_cpus(), num_replicas))
    ]


def most_waiting(config: EngineConfig) -> int:
    from cadenza.loading.footprint import LEAST_QUEUED_REQS

    return config.max_num_queued_reqs or LEAST_QUEUED_REQS


def open_models(
    words: Sequence[str | None], config: EngineConfig, parsers: "AnswerParsers"
) -> list[OpenedModel]:
    """Raises CheckpointError, ConfigError."""
    from cadenza.frontend.loaded_model import open_text
    from cadenza.frontend.text_frontend import TextWorkers
    from cadenza.loading.build import find_configured, release_tokenizer
    from cadenza.text.schemas.grammar import FormChecks
    from cadenza.text.schemas.grammar_worker import GrammarWorker

    worker = GrammarWorker()  # one for all
    checks = FormChecks(start=worker.start_checks, is_valid=worker.is_valid, is_inline=False)
    workers = TextWorkers(checks=checks)
    opened: list[OpenedModel] = []
    for word in words:
        checkpoint = find_configured(word, config)
        text = open_text(checkpoint, config, workers=workers, parsers=parsers)
        if text.prompts.template is not None and not (
            text.prompts.takes_tools or parsers.strict_tools
        ):
            logger.info(
                "%sthe chat template has no place for tools: the system message describes them, "
                "and results are user turns (--strict-tools refuses them)",
                f"{word or 'the bundled model'}: " if len(words) > 1 else "",
            )
        release_tokenizer(checkpoint)
        template = config.chat_template and (checkpoint.chat_template or "none")
        fixed = replace(config, revision=checkpoint.revision, chat_template=template)
        opened.append(OpenedModel(word=word, checkpoint=checkpoint, text=text, config=fixed))
    return opened


def shared_out(
    process: "ProcessOptions",
    opened: Sequence[OpenedModel],
    num_models: int,
    places: Sequence[ReplicaPlace],
) -> "list[ProcessOptions]":
    """With each model's share of the memory, where several engines run side by side, of
    `num_models` at the same time; replicas on cards or machines of their own share nothing. Raises
    ConfigError where their weights do not fit together."""
    from cadenza.loading.memory import available_memory_bytes
    from cadenza.loading.plan import memory_shares, weight_bytes_of

    num_copies = max(Counter(each.device for each in places if each.is_local).values(), default=1)
    num_engines = num_models * num_copies
    if num_engines == 1:
        return [process] * len(opened)
    weights = [weight_bytes_of(each.checkpoint, each.config) for each in opened]
    copies = [each for each in weights for _ in range(num_copies)]
    shares = memory_shares(copies, num_engines, available_memory_bytes())[::num_copies]
    return [replace(process, share_bytes=each, num_engines=num_engines) for each in shares]
