"""/api/chat and /api/generate: answers as Ollama's API gives them.

Invariant: a conversation has the same tokens as by any other API; Ollama's own defaults of sampling
are not used.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from cadenza.frontend.answers import ToolUse
from cadenza.frontend.text_frontend import PreparedRequest, TextFrontend
from cadenza.request import SamplingParams
from cadenza.server.endpoints.conversation import AskedConversation, continuing
from cadenza.server.endpoints.generating import (
    CallRequest,
    GeneratingEndpoint,
    check_num_logprobs,
)
from cadenza.server.endpoints.ollama_answer import (
    AnswerShape,
    LineEncoder,
    chat_shape,
    loaded,
    prompt_shape,
)
from cadenza.server.errors import invalid_value
from cadenza.server.limits import ServerLimits
from cadenza.server.openapi import TEXT, AnswerSchema, object_of
from cadenza.server.schemas.body import label, optional, unsupported
from cadenza.server.schemas.field_types import AnyJson, Boolean, Schema, String
from cadenza.server.schemas.generation import LOGPROBS, MAX_PROMPT_CHARS
from cadenza.server.schemas.ollama import no_images, ollama_messages, ollama_options, think_type
from cadenza.server.schemas.structured import ollama_format
from cadenza.server.schemas.thinking import AskedThinking
from cadenza.server.schemas.tools import function_tools, tool_use
from cadenza.server.sse import AnswerHead, StreamEncoder, Usage

KEEP_ALIVE = AnyJson(max_chars=64)
KEEP_ALIVE_HELP = "A hint; the model stays loaded."

_TEXT = String(max_chars=MAX_PROMPT_CHARS)


class OllamaRequest(CallRequest):
    """What both bodies have in common."""

    param_names: ClassVar[Mapping[str, str]] = {"thinking_token_budget": "think"}

    stream = optional(Boolean(), "Send the answer as it comes, in lines.", default=True)
    options = optional(ollama_options, "Sampling, by Ollama's names.")
    format = optional(ollama_format, 'The form of the answer: "json", or a JSON Schema.')
    think = optional(think_type, "Whether the model thinks, or how much.")
    logprobs = optional(Boolean(), "Log probabilities of each token.", default=False)
    top_logprobs = optional(LOGPROBS, "And of this many likeliest; with logprobs.")
    keep_alive = label(KEEP_ALIVE, KEEP_ALIVE_HELP)
    truncate = label(Boolean(), "A prompt beyond the context is always refused.")
    shift = label(Boolean(), "An answer always ends where the context does.")

    @property
    def form_field(self) -> str | None:
        return None if self.format is None else "format"

    @property
    def shape(self) -> AnswerShape:
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        """Whether there is no prompt: to Ollama's clients that loads a model."""
        raise NotImplementedError

    def check_together(self, limits: ServerLimits) -> None:
        if self.top_logprobs and not self.logprobs:
            raise invalid_value("top_logprobs needs logprobs; set it to true, too", "top_logprobs")
        check_num_logprobs("top_logprobs", self.top_logprobs or 0, limits)

    def sampling(self, text: TextFrontend) -> SamplingParams:
        changes: dict[str, Any] = {"max_tokens": None, **(self.options or {})}
        if self.format is not None:
            changes["structured"] = self.format
        if self.logprobs:
            changes["logprobs"] = self.top_logprobs or 0
        return text.default_params(**changes)

    def immediate(self, head: AnswerHead) -> bytes | None:
        return loaded(head, self.shape) if self.is_empty else None

    def encoder(self, head: AnswerHead, usage: Usage, text: TextFrontend) -> StreamEncoder:
        del text  # the answer does not contain the prompt's text
        num_top_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return LineEncoder(head, usage, self.shape, num_top_logprobs)

    def stream_encoder(
        self, head: AnswerHead, usage: Usage, text: TextFrontend
    ) -> StreamEncoder | None:
        return self.encoder(head, usage, text) if self.stream else None

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

    @cached_property
    def use(self) -> ToolUse | None:
        return tool_use(self.tools, None, is_parallel=True)

    def prepare(
        self, text: TextFrontend, params: SamplingParams, max_num_tokens: int | None
    ) -> list[PreparedRequest]:
        last = [*self.messages][-1]
        is_continued = last["role"] == "assistant" and "tool_calls" not in last
        asked = AskedConversation(
            messages=self.messages,
            use=self.use,
            thinking=AskedThinking(effort=self.think),
            template_kwargs=continuing(is_continued),
        )
        return [asked.prepare(text, params, max_num_tokens)]


class OllamaPromptRequest(OllamaRequest):
    """A body of /api/generate."""

    prompt_field = "prompt"

    prompt = optional(_TEXT, "The text, of a user; without it nothing is generated.", default="")
    system = optional(_TEXT, "A text in front of it.", default="")
    raw = optional(Boolean(), "Continue the prompt as it is.", default=False)
    images = label(no_images, "Not built: images.")
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
        return not self.prompt

    def check_together(self, limits: ServerLimits) -> None:
        super().check_together(limits)
        if self.raw and self.system:
            raise invalid_value("raw has no place for system; put it into the prompt", "system")

    def prepare(
        self, text: TextFrontend, params: SamplingParams, max_num_tokens: int | None
    ) -> list[PreparedRequest]:
        if self.raw or not text.has_chat_template:
            prompt = "\n\n".join(part for part in (self.system, self.prompt) if part)
            return [text.prepare(prompt, params, max_num_tokens=max_num_tokens)]
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = AskedConversation(
            messages=[*system, {"role": "user", "content": self.prompt}],
            use=None,
            thinking=AskedThinking(effort=self.think),
        )
        return [asked.prepare(text, params, max_num_tokens)]


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
