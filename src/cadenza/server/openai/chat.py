"""/v1/chat/completions: answers a conversation. Invariant: there is one prompt, whose fields are
next to the choices."""

from collections.abc import Sequence
from typing import Any

from cadenza.frontend.prepared_request import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import CompletionOutput, Logprob, OutputPart, PartKind, RequestOutput
from cadenza.server.calls.conversation import AskedConversation, new_call_id
from cadenza.server.calls.endpoint import (
    AnswerHead,
    GeneratingEndpoint,
    LogprobEntry,
    PromptInfo,
    StreamEncoder,
    finite,
    ranked,
    shown_token,
    token_name,
)
from cadenza.server.fields.body import optional, required, unsupported
from cadenza.server.fields.messages import ConversationBody, chat_messages, predicted_content
from cadenza.server.fields.sampling import TopLogprobsBody
from cadenza.server.fields.thinking import (
    BUDGET,
    BUDGET_HELP,
    VERBOSITY,
    VERBOSITY_HELP,
    ThinkingSwitches,
)
from cadenza.server.fields.tools import chat_tool_choice, chat_tools, is_custom, text_of_input
from cadenza.server.fields.types import Boolean, or_null
from cadenza.server.openai.choices import (
    PROMPT_SCHEMA,
    ChoiceObject,
    ChoicesRequest,
    ChunkEncoder,
    choices_answer,
    shown_prompt,
)
from cadenza.server.openapi import TEXT, object_of, one_of


class ChatRequest(ConversationBody, ThinkingSwitches, TopLogprobsBody, ChoicesRequest):
    """A body of /v1/chat/completions."""

    prompt_field = "messages"

    messages = required(chat_messages, "The conversation so far.")
    thinking_token_budget = optional(BUDGET, BUDGET_HELP)
    verbosity = optional(VERBOSITY, VERBOSITY_HELP)
    tools = optional(chat_tools, "Functions and custom tools that the answer may call.")
    tool_choice = optional(
        chat_tool_choice, "none; auto: the model decides; required; or a function that is called."
    )
    parallel_tool_calls = optional(Boolean(), "Several calls in an answer.", default=True)
    prediction = optional(
        predicted_content, "A text that much of the answer repeats; it comes sooner, unchanged."
    )

    functions = unsupported("calling functions", [])
    function_call = unsupported("calling functions", "none", "auto")
    web_search_options = unsupported("searching the web")
    include_reasoning = unsupported("leaving reasoning out", True)
    modalities = unsupported("another modality than text", ["text"])
    audio = unsupported("audio")
    media_io_kwargs = unsupported("another modality than text", {})
    mm_processor_kwargs = unsupported("another modality than text", {})
    moderation = unsupported("moderation")
    chat_template = unsupported("a chat template of the request's own", "")
    documents = unsupported("documents in the prompt", [])
    echo = unsupported("beginning the answer with the last message", False)
    add_special_tokens = unsupported("special tokens around a conversation", False)
    return_prompt_text = unsupported("the prompt's text in the answer", False)

    def check_fields(self) -> None:
        self.check_logprobs()
        _ = self.template_kwargs(), self.asked, self.use

    def prompts(self, text: TextFrontend) -> list[ChatPrompt]:
        asked = AskedConversation(
            messages=self.messages,
            use=self.use,
            thinking=self.asked,
            verbosity=self.verbosity,
            variables=self.chat_template_kwargs,
            template_kwargs=self.template_kwargs(),
        )
        return [asked.prompt(text)]

    def param_of(self, param: str | None) -> str | None:
        if param == "thinking_token_budget" and self.thinking_token_budget is None:
            return self.bound_field() or "reasoning_effort"
        return super().param_of(param)

    def encoder(self, head: AnswerHead) -> StreamEncoder:
        return ChatEncoder(head, self)


class ChatEncoder(ChunkEncoder):
    """Choices of a chat completion."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, head: AnswerHead, request: ChatRequest) -> None:
        super().__init__(head, request)
        self._request = request
        self._custom = {tool.name for tool in request.tools or () if is_custom(tool)}
        self._num_calls: dict[int, int] = {}

    def begin(self, index: int) -> ChoiceObject | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(
        self, index: int, output: CompletionOutput, request: PromptInfo
    ) -> ChoiceObject | None:
        del request  # `about_prompt` has its fields
        if output.parts is not None:
            delta = self._delta(index, output.parts)
        else:
            delta = {"content": output.text} if output.text else {}
        if not self.shows(index, delta, output):
            return None
        choice: ChoiceObject = {
            "index": index,
            "delta": delta,
            "logprobs": None if self._num_top_logprobs is None else self._logprobs(output),
            "finish_reason": _finish_reason(output, has_calls=index in self._num_calls),
            "stop_reason": output.stop_reason,
        }
        if self._shows_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _delta(self, index: int, parts: Sequence[OutputPart]) -> dict[str, Any]:
        delta: dict[str, Any] = {**_joined_parts(parts)}
        calls = [self._call(part) for part in parts if part.name is not None]
        if calls:
            first = self._num_calls.get(index, 0)
            self._num_calls[index] = first + len(calls)
            numbered = enumerate(calls, first)
            delta["tool_calls"] = [{"index": number, **call} for number, call in numbered]
        return delta

    def whole_choice(
        self, index: int, output: CompletionOutput, request: RequestOutput
    ) -> ChoiceObject:
        del request  # as in `part`
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        calls = [self._call(part) for part in output.parts or () if part.name is not None]
        if output.parts is not None:
            message |= {"content": None if calls else "", **_joined_parts(output.parts)}
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": None if self._num_top_logprobs is None else self._logprobs(output),
            "finish_reason": _finish_reason(output, has_calls=bool(calls)),
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if self._shows_ids else None,
        }

    def _call(self, part: OutputPart) -> dict[str, Any]:
        if part.name in self._custom:
            custom = {"name": part.name, "input": text_of_input(part.text)}
            return {"id": new_call_id(), "type": "custom", "custom": custom}
        function = {"name": part.name, "arguments": part.text}
        return {"id": new_call_id(), "type": "function", "function": function}

    def about_prompt(self, request: PromptInfo | None) -> dict[str, Any] | None:
        found: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": None}
        if request is None:
            return found
        if self._request.prompt_logprobs is not None:
            if len(request.prompt_logprobs or ()) < len(request.prompt_token_ids):
                return None
            found["prompt_logprobs"] = shown_prompt(request)
        if self._shows_ids:
            found["prompt_token_ids"] = request.prompt_token_ids
        return found

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any]:
        entries = zip(output.token_ids, output.logprobs or (), strict=True)
        content = [_chat_logprob(token_id, entry, self._request) for token_id, entry in entries]
        return {"content": content, "refusal": None}


PART_FIELDS: dict[PartKind, tuple[str, ...]] = {
    "content": ("content",),
    "reasoning": ("reasoning", "reasoning_content"),
    "tool_call": (),
}
"""The fields of a message and of a delta, for each kind of part; clients read either name."""


def _joined_parts(parts: Sequence[OutputPart]) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in parts:
        if part.text:
            for name in PART_FIELDS[part.kind]:
                found[name] = found.get(name, "") + part.text
    return found


def _finish_reason(output: CompletionOutput, *, has_calls: bool) -> str | None:
    is_stop = output.finish_reason == "stop"
    return "tool_calls" if is_stop and has_calls else output.finish_reason


def _chat_logprob(token_id: int, entry: LogprobEntry, request: ChatRequest) -> dict[str, Any]:
    likeliest = ranked(entry, request.num_top_logprobs or 0)
    top = [_described(*found, request) for found in likeliest]
    return {**_described(token_id, entry[token_id], request), "top_logprobs": top}


def _described(token_id: int, found: Logprob, request: ChatRequest) -> dict[str, Any]:
    text = shown_token(token_id, found)
    # A token that is part of a character has no text of its own.
    own = None if found.token_bytes is None else list(found.token_bytes)
    raw = own if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    token = token_name(token_id) if request.return_tokens_as_token_ids else text
    return {"token": token, "logprob": finite(found), "bytes": raw}


_MESSAGE = object_of({"role": one_of("assistant"), "content": or_null(TEXT)})

CHAT = GeneratingEndpoint(
    "chat",
    "/v1/chat/completions",
    "Answer a conversation.",
    ChatRequest,
    choices_answer("ChatCompletion", "chat.completion", {"message": _MESSAGE}, PROMPT_SCHEMA),
)
