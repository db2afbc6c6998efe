"""`LLM`: the offline interface. All prompts in one running batch; fills the engine's bounded queue
and runs the step loop on the caller's thread, which Ctrl-C reaches between steps."""

import inspect
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import FrameType
from typing import Any, Self, Unpack, cast

from cadenza.bounds import sequence_of
from cadenza.config import EngineOptions, config_from_options
from cadenza.engine.batch_engine import Submit, run_steps
from cadenza.errors import InvalidRequestError, must_be, show
from cadenza.events import Event
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.loaded_model import EngineOwner, ModelTokenizer, load_model
from cadenza.frontend.output_processor import OutputProcessor, OutputRouter, check_kind
from cadenza.frontend.prepared_request import (
    Message,
    PreparedRequest,
    Prompt,
    RequestOptions,
    conversation_of,
)
from cadenza.frontend.progress import MakeBar, batch_progress
from cadenza.frontend.text_frontend import Params, TextFrontend
from cadenza.option import is_integer
from cadenza.outputs import EmbeddingRequestOutput, OutputKind, RequestOutput, embedding_of
from cadenza.request import PoolingParams, SamplingParams, prompt_only

ParamsOfMany = Params | SequenceOf[Params]
_News = dict[int, OutputProcessor]


class LLM:
    """A model and its engine. `model` is a folder in Hugging Face's layout, a GGUF file or a hub
    id; None is the bundled model. `options` are the engine's flags of `cadenza serve` as keywords.
    Raises CheckpointError, ConfigError, DeviceUnavailableError: it could not be loaded."""

    def __init__(self, model: str | Path | None = None, **options: Unpack[EngineOptions]) -> None:
        self._loaded = load_model(model, config_from_options(options))
        self.core = self._loaded.core
        self.plan = self._loaded.plan
        self._owner = EngineOwner()
        self._router = OutputRouter(self.core.cancel)
        self._news: dict[int, _News] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent. Nothing in a forked child, where the memory is a copy."""
        if self._owner.is_here:
            self._loaded.close()

    @property
    def fingerprint(self) -> Fingerprint:
        """What the tokens depend on besides the request; its digest is `system_fingerprint`."""
        return self._loaded.fingerprint

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint recommends; Cadenza's defaults with `--generation-config none`."""
        return self.default_params()

    def default_params(self, **changes: object) -> SamplingParams:
        """The sampling that the checkpoint recommends, with `changes` on top."""
        return self._loaded.text.defaults.complete(changes)

    def get_tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer with its chat template. Raises InvalidRequestError without one."""
        self._loaded.text.describe_tokenizer()
        return ModelTokenizer(self._loaded.text)

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: ParamsOfMany = None,
        *,
        progress: bool = True,
        use_tqdm: bool | MakeBar = True,
    ) -> list[RequestOutput]:
        """Continues every prompt; results in the prompts' order.

        Args:
            prompts: a text, a list of token ids, one of vLLM's dictionaries, or a list of these.
            params: one for all, or one for each. `SamplingParams` are taken as they are; the fields
                that a mapping leaves out, like all of None's, are as the checkpoint recommends.
            progress: a bar on stderr, if that is a terminal; `use_tqdm` is vLLM's name of it, and
                shows what tqdm, or another maker of bars, makes.

        Raises InvalidRequestError: a prompt or its params cannot be served; nothing was started.
        """
        return self._run(self._prepare(_prompt_list(prompts), params), progress and use_tqdm)

    def chat(  # noqa: PLR0913  vLLM's keywords
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        params: ParamsOfMany = None,
        *,
        tools: SequenceOf[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
        use_tqdm: bool | MakeBar = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the model's chat template; otherwise as
        `generate`. A part of a message's content may be an image: {"type": "image", "image": …}
        with a PIL image, a file's bytes, a path or a data: URL, or {"type": "image_url", …} of
        OpenAI's API."""
        conversations = _conversation_list(messages)
        chosen = self._params_for(len(conversations), params)
        return self._run(
            (
                self._text.prepare(conversation_of(conversation, tools, chat_template_kwargs), each)
                for conversation, each in zip(conversations, chosen, strict=True)
            ),
            progress and use_tqdm,
        )

    def embed(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
        use_tqdm: bool | MakeBar = True,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of every prompt, from the model's last hidden states, in their order.
        `params` are for all of them, None as the checkpoint recommends; with
        `truncate_prompt_tokens` only the last tokens of each are kept; otherwise as `generate`."""
        given, text = prompt_only(truncate_prompt_tokens), self._text
        pooled = RequestOptions(pooling=PoolingParams() if params is None else params)
        prepared = (text.prepare(each, given, pooled) for each in _prompt_list(prompts))
        return [embedding_of(output) for output in self._run(prepared, progress and use_tqdm)]

    def stream(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: ParamsOfMany = None,
        *,
        kind: OutputKind = "cumulative",
    ) -> Iterator[RequestOutput]:
        """Yields a request's output after each step that brought it something new; `request_id`
        tells which. `kind` is what an output holds: all so far, what is new, or all at the end. Ids
        count up in the prompts' order. Closing the iterator cancels what still runs."""
        return self._stream([*self._prepare(_prompt_list(prompts), params)], kind)

    def stream_chat(
        self,
        messages: SequenceOf[Message],
        params: Params = None,
        *,
        kind: OutputKind = "cumulative",
        tools: SequenceOf[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        asked = conversation_of(messages, tools, chat_template_kwargs)
        return self._stream([self._text.prepare(asked, params)], kind)

    @property
    def _text(self) -> TextFrontend:
        self._owner.check()
        return self._loaded.text

    def _prepare(self, prompts: list[Prompt], params: ParamsOfMany) -> Iterator[PreparedRequest]:
        chosen = self._params_for(len(prompts), params)
        pairs = zip(prompts, chosen, strict=True)
        return (self._text.prepare(prompt, each) for prompt, each in pairs)

    def _params_for(self, count: int, params: ParamsOfMany) -> SequenceOf[Params]:
        if params is None or isinstance(params, SamplingParams | Mapping):
            return [params] * count
        if not isinstance(params, tuple | list):
            raise InvalidRequestError(
                f"params is {show(params)}; give SamplingParams or a mapping of some of its "
                f"fields, or a list with one of them for each prompt",
                param="params",
            )
        if len(params) != count:
            raise InvalidRequestError(
                f"{len(params)} SamplingParams for {count} prompts; give one, or one for each",
                param="params",
            )
        return params

    def _run(
        self, prepared: Iterable[PreparedRequest], progress: bool | MakeBar
    ) -> list[RequestOutput]:
        done: list[OutputProcessor] = []
        running: dict[int, OutputProcessor] = {}
        with KeptInterrupts() as kept:
            ready: list[PreparedRequest] = []
            for each in prepared:
                kept.deliver()
                ready.append(each)
            with batch_progress(len(ready), progress) as line:

                def on_step() -> None:
                    kept.deliver()
                    if line.is_due:
                        num_tokens = sum(each.num_tokens for each in (*done, *running.values()))
                        num_rows = len(self.core.scheduler.running)
                        line.show(num_done=len(done), num_rows=num_rows, num_tokens=num_tokens)

                for news in self._follow(ready, on_step):
                    running[news.request_id] = news
                    if news.is_finished:
                        done.append(running.pop(news.request_id))
        return [each.output() for each in sorted(done, key=lambda each: each.request_id)]

    def _stream(self, prepared: list[PreparedRequest], kind: OutputKind) -> Iterator[RequestOutput]:
        check_kind(kind)
        made = (each.make_output(kind) for each in self._follow(prepared))
        return (output for output in made if output is not None)

    def _follow(
        self, prepared: list[PreparedRequest], on_step: Callable[[], object] = lambda: None
    ) -> Iterator[OutputProcessor]:
        for each in prepared:
            self.core.check(each.request)
        return self._pump(deque(prepared), on_step)

    def _pump(
        self, waiting: deque[PreparedRequest], on_step: Callable[[], object]
    ) -> Iterator[OutputProcessor]:
        """Fills the engine's queue and steps it; yields the requests that have new output. Several
        streams may be read in turns: a step of any of them may bring news of the others, which
        those yield before they step themselves."""
        news: _News = {}
        open_ids: set[int] = set()

        def receive(_: float) -> list[Submit] | None:
            self._owner.check()
            on_step()
            if not waiting and not open_ids:
                return None
            commands: list[Submit] = []
            num_slots = self.core.num_queue_slots
            while waiting and num_slots > 0:
                num_slots -= waiting[0].request.params.n
                commands.append(self._submit(waiting.popleft(), news))
                open_ids.add(commands[-1].request_id)
            return commands

        try:
            for events in run_steps(self.core, receive, self.core.step):
                self._deliver(events)
                while news:
                    request_id = next(iter(news))
                    processor = news.pop(request_id)
                    if processor.is_finished:
                        open_ids.discard(request_id)
                    yield processor
        finally:
            for request_id in open_ids:
                self._news.pop(request_id, None)
                if self._router.remove(request_id):
                    self.core.cancel(request_id)

    def _submit(self, prepared: PreparedRequest, news: _News) -> Submit:
        request_id = self.core.new_request_id()
        loaded = self._loaded
        self._router.add(OutputProcessor(request_id, prepared, loaded.text, loaded.fingerprint))
        self._news[request_id] = news
        return Submit(request_id, prepared.request)

    def _deliver(self, events: list[Event]) -> None:
        for processor in self._router.push(events):
            request_id = processor.request_id
            self._news[request_id][request_id] = processor
            if processor.is_finished:
                del self._news[request_id]


def _prompt_list(prompts: object) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [cast(Prompt, prompts)]
    entries = _entries("prompt", prompts, "a text, a list of token ids, or a list of either")
    num_ids = sum(isinstance(entry, bool) or is_integer(entry) for entry in entries)
    if not num_ids:
        return cast(list[Prompt], entries)
    if num_ids < len(entries):
        other = next(each for each in entries if not (isinstance(each, bool) or is_integer(each)))
        raise InvalidRequestError(
            f"the prompts mix token ids with {show(other)}; give one list of token ids, or a list "
            f"of prompts, in which each list of token ids is a list of its own",
            param="prompt",
        )
    return [cast(SequenceOf[int], entries)]


def _conversation_list(messages: object) -> list[SequenceOf[Message]]:
    entries = _entries("messages", messages, "a list of messages, or a list of such lists")
    num_messages = sum(isinstance(entry, Mapping) for entry in entries)
    if num_messages == len(entries):
        return [cast(SequenceOf[Message], entries)]
    if num_messages:
        other = next(each for each in entries if not isinstance(each, Mapping))
        raise InvalidRequestError(
            f"the messages mix messages with {show(other)}; give one conversation, or a list of "
            f"conversations",
            param="messages",
        )
    return cast(list[SequenceOf[Message]], entries)


def _entries(name: str, given: object, allowed: str) -> list[object]:
    if isinstance(given, Iterator):
        return [*cast(Iterator[object], given)]
    found = sequence_of(given)
    if found is None:
        raise must_be(name, given, allowed)
    return [*found]


Handler = Callable[[int, FrameType | None], object]


class KeptInterrupts:
    """The first Ctrl-C is kept for `deliver`, a second goes to the caller's handler at once. Does
    nothing on other threads, and where Ctrl-C is ignored or ends the process."""

    __slots__ = ("_handler", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._handler: Handler | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handler: Any = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._keep)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if kind is None:
                self.deliver()

    def deliver(self) -> None:
        if self.is_set and self._handler is not None:
            self.is_set = False
            self._handler(signal.SIGINT, inspect.currentframe())

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and self._handler is not None:
            self._handler(number, frame)
        self.is_set = True
