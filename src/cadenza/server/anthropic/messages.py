"""/v1/messages: answers a conversation of content blocks, as Anthropic's Messages API does.
Invariant: the tokens that are counted are those that would be computed."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from cadenza.frontend.answers import ToolUse
from cadenza.frontend.prepared_request import ChatPrompt, RequestOptions
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import PartKind
from cadenza.server.anthropic.blocks import (
    TEXT_BLOCKS,
    AskedChoice,
    MessageMetadata,
    OutputConfig,
    ThinkingOptions,
    block_messages,
    json_form,
    message_tool_choice,
    message_tools,
    no_context_edits,
    no_thread,
    system_text,
)
from cadenza.server.calls.conversation import AskedConversation, continuing, with_system
from cadenza.server.calls.endpoint import (
    GENERATION_STATUSES,
    AnswerHead,
    Block,
    BlockEncoder,
    BlockEvent,
    GeneratingEndpoint,
    GenerationRequest,
    StreamEncoder,
    event_bytes,
)
from cadenza.server.calls.record import Usage
from cadenza.server.errors import ApiError, invalid_value
from cadenza.server.fields.body import ObjectOf, label, optional, required, unsupported
from cadenza.server.fields.messages import chat_messages, template_variables
from cadenza.server.fields.sampling import LABEL, SamplingBody, SamplingField
from cadenza.server.fields.thinking import AskedThinking, ThinkingSwitches
from cadenza.server.fields.tools import tool_use
from cadenza.server.fields.types import AnyJson, or_null
from cadenza.server.http.exchange import Dialect
from cadenza.server.limits import ServerLimits
from cadenza.server.openapi import COUNT, TEXT, AnswerSchema, list_of, object_of, one_of
from cadenza.structured import StructuredOutput

ANTHROPIC_VERSIONS = ("2023-06-01", "2026-10-21")
"""What the newer one removes from requests is still accepted."""

_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OVERLOADED = 529


def _error_object(error: ApiError, request_id: str) -> dict[str, Any]:
    """The answer, or a stream's last event."""
    described: dict[str, Any] = {"type": _ERROR_TYPES[error.status], "message": error.with_field}
    if error.details is not None:
        described["details"] = error.details
    return {"type": "error", "error": described, "request_id": request_id}


def _check_version(version: bytes) -> None:
    text = version.decode("latin-1").strip()
    if text not in ANTHROPIC_VERSIONS:
        known = ", ".join(ANTHROPIC_VERSIONS)
        raise invalid_value(f"anthropic-version is {text[:32]!r}; there are {known}", None)


ANTHROPIC = Dialect(
    id_headers=("x-request-id", "request-id"),
    version_header=b"anthropic-version",
    status_of=lambda error: _OVERLOADED if error.status == 503 else error.status,
    error_body=lambda error, request_id: msgspec.json.encode(_error_object(error, request_id)),
    check_version=_check_version,
    error_schema="MessageError",
)

_ANNOTATION = AnyJson(max_chars=16 << 10)
_AUTO = AskedChoice("auto", is_parallel=True)
IN_CONTEXT = RequestOptions(most_in_all=sys.maxsize, counts_prompt=True)
"""`max_tokens` may exceed the context, then meaning its rest; clients shorten a conversation by its
number of tokens."""


class MessagesBody(ThinkingSwitches):
    """What a message and the count of its tokens have in common."""

    messages = required(block_messages, "The conversation so far.")
    system = optional(TEXT_BLOCKS, "A text in front of the conversation.")
    tools = optional(message_tools, "Functions that the answer may call.")
    tool_choice = optional(message_tool_choice, "Which of them.")
    thinking = optional(ObjectOf(ThinkingOptions), "Whether the model thinks; without it: no.")
    output_config = optional(ObjectOf(OutputConfig), "The form of the answer.")
    output_format = optional(json_form, "Older name of output_config.format.")
    chat_template_kwargs = template_variables()

    cache_control = label(_ANNOTATION, "A hint; prefixes are cached without it.")
    diagnostics = label(_ANNOTATION, "There are none.")
    user_profile_id = label(LABEL, "A label of who asks.")
    workspace_id = label(LABEL, "A label of who asks.")
    context_management = label(no_context_edits, "Only what edits nothing.")

    mcp_servers = unsupported("servers of tools", [])
    container = unsupported("containers")
    speed = unsupported("a choice of speed", "standard")
    inference_geo = unsupported("a choice of place", "global")
    compaction = unsupported("compaction")
    billing_policy = unsupported(
        "a choice of who is billed", {"type": "billing_policy", "bill_to": "self"}
    )

    @cached_property
    def use(self) -> ToolUse | None:
        """The tools that the answer may call. Raises ApiError (400)."""
        asked = self.tool_choice or _AUTO
        return tool_use(self.tools, asked.choice, is_parallel=asked.is_parallel)

    def own_thinking(self) -> dict[str, AskedThinking]:
        own: dict[str, AskedThinking] = {}
        if self.output_config is not None:
            own["output_config"] = AskedThinking(effort=self.output_config.effort)
        if self.thinking is not None:
            own["thinking"] = AskedThinking(
                is_on=self.thinking.type != "disabled", max_tokens=self.thinking.budget_tokens
            )
        return own

    @property
    def form(self) -> StructuredOutput | None:
        asked = None if self.output_config is None else self.output_config.format
        return asked or self.output_format

    def check_conversation(self) -> None:
        """Raises ApiError (400) where the fields do not go together."""
        _ = self.use
        if self.output_format is not None and self.form is not self.output_format:
            raise invalid_value(
                "output_format and output_config.format both ask for a form; give one",
                "output_format",
            )
        thinking = self.thinking
        if thinking is not None and thinking.type is None:
            raise invalid_value("thinking.type is missing; it is needed here", "thinking")
        if thinking is not None and thinking.budget_tokens and thinking.type != "enabled":
            raise invalid_value("thinking.budget_tokens goes with the type enabled", "thinking")
        _ = self.asked
        last = self.messages[-1]
        if last["role"] == "assistant" and (not last["content"] or len(last.keys()) > 2):
            raise invalid_value(
                "the last message is the assistant's, which the answer continues, so that it must "
                "be text alone; end with a user's message",
                "messages",
            )

    def conversation(self) -> AskedConversation:
        """Raises ApiError (400)."""
        system = None if self.system is None else system_text(self.system)
        messages = chat_messages.check("messages", with_system(system, [*self.messages]))
        thinks = self.asked.is_on
        effort = self.asked.effort or ("medium" if thinks else "none")
        return AskedConversation(
            messages=messages,
            use=self.use,
            thinking=replace(
                self.asked,
                # The API's own field `thinking` sets only the effort.
                is_on=self.asked_thinking({}).is_on,
                effort="none" if thinks is False else effort,
            ),
            variables=self.chat_template_kwargs,
            template_kwargs=continuing(messages[-1]["role"] == "assistant"),
            is_off_unasked=thinks is None and self.asked.effort is None,
        )


class MessageRequest(MessagesBody, SamplingBody, GenerationRequest):
    """A body of /v1/messages."""

    prompt_field = "messages"
    param_names: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "thinking_token_budget": "thinking",
    }

    max_tokens = SamplingField(
        "Most new tokens; -1: what is left of the context.", is_required=True
    )
    stop_sequences = SamplingField(sets="stop")
    metadata = optional(ObjectOf(MessageMetadata), "Labels of the request.")
    service_tier = label(LABEL, "A label: there is one tier.")
    fallbacks = unsupported("falling back to another model", [], "default")
    fallback_credit_token = unsupported("falling back to another model")
    thread = label(no_thread, "Not built: a conversation that the server holds.")

    @property
    def form_field(self) -> str | None:
        if self.form is None:
            return None
        return "output_config" if self.output_format is None else "output_format"

    @property
    def user_label(self) -> str | None:
        return None if self.metadata is None else self.metadata.user_id

    def check_together(self, limits: ServerLimits) -> None:
        del limits  # there are no log probabilities
        self.check_conversation()

    def request_options(self, text: TextFrontend) -> RequestOptions:
        del text
        return IN_CONTEXT

    def prompts(self, text: TextFrontend) -> list[ChatPrompt]:
        return [self.conversation().prompt(text)]

    def encoder(self, head: AnswerHead) -> StreamEncoder:
        return MessageEncoder(head, self)


MESSAGE_PREFIX = "msg_"

_TEXT_BLOCKS: dict[PartKind, dict[str, Any]] = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
"""Blocks without their texts. Thinking is plain text, which needs no signature."""
_DELTAS: dict[PartKind, tuple[str, str]] = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "tool_call": ("input_json_delta", "partial_json"),
}
"""The type of a delta, and the member that has its text."""


class MessageEncoder(BlockEncoder):
    """A message's object and events; a stream's blocks, joined, are those of the whole message."""

    def __init__(self, head: AnswerHead, request: MessageRequest) -> None:
        super().__init__(head)
        self._request = request
        display = None if request.thinking is None else request.thinking.display
        self._shows_thinking = display != "omitted"

    def opening(self) -> bytes:
        started = event_bytes("message_start", {"message": self._object([])})
        return started + event_bytes("ping", {})

    def closing(self) -> bytes:
        usage = usage_of_message(self.head.usage)
        delta = {"delta": self._stop(), "usage": usage, **self._reader.mark}
        return event_bytes("message_delta", delta) + event_bytes("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        body = msgspec.json.encode(_error_object(error, self.head.request_id))
        return b"event: error\ndata: " + body + b"\n\n"

    def _whole_object(self) -> dict[str, Any]:
        return self._object([self._block(block) for block in self._reader.blocks])

    def _stop(self) -> dict[str, str | None]:
        output = self.ended
        if output is None:
            return {"stop_reason": None, "stop_sequence": None}
        match output.finish_reason:
            case "stop" if output.stop_reason in (self._request.stop_sequences or ()):
                return {"stop_reason": "stop_sequence", "stop_sequence": str(output.stop_reason)}
            case "stop":
                has_calls = any(block.kind == "tool_call" for block in self._reader.blocks)
                reason = "tool_use" if has_calls else "end_turn"
            case "length":
                most = self._request.max_tokens
                is_full = most is None or output.num_generated_tokens < most
                reason = "model_context_window_exceeded" if is_full else "max_tokens"
            case _:  # it was cancelled
                reason = "pause_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _object(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": MESSAGE_PREFIX + self.head.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": content,
            **self._stop(),
            "usage": usage_of_message(self.head.usage),
            **self._reader.mark,
        }

    def _block(self, block: Block) -> dict[str, Any]:
        started = _started(block)
        if block.kind == "tool_call":
            return {**started, "input": block.arguments}
        is_shown = block.kind != "reasoning" or self._shows_thinking
        return {**started, started["type"]: block.text if is_shown else ""}

    def _events_of(self, event: BlockEvent) -> Iterator[bytes]:
        block, index = event.block, {"index": event.block.index}
        match event.kind:
            case "begin":
                started = {**index, "content_block": _started(block)}
                yield event_bytes("content_block_start", started)
            case "text" if block.kind != "reasoning" or self._shows_thinking:
                kind, member = _DELTAS[block.kind]
                delta = {**index, "delta": {"type": kind, member: event.text}}
                yield event_bytes("content_block_delta", delta)
            case "text":
                return
            case "end":
                yield event_bytes("content_block_stop", index)


def _started(block: Block) -> dict[str, Any]:
    if block.kind == "tool_call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    return {**_TEXT_BLOCKS[block.kind]}


def usage_of_message(usage: Usage) -> dict[str, Any]:
    """The usage of a message, whose input tokens are those that were computed."""
    num_cached = sum(usage.cached.values())
    details = {**usage.image_tokens, **usage.kept_tokens}
    return {
        "input_tokens": usage.prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.completion_tokens,
        **({"input_tokens_details": details} if details else {}),
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        **usage.cache_miss,
    }


MESSAGE_STATUSES = tuple(_OVERLOADED if status == 503 else status for status in GENERATION_STATUSES)
_USAGE = object_of(
    {"input_tokens": COUNT, "output_tokens": COUNT, "cache_read_input_tokens": COUNT}
)

_ANSWER = object_of(
    {
        "id": TEXT,
        "type": one_of("message"),
        "role": one_of("assistant"),
        "model": TEXT,
        "content": list_of({"type": "object"}),
        "stop_reason": or_null(TEXT),
        "stop_sequence": or_null(TEXT),
        "usage": _USAGE,
    }
)

MESSAGES = GeneratingEndpoint(
    "messages",
    "/v1/messages",
    "Answer a conversation of content blocks.",
    MessageRequest,
    AnswerSchema(name="Message", schema=_ANSWER),
    statuses=MESSAGE_STATUSES,
)
