"""/api/chat, /api/generate and /api/embed, as in Ollama's API. Invariants: a conversation has the
same tokens as by any other API, without Ollama's sampling defaults; a stream's lines, joined, are
the whole answer; an embedding has the bits that it has by /v1/embeddings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, cast

import msgspec

from cadenza.frontend.prepared_request import AnyPrompt, ChatPrompt, RequestOptions
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import CompletionOutput, Logprob, RequestOutput, values_of
from cadenza.request import DIMENSIONS, SamplingParams
from cadenza.server.calls.conversation import AskedConversation, continuing
from cadenza.server.calls.endpoint import (
    AnswerHead,
    Block,
    BlockEncoder,
    BlockEvent,
    GeneratingEndpoint,
    GenerationRequest,
    LogprobEntry,
    StreamEncoder,
    check_num_logprobs,
    finite,
    ranked,
    shown_token,
)
from cadenza.server.errors import ApiError, invalid_value
from cadenza.server.fields.body import label, optional, unsupported
from cadenza.server.fields.sampling import MAX_CHOICES, MAX_PROMPT_CHARS, TopLogprobsBody
from cadenza.server.fields.structured import ollama_format
from cadenza.server.fields.thinking import AskedThinking
from cadenza.server.fields.tools import function_tools
from cadenza.server.fields.types import (
    AnyJson,
    Boolean,
    Integer,
    Schema,
    String,
    array_schema,
    field_type,
    refuse,
)
from cadenza.server.http.exchange import Dialect
from cadenza.server.limits import ServerLimits
from cadenza.server.ollama.fields import (
    ollama_messages,
    ollama_options,
    prompt_images,
    seen_content,
    think_type,
)
from cadenza.server.openapi import TEXT, AnswerSchema, list_of, object_of
from cadenza.server.pooling.embeddings import PooledRequest, embedding_bytes
from cadenza.structured import StructuredOutput

_encode = msgspec.json.encode

OLLAMA = Dialect(
    error_body=lambda error, _: _encode({"error": error.with_field}),
    error_schema="TextError",
    stream_type="application/x-ndjson",
    takes_unlabelled=True,
)

KEEP_ALIVE = AnyJson(max_chars=64)
KEEP_ALIVE_HELP = "A hint; the model stays loaded."

_TEXT = String(max_chars=MAX_PROMPT_CHARS)

_NUMBERS = list_of({"type": "number"})
_ONE_TEXT = {**_TEXT.schema(), "minLength": 1}
Members = dict[str, Any]
AnswerShape = Callable[[str, str, Sequence[Members]], Members]
"""Makes the object that holds an answer's content, thinking and calls."""


def chat_shape(content: str, thinking: str, calls: Sequence[Members]) -> Members:
    """/api/chat: in a message."""
    message: Members = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def prompt_shape(content: str, thinking: str, calls: Sequence[Members]) -> Members:
    """/api/generate: in the object itself."""
    del calls  # there are no tools
    return {"response": content, **({"thinking": thinking} if thinking else {})}


class OllamaRequest(TopLogprobsBody, GenerationRequest):
    """What both bodies have in common."""

    param_names: ClassVar[Mapping[str, str]] = {"thinking_token_budget": "think"}

    stream = optional(Boolean(), "Send the answer as it comes, in lines.", default=True)
    options = optional(ollama_options, "Sampling, by Ollama's names.")
    format = optional(ollama_format, 'The form of the answer: "json", or a JSON Schema.')
    think = optional(think_type, "Whether the model thinks, or how much.")
    keep_alive = label(KEEP_ALIVE, KEEP_ALIVE_HELP)
    truncate = label(Boolean(), "A prompt beyond the context is always refused.")
    shift = label(Boolean(), "An answer always ends where the context does.")

    @property
    def form_field(self) -> str | None:
        return None if self.format is None else "format"

    @property
    def form(self) -> StructuredOutput | None:
        return self.format

    @property
    def shape(self) -> AnswerShape:
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        """Whether there is no prompt, by which Ollama's clients load a model."""
        raise NotImplementedError

    def check_together(self, limits: ServerLimits) -> None:
        self.check_logprobs()
        check_num_logprobs("top_logprobs", self.top_logprobs or 0, limits)

    @property
    def own_sampling(self) -> Mapping[str, Any]:
        return {k: v for k, v in (self.options or {}).items() if k != "num_ctx"}

    def request_options(self, text: TextFrontend) -> RequestOptions:
        del text
        num_ctx = (self.options or {}).get("num_ctx", 0)
        return RequestOptions(most_in_all=num_ctx if num_ctx > 0 else None)

    def immediate(self, head: AnswerHead) -> bytes | None:
        return loaded(head, self.shape) if self.is_empty else None

    def encoder(self, head: AnswerHead) -> StreamEncoder:
        return LineEncoder(head, self.shape, self.num_top_logprobs)

    def param_of(self, param: str | None) -> str | None:
        found = super().param_of(param)
        return "options" if found in SamplingParams.__dataclass_fields__ else found


class OllamaChatRequest(OllamaRequest):
    """A body of /api/chat."""

    prompt_field = "messages"

    messages = optional(ollama_messages, "The conversation so far.", default=())
    tools = optional(function_tools, "Functions that the answer may call.")

    @property
    def shape(self) -> AnswerShape:
        return chat_shape

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def prompts(self, text: TextFrontend) -> list[ChatPrompt]:
        last = [*self.messages][-1]
        is_continued = last["role"] == "assistant" and "tool_calls" not in last
        asked = AskedConversation(
            messages=self.messages,
            use=self.use,
            thinking=AskedThinking(effort=self.think),
            template_kwargs=continuing(is_continued),
        )
        return [asked.prompt(text)]


class OllamaPromptRequest(OllamaRequest):
    """A body of /api/generate."""

    prompt_field = "prompt"

    prompt = optional(_TEXT, "The text, of a user; without it nothing is generated.", default="")
    system = optional(_TEXT, "A text in front of it.", default="")
    raw = optional(Boolean(), "Continue the prompt as it is.", default=False)
    images = optional(prompt_images, "Images in front of it: files as base64.", default=())
    suffix = unsupported("filling in a middle", "")
    template = unsupported("a chat template of the request's own", "")
    context = unsupported("an earlier answer as tokens, in place of /api/chat's messages", [])
    width = unsupported("making images")
    height = unsupported("making images")
    steps = unsupported("making images")

    @property
    def shape(self) -> AnswerShape:
        return prompt_shape

    @property
    def is_empty(self) -> bool:
        return not (self.prompt or self.images)

    def check_together(self, limits: ServerLimits) -> None:
        super().check_together(limits)
        if self.raw and self.system:
            raise invalid_value("raw has no place for system; put it into the prompt", "system")
        if self.raw and self.images:
            raise invalid_value("raw has no place for images; leave raw out", "images")

    def prompts(self, text: TextFrontend) -> Sequence[AnyPrompt]:
        if self.raw or (text.prompts.template is None and not self.images):
            return ["\n\n".join(part for part in (self.system, self.prompt) if part)]
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = seen_content(self.images, self.prompt)
        asked = AskedConversation(
            messages=[*system, {"role": "user", "content": content}],
            use=None,
            thinking=AskedThinking(effort=self.think),
        )
        return [asked.prompt(text)]


class LineEncoder(BlockEncoder):
    """Its events are lines. `num_top_logprobs`: the number of likeliest tokens to show; None: no
    log probabilities."""

    def __init__(self, head: AnswerHead, shape: AnswerShape, num_top_logprobs: int | None) -> None:
        super().__init__(head)
        self._shape = shape
        self._num_top_logprobs = num_top_logprobs
        self._logprobs: list[Members] = []
        """Those of a whole answer."""

    def _events(self, output: CompletionOutput) -> Iterable[bytes]:
        held = [made for event in self._read(output) if (made := self._held(event)) is not None]
        logprobs = self._logprobs_of(output)
        if logprobs:
            held = held or [self._shape("", "", ())]
            held[-1]["logprobs"] = logprobs
        return [self._line({**each, "done": False}) for each in held]

    def silence(self) -> bytes:
        """A line without text, since clients read every line as an object."""
        return self._line({**self._shape("", "", ()), "done": False})

    def closing(self) -> bytes:
        return self._line({**self._shape("", "", ()), **self._end()})

    def failure(self, error: ApiError) -> bytes:
        return OLLAMA.error_body(error, self.head.request_id) + b"\n"

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        every = [output for request in outputs for output in request.outputs]
        self._logprobs = [each for output in every for each in self._logprobs_of(output)]
        return super().whole(outputs)

    def _whole_object(self) -> Members:
        blocks = self._reader.blocks
        calls = [block for block in blocks if block.kind == "tool_call"]
        held = self._shape(
            _text_of(blocks, "content"),
            _text_of(blocks, "reasoning"),
            [_call(number, block) for number, block in enumerate(calls)],
        )
        shown = {"logprobs": self._logprobs} if self._logprobs else {}
        return {**_about(self.head), **held, **shown, **self._end()}

    def _held(self, event: BlockEvent) -> Members | None:
        """What a line has of an event; None: there is none."""
        if event.kind != "text":
            return None
        match event.block.kind:
            case "tool_call":
                number = sum(each.kind == "tool_call" for each in self._reader.blocks) - 1
                return self._shape("", "", [_call(number, event.block)])
            case "reasoning":
                return self._shape("", event.text, ())
            case "content":
                return self._shape(event.text, "", ())

    def _logprobs_of(self, output: CompletionOutput) -> list[Members]:
        num_top = self._num_top_logprobs
        if num_top is None:
            return []
        entries = zip(output.token_ids, output.logprobs or (), strict=True)
        return [_logprob(token_id, entry, num_top) for token_id, entry in entries]

    def _end(self) -> Members:
        reason = None if self.ended is None else self.ended.finish_reason
        end = {"done": True, "done_reason": reason, **self._reader.mark}
        return {**end, **metrics(self.head)}

    def _line(self, members: Members) -> bytes:
        return _encode({**_about(self.head), **members}) + b"\n"


def loaded(head: AnswerHead, shape: AnswerShape) -> bytes:
    end = {"done": True, "done_reason": "load"}
    return _encode({**_about(head), **shape("", "", ()), **end})


def metrics(head: AnswerHead) -> Members:
    """Counts of tokens, and durations in nanoseconds, at least 1, since clients divide by them."""
    times, usage = head.times(), head.usage
    return {
        "total_duration": _ns(times.total_s),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _ns(times.prompt_s),
        "eval_count": usage.completion_tokens,
        "eval_duration": _ns(times.decode_s),
        **usage.kept_tokens,
    }


def time_of(seconds: float) -> str:
    """A time in seconds since 1970, in the format of Go's JSON."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _about(head: AnswerHead) -> Members:
    seconds = head.created if head.now is None else head.now()
    return {"model": head.model, "created_at": time_of(seconds)}


def _ns(seconds: float) -> int:
    return max(1, round(seconds * 1e9))


def _text_of(blocks: Sequence[Block], kind: str) -> str:
    return "".join(block.text for block in blocks if block.kind == kind)


def _call(number: int, block: Block) -> Members:
    function = {"index": number, "name": block.name, "arguments": block.arguments}
    return {"id": block.call_id, "function": function}


def _logprob(token_id: int, entry: LogprobEntry, num_top: int) -> Members:
    shown = _token(token_id, entry[token_id])
    if num_top:
        shown["top_logprobs"] = [_token(*found) for found in ranked(entry, num_top)]
    return shown


def _token(token_id: int, found: Logprob) -> Members:
    text = shown_token(token_id, found)
    raw = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": finite(found), "bytes": raw}


@field_type({"anyOf": [_TEXT.schema(), array_schema(_ONE_TEXT, high=MAX_CHOICES)]})
def input_texts(name: str, value: object) -> tuple[str, ...]:
    """A text, or a list of texts; with neither, Ollama's clients load a model."""
    items = cast(list[object], value) if isinstance(value, list) else [value]
    if len(items) > MAX_CHOICES:
        raise invalid_value(
            f"{name} has {len(items)} texts; at most {MAX_CHOICES} are allowed", name
        )
    if not all(isinstance(item, str) for item in items):
        raise refuse(name, cast(object, value), "a text, or a list of texts")
    texts = tuple([_TEXT.check(name, item) for item in items])
    if len(texts) > 1 and "" in texts:
        raise invalid_value(f"{name} has an empty text; leave it out", name)
    return () if texts == ("",) else texts


class EmbeddingBase(PooledRequest):
    """What both bodies have in common."""

    options = label(ollama_options, "Options of sampling change nothing here.")
    keep_alive = label(KEEP_ALIVE, KEEP_ALIVE_HELP)


class OllamaEmbedRequest(EmbeddingBase):
    """A body of /api/embed."""

    prompt_field = "input"

    input = optional(input_texts, "A text, or a list of texts.", default=())
    dimensions = optional(
        Integer(int(DIMENSIONS.low), int(DIMENSIONS.high)),
        "Keep only so many of the first values, at unit length.",
    )
    truncate = label(Boolean(), "A text beyond the context is always refused.")

    def immediate(self, head: AnswerHead) -> bytes | None:
        return None if self.texts else _encode({"model": head.model, "embeddings": []})

    def whole_answer(self, head: AnswerHead, outputs: Sequence[RequestOutput]) -> bytes:
        # One after the other, so that other threads can run between them.
        vectors = b",".join(_encode(values_of(embedding_bytes(each))) for each in outputs)
        fields: dict[str, Any] = {"model": head.model, **metrics(head)}
        del fields["eval_count"], fields["eval_duration"]
        return _encode(fields)[:-1] + b',"embeddings":[' + vectors + b"]}"


class OllamaEmbeddingRequest(EmbeddingBase):
    """A body of /api/embeddings."""

    prompt_field = "prompt"

    prompt = optional(_TEXT, "A text.", default="")

    @property
    def texts(self) -> Sequence[str]:
        return [self.prompt] if self.prompt else []

    def immediate(self, head: AnswerHead) -> bytes | None:
        del head
        return None if self.prompt else _encode({"embedding": []})

    def whole_answer(self, head: AnswerHead, outputs: Sequence[RequestOutput]) -> bytes:
        del head  # an embedding is all of the answer
        (output,) = outputs
        return _encode({"embedding": values_of(embedding_bytes(output))})


def _answers(name: str, held: dict[str, Schema]) -> AnswerSchema:
    begins = {"model": TEXT, "created_at": TEXT, "done": {"type": "boolean"}, "done_reason": TEXT}
    return AnswerSchema(name=name, schema=object_of({**begins, **held}))


OLLAMA_CHAT = GeneratingEndpoint(
    "ollama_chat",
    "/api/chat",
    "Answer a conversation, as Ollama does.",
    OllamaChatRequest,
    _answers("OllamaChat", {"message": object_of({"role": TEXT, "content": TEXT})}),
)

OLLAMA_GENERATE = GeneratingEndpoint(
    "ollama_generate",
    "/api/generate",
    "Answer a prompt, as Ollama does.",
    OllamaPromptRequest,
    _answers("OllamaGenerate", {"response": TEXT}),
)

OLLAMA_EMBED = GeneratingEndpoint(
    "ollama_embed",
    "/api/embed",
    "Turn texts into vectors, as Ollama does.",
    OllamaEmbedRequest,
    AnswerSchema(
        name="OllamaEmbed", schema=object_of({"model": TEXT, "embeddings": list_of(_NUMBERS)})
    ),
    can_stream=False,
)
OLLAMA_EMBEDDINGS = GeneratingEndpoint(
    "ollama_embeddings",
    "/api/embeddings",
    "Turn a text into a vector: the older form.",
    OllamaEmbeddingRequest,
    AnswerSchema(name="OllamaEmbeddings", schema=object_of({"embedding": _NUMBERS})),
    can_stream=False,
)
