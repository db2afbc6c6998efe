"""/v1/chat/completions: a conversation that is answered.

Owns its body, its prompt, and the shapes of its choices. Knows no HTTP. Invariant: there is one
prompt, of which the answer tells beside its choices.
"""

from typing import Any

from cadenza.frontend.text_frontend import PreparedRequest, TextFrontend
from cadenza.outputs import CompletionOutput, Logprob, RequestOutput
from cadenza.request import SamplingParams
from cadenza.server.endpoints.generating import (
    GENERATION_STATUSES,
    PROMPT_SCHEMA,
    GeneratingEndpoint,
    GenerationRequest,
    LogprobEntry,
    answer_schema,
    choices_schema,
    finite,
    has_something,
    shown_prompt,
    shown_token,
    token_name,
)
from cadenza.server.errors import invalid_value
from cadenza.server.openapi import TEXT, AnswerSchema, ApiRoute, object_of
from cadenza.server.schemas.body import label, optional, required, unsupported
from cadenza.server.schemas.field_types import Boolean, Unsupported, or_null
from cadenza.server.schemas.generation import LOGPROBS, sampling_type
from cadenza.server.schemas.messages import ConversationBody, Messages
from cadenza.server.sse import AnswerEncoder, AnswerHead, ChoiceObject, Usage

NO_THINKING = {"enable_thinking": False}


class ChatRequest(ConversationBody, GenerationRequest):
    """A body of /v1/chat/completions."""

    prompt_field = "messages"

    messages = required(Messages(), "The conversation so far.")
    max_completion_tokens = optional(sampling_type("max_tokens"), "Another name of max_tokens.")
    logprobs = optional(Boolean(), "Log probabilities of each token.", default=False)
    top_logprobs = optional(LOGPROBS, "And of this many likeliest; with logprobs.")
    reasoning_effort = optional(
        Unsupported("an effort of reasoning", ("none",)),
        "none: no thinking, where the chat template has a switch for it.",
    )
    parallel_tool_calls = label(Boolean(), "Changes nothing: no tool is called.")

    tools = unsupported("calling tools", [])
    tool_choice = unsupported("calling tools", "none", "auto")
    functions = unsupported("calling functions", [])
    function_call = unsupported("calling functions", "none", "auto")
    web_search_options = unsupported("searching the web")
    include_reasoning = unsupported("leaving reasoning out", True)
    verbosity = unsupported("a choice of verbosity", "medium")
    modalities = unsupported("another modality than text", ["text"])
    audio = unsupported("audio")
    media_io_kwargs = unsupported("another modality than text", {})
    mm_processor_kwargs = unsupported("another modality than text", {})
    moderation = unsupported("moderation")
    prediction = unsupported("a predicted output")
    chat_template = unsupported("a chat template of the request's own", "")
    documents = unsupported("documents in the prompt", [])
    echo = unsupported("beginning the answer with the last message", False)
    add_special_tokens = unsupported("special tokens around a conversation", False)
    return_prompt_text = unsupported("the prompt's text in the answer", False)

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_fields(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise invalid_value("top_logprobs needs logprobs; set it to true, too", "top_logprobs")
        asked = (self.max_tokens, self.max_completion_tokens)
        if None not in asked and asked[0] != asked[1]:
            raise invalid_value(
                f"max_tokens is {asked[0]} and max_completion_tokens {asked[1]}; give one of them",
                "max_completion_tokens",
            )
        self.template_kwargs()

    def sampling(self, text: TextFrontend) -> SamplingParams:
        most = self.max_completion_tokens
        most = self.max_tokens if most is None else most
        return text.default_params(**{**self.sampling_values(), "max_tokens": most})

    def prepare(
        self, text: TextFrontend, params: SamplingParams, max_num_tokens: int | None
    ) -> list[PreparedRequest]:
        # `reasoning_effort: "none"` is one more switch, where the template has it.
        has_switch = NO_THINKING.keys() <= text.chat_template_options
        switches = NO_THINKING if self.reasoning_effort == "none" and has_switch else {}
        prepared = text.prepare_chat(
            self.messages,
            params,
            template_kwargs={**switches, **self.template_kwargs()},
            max_num_tokens=max_num_tokens,
        )
        return [prepared]

    def encoder(self, head: AnswerHead, usage: Usage, text: TextFrontend) -> AnswerEncoder:
        del text  # its prompt is not part of the answer
        return self.chunk_encoder(head, usage, ChatChoices(self))


class ChatChoices:
    """Choices of a chat completion."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        # Read for every token.
        self._num_top_logprobs = request.num_top_logprobs
        self._shows_tokens = request.shows_tokens
        self._shows_ids = request.return_token_ids
        self._begun: set[int] = set()

    def opening(self, index: int) -> ChoiceObject | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(
        self, index: int, output: CompletionOutput, request: RequestOutput
    ) -> ChoiceObject | None:
        del request  # `about_prompt` tells of it
        is_first = index not in self._begun
        if not is_first and not has_something(output, self._shows_tokens):
            return None
        self._begun.add(index)
        choice: ChoiceObject = {
            "index": index,
            "delta": {"content": output.text} if output.text else {},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return choice | ({"token_ids": output.token_ids} if self._shows_ids else {})

    def whole(self, index: int, output: CompletionOutput, request: RequestOutput) -> ChoiceObject:
        del request  # as in `part`
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if self._shows_ids else None,
        }

    def about_prompt(self, request: RequestOutput | None) -> dict[str, Any] | None:
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

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if self._num_top_logprobs is None:
            return None
        entries = zip(output.token_ids, output.logprobs or (), strict=True)
        content = [_chat_logprob(token_id, entry, self._request) for token_id, entry in entries]
        return {"content": content, "refusal": None}


def _chat_logprob(token_id: int, entry: LogprobEntry, request: ChatRequest) -> dict[str, Any]:
    top = sorted(
        (found for found in entry.items() if found[1].rank is not None),
        key=lambda f: f[1].rank or 0,
    )
    return {
        **_described(token_id, entry[token_id], request),
        "top_logprobs": [
            _described(*found, request) for found in top[: request.num_top_logprobs or 0]
        ],
    }


def _described(token_id: int, found: Logprob, request: ChatRequest) -> dict[str, Any]:
    text = shown_token(token_id, found)
    # A token that is part of a character has no text of its own, and so no bytes of it.
    raw = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    token = token_name(token_id) if request.return_tokens_as_token_ids else text
    return {"token": token, "logprob": finite(found), "bytes": raw}


_MESSAGE = object_of({"role": {"type": "string", "enum": ["assistant"]}, "content": or_null(TEXT)})

CHAT = GeneratingEndpoint(
    route=ApiRoute(
        name="chat",
        method="POST",
        path="/v1/chat/completions",
        policy="key",
        summary="Answer a conversation.",
        answers=AnswerSchema(
            name="ChatCompletion",
            schema=answer_schema(
                "chat.completion", choices_schema({"message": _MESSAGE}), PROMPT_SCHEMA
            ),
        ),
        statuses=GENERATION_STATUSES,
        body=ChatRequest,
        can_stream=True,
    ),
    request_type=ChatRequest,
)
