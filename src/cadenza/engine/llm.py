"""`LLM`: the offline face. Texts in, texts out, all prompts in one running batch.

Owns the feeding of the engine's bounded queue; runs the engine on the caller's thread.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, Self

from cadenza.config import config_from_options
from cadenza.engine.assembly import OutputAssembler
from cadenza.engine.build import load_model
from cadenza.engine.text_face import Message, Prompt
from cadenza.errors import InvalidRequestError
from cadenza.outputs import RequestOutput
from cadenza.request import Request, SamplingParams

Params = SamplingParams | SequenceOf[SamplingParams] | None
_Asked = tuple[str | None, Request]
"""A prompt's text, where it had one, and the request made of it."""


class LLM:
    """A model and its engine.

    Args:
        model: a folder in Hugging Face's layout; None is the bundled model.
        options: the flags of `cadenza serve` as keywords (`EngineConfig`'s fields).

    Raises:
        CheckpointError, ConfigError, DeviceUnavailableError: it could not be loaded.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self._loaded = load_model(model, config_from_options(options))
        self.core = self._loaded.core
        self.plan = self._loaded.plan
        self._open: dict[int, tuple[OutputAssembler, dict[int, OutputAssembler]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives back the memory; idempotent."""
        self._loaded.close()

    def default_params(self, **changes: Any) -> SamplingParams:
        """The sampling that the checkpoint recommends, with `changes` on top."""
        return self._loaded.text.default_params(**changes)

    def generate(
        self, prompts: Prompt | SequenceOf[Prompt], params: Params = None
    ) -> list[RequestOutput]:
        """Continues every prompt; results in the prompts' order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: one for all, or one for each prompt; None is `default_params()`.

        Raises:
            InvalidRequestError: a prompt or its params cannot be served; nothing was started.
        """
        return self._run(self._requests(_prompt_list(prompts), params))

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        params: Params = None,
        *,
        tools: SequenceOf[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the model's chat template."""
        rendered = [
            self._loaded.text.render_chat(
                conversation, tools=tools, template_kwargs=chat_template_kwargs
            )
            for conversation in _conversation_list(messages)
        ]
        chosen = self._params_for(len(rendered), params)
        pairs = zip(rendered, chosen, strict=True)
        return self._run([(text, _request(ids, each)) for (text, ids), each in pairs])

    def stream(
        self, prompts: Prompt | SequenceOf[Prompt], params: Params = None
    ) -> Iterator[RequestOutput]:
        """Yields a request's output so far after each of its tokens; `request_id` tells which.

        Ids count up in the prompts' order. Closing the iterator cancels what still runs.
        """
        return self._stream(self._requests(_prompt_list(prompts), params))

    def stream_chat(
        self, messages: SequenceOf[Message], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[RequestOutput]:
        """Streams the answer to one conversation; `options` as of `chat`."""
        text, ids = self._loaded.text.render_chat(
            messages,
            tools=options.get("tools"),
            template_kwargs=options.get("chat_template_kwargs"),
        )
        return self._stream([(text, _request(ids, params or self.default_params()))])

    def _requests(self, prompts: list[Prompt], params: Params) -> list[_Asked]:
        chosen = self._params_for(len(prompts), params)
        return [
            (
                prompt if isinstance(prompt, str) else None,
                _request(self._loaded.text.encode(prompt), each),
            )
            for prompt, each in zip(prompts, chosen, strict=True)
        ]

    def _params_for(self, count: int, params: Params) -> list[SamplingParams]:
        if params is None:
            return [self.default_params()] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidRequestError(
                f"{len(params)} SamplingParams for {count} prompts; give one, or one for each",
                param="params",
            )
        return list(params)

    def _run(self, requests: list[_Asked]) -> list[RequestOutput]:
        done = [each for each in self._follow(requests) if each.is_finished]
        return [each.output() for each in sorted(done, key=lambda each: each.request_id)]

    def _stream(self, requests: list[_Asked]) -> Iterator[RequestOutput]:
        return (each.output() for each in self._follow(requests))

    def _follow(self, requests: list[_Asked]) -> Iterator[OutputAssembler]:
        for _, request in requests:
            self.core.check(request)
        return self._pump(deque(requests))

    def _pump(self, waiting: deque[_Asked]) -> Iterator[OutputAssembler]:
        """Keeps the engine's queue filled and steps it; yields whoever has something new.

        Several streams may be read in turns: each step's events reach their own stream.
        """
        news: dict[int, OutputAssembler] = {}
        open_ids: set[int] = set()
        try:
            while waiting or open_ids:
                while waiting and self.core.num_queue_slots:
                    open_ids.add(self._submit(*waiting.popleft(), news))
                if not news:
                    self._step()
                for request_id in list(news):
                    assembler = news.pop(request_id)
                    if assembler.is_finished:
                        open_ids.discard(request_id)
                    yield assembler
        finally:
            for request_id in open_ids:
                self._open.pop(request_id, None)
                self.core.cancel(request_id)

    def _submit(
        self, prompt: str | None, request: Request, news: dict[int, OutputAssembler]
    ) -> int:
        request_id = self.core.submit(request)
        assembler = OutputAssembler(request_id, prompt, request.prompt_token_ids, self._loaded.text)
        self._open[request_id] = (assembler, news)
        return request_id

    def _step(self) -> None:
        for event in self.core.step():
            assembler, news = self._open[event.request_id]
            assembler.push(event)
            news[event.request_id] = assembler
            if assembler.is_finished:
                del self._open[event.request_id]


def _request(prompt_token_ids: tuple[int, ...], params: SamplingParams) -> Request:
    return Request(prompt_token_ids=prompt_token_ids, params=params)


def _prompt_list(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [[item for item in prompts if isinstance(item, int)]]
    return [item for item in prompts if not isinstance(item, int)]


def _conversation_list(
    messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
) -> list[SequenceOf[Message]]:
    if messages and isinstance(messages[0], Mapping):
        return [[message for message in messages if isinstance(message, Mapping)]]
    return [conversation for conversation in messages if not isinstance(conversation, Mapping)]
