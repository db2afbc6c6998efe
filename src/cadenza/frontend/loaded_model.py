"""`LoadedModel`: a warm engine in this process and its checkpoint's text front end. `PlannedModel`
comes before it: it prepares requests before the engine is loaded, and its plan can be replaced."""

import os
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, overload

from cadenza.backends import BACKENDS, Backends
from cadenza.checkpoint.folder import Checkpoint, OnProgress
from cadenza.config import EngineConfig
from cadenza.engine.core import EngineCore
from cadenza.errors import EngineClosedError
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.answers import AnswerParsers
from cadenza.frontend.prepared_request import NO_WORKERS, Message, TextWorkers, conversation_of
from cadenza.frontend.sparse_prompts import SparsePrompts
from cadenza.frontend.text_frontend import DEFAULT_PARSERS, TextFrontend
from cadenza.loading.build import (
    OnPhaseDone,
    build_core,
    open_planned,
    release_tokenizer,
    reserve_planned,
)
from cadenza.loading.engine_plan import EnginePlan
from cadenza.loading.memory import MemoryReservation
from cadenza.loading.planned_engine import PlannedEngine
from cadenza.sparse_prefill import LOOK_AHEAD_TOKENS


@dataclass(frozen=True, slots=True)
class EngineOwner:
    """The process that loaded an engine: a forked child has none of its threads, so that a call
    would hang."""

    pid: int = field(default_factory=os.getpid)

    @property
    def is_here(self) -> bool:
        return os.getpid() == self.pid

    def check(self) -> None:
        if not self.is_here:
            raise EngineClosedError(
                f"the engine was loaded in process {self.pid}, of which process {os.getpid()} is a "
                f"fork without the engine's threads; load the model in the child, or start the "
                f"child with multiprocessing.get_context('spawn')"
            )


@dataclass(slots=True, eq=False, kw_only=True)
class LoadedModel:
    """The result of `load_model`; the caller must call `close`."""

    checkpoint: Checkpoint
    plan: EnginePlan
    core: EngineCore
    text: TextFrontend
    fingerprint: Fingerprint
    reservation: MemoryReservation

    def close(self) -> None:
        self.core.close()
        self.reservation.close()
        self.text.prompts.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """The result of `open_model`: a checkpoint, its plan and its text front end."""

    checkpoint: Checkpoint
    plan: EnginePlan
    text: TextFrontend
    config: EngineConfig
    backends: Backends = field(default_factory=lambda: BACKENDS)

    def load(self, on_phase: OnPhaseDone = lambda _: None) -> LoadedModel:
        """Compiles and warms up too. Step time is bounded only if `config` has a number for it.
        Raises ConfigError, DeviceUnavailableError."""
        config = self.config
        if config.max_itl_ms == "auto":
            config = replace(config, max_itl_ms="none")
        engine = PlannedEngine(
            checkpoint=self.checkpoint, plan=self.plan, config=config, backends=self.backends
        )
        with ExitStack() as failing, ThreadPoolExecutor(1) as thread:
            reservation = failing.enter_context(closing(reserve_planned(self.plan)))
            # Reads the weights, while they are loaded.
            identity = thread.submit(engine.identity)
            core = build_core(engine, on_phase)
            answers = identity.result().fingerprint
            failing.pop_all()
        release_tokenizer(self.checkpoint)
        return LoadedModel(
            checkpoint=self.checkpoint,
            plan=self.plan,
            core=core,
            text=self.text,
            fingerprint=self.text.with_forms(answers),
            reservation=reservation,
        )


def open_model(
    model: str | Path | None,
    config: EngineConfig,
    on_progress: OnProgress | None = None,
    *,
    backends: Backends = BACKENDS,
) -> PlannedModel:
    """Opens a checkpoint and its text front end, and plans its engine from one of `backends`; loads
    no weights. `on_progress` is called while they are loaded. Raises CheckpointError, ConfigError,
    DeviceUnavailableError."""
    engine = open_planned(model, config, backends)
    checkpoint, plan = engine.checkpoint, engine.plan
    text = open_text(checkpoint, config, plan)
    if on_progress is not None:
        checkpoint = checkpoint.watched(on_progress)
    return PlannedModel(
        checkpoint=checkpoint, plan=plan, text=text, config=config, backends=backends
    )


def load_model(
    model: str | Path | None,
    config: EngineConfig,
    on_phase: OnPhaseDone = lambda _: None,
    *,
    backends: Backends = BACKENDS,
) -> LoadedModel:
    """`open_model`, then `PlannedModel.load`."""
    return open_model(model, config, backends=backends).load(on_phase)


def open_text(
    checkpoint: Checkpoint,
    config: EngineConfig,
    plan: EnginePlan | None = None,
    workers: TextWorkers = NO_WORKERS,
    parsers: AnswerParsers = DEFAULT_PARSERS,
) -> TextFrontend:
    """For a planned engine if there is one. Raises CheckpointError."""
    text = TextFrontend(
        checkpoint,
        generation_config=config.generation_config,
        max_model_len=None if plan is None else plan.limits.max_model_len,
        workers=workers,
        parsers=parsers,
    )
    chosen = config.sparse_prompts
    if chosen is not None and chosen.has_model:
        scored = None
        if plan is not None and plan.scorer is not None:
            scored = plan.scorer_limits.max_model_len - LOOK_AHEAD_TOKENS
        text.sparse = SparsePrompts(config=chosen, scored_tokens=scored)
    return text


class ModelTokenizer:
    """The result of `get_tokenizer`."""

    def __init__(self, text: TextFrontend) -> None:
        self._text = text

    @property
    def vocab_size(self) -> int:
        return self._described["vocab_size"]

    @property
    def special_tokens(self) -> dict[str, int]:
        """The texts of bos, eos, unk and pad, as far as there are such, with their ids."""
        described = self._described
        names = [name.removesuffix("_id") for name in described if name.endswith("_token_id")]
        return {
            described[name]: described[f"{name}_id"]
            for name in names
            if described[f"{name}_id"] is not None
        }

    @property
    def bos_token_id(self) -> int | None:
        return self._described["bos_token_id"]

    @property
    def eos_token_id(self) -> int | None:
        return self._described["eos_token_id"]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Spelled control tokens are text, unless a chat template wrote them. Raises
        InvalidRequestError."""
        return [*self._text.encode(text, add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: SequenceOf[int], skip_special_tokens: bool = False) -> str:
        return self._text.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_ids: SequenceOf[int]) -> list[str | None]:
        """The vocabulary's entries; None for an unused id. Raises InvalidRequestError."""
        return [self._text.piece_of(token_id) for token_id in token_ids]

    @overload
    def apply_chat_template(
        self,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None = None,
        *,
        tokenize: Literal[True] = True,
        **options: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None = None,
        *,
        tokenize: Literal[False],
        **options: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None = None,
        *,
        tokenize: bool = True,
        **options: Any,
    ) -> list[int] | str:
        """The prompt's token ids, or its text. `options`: `add_generation_prompt` (true by
        default), `continue_final_message`, and the template's own. Raises InvalidRequestError:
        there is no template, or it rejects the messages."""
        text, ids = self._text.render_chat(conversation_of(messages, tools, options))
        return [*ids] if tokenize else text

    @property
    def _described(self) -> Mapping[str, Any]:
        return self._text.describe_tokenizer()
