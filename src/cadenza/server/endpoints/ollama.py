"""/api/chat and /api/generate: answers as Ollama's API gives them.

Owns their bodies. Knows no HTTP. Invariant: a conversation has the same tokens as by any other API;
Ollama's own defaults of sampling are not used.
"""

from typing import Any, ClassVar

from cadenza.frontend.answers import ToolUse
from cadenza.frontend.text_frontend import PreparedRequest, TextFrontend
from cadenza.request import SamplingParams
from cadenza.server.endpoints.conversation import AskedConversation
from cadenza.server.endpoints.generating import (
    GENERATION_STATUSES,
    CallRequest,
    GeneratingEndpoint,
)
from cadenza.server.endpoints.ollama_answer import (
    AnswerShape,
    ChatShape,
    LineEncoder,
    PromptShape,
    loaded,
)
from cadenza.server.errors import invalid_value
from cadenza.server.limits import ServerLimits
from cadenza.server.openapi import TEXT, AnswerSchema, ApiRoute, object_of
from cadenza.server.schemas.body import label, optional, unsupported
from cadenza.server.schemas.field_types import AnyJson, Boolean, Schema, String
from cadenza.server.schemas.generation import LOGPROBS
from cadenza.server.schemas.ollama import (
    NoImages,
    OllamaMessages,
    OllamaOptions,
    Think,
)
from cadenza.server.schemas.prompts import MAX_PROMPT_CHARS
from cadenza.server.schemas.structured import OllamaFormat
from cadenza.server.schemas.tools import Tools, has_constrained_calls, tool_use
from cadenza.server.sse import AnswerHead, StreamEncoder, Usage

KEEP_ALIVE = AnyJson(max_chars=64)
KEEP_ALIVE_HELP = "A hint; the model stays loaded."

_TEXT = String(max_chars=MAX_PROMPT_CHARS)


class OllamaRequest(CallRequest):
    """What both bodies have in common."""

    shape: ClassVar[AnswerShape]

    stream = optional(Boolean(), "Send the answer as it comes, in lines.", default=True)
    options = optional(OllamaOptions(), "Sampling, by Ollama's names.")
    format = optional(OllamaFormat(), 'The form of the answer: "json", or a JSON Schema.')
    think = optional(Think(), "Whether the model thinks, or how much.")
    logprobs = optional(Boolean(), "Log probabilities of each token.", default=False)
    top_logprobs = optional(LOGPROBS, "And of this many likeliest; with logprobs.")
    keep_alive = label(KEEP_ALIVE, KEEP_ALIVE_HELP)
    truncate = label(Boolean(), "A prompt beyond the context is always refused.")
    shift = label(Boolean(), "An answer always ends where the context does.")

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def has_form(self) -> bool:
        return self.format is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is no prompt: to Ollama's clients that loads a model."""
        raise NotImplementedError

    def check_together(self, limits: ServerLimits) -> None:
        if self.top_logprobs and not self.logprobs:
            raise invalid_value("top_logprobs needs logprobs; set it to true, too", "top_logprobs")
        if (self.top_logprobs or 0) > limits.max_logprobs:
            raise invalid_value(
                f"top_logprobs is {self.top_logprobs}; this server gives at most "
                f"{limits.max_logprobs} (--max-logprobs)",
                "top_logprobs",
            )

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
        if param == "structured":
            return "format" if self.format is not None else "tools"
        if param == "thinking_token_budget":
            return "think"
        found = super().param_of(param)
        return "options" if found in SamplingParams.__dataclass_fields__ else found


class OllamaChatRequest(OllamaRequest):
    """A body of /api/chat."""

    prompt_field = "messages"
    shape = ChatShape()

    messages = optional(OllamaMessages(), "The conversation so far.", default=())
    tools = optional(Tools(), "Functions that the answer may call.")

    @property
    def is_empty(self) -> bool:
        return not self.messages

    @property
    def has_form(self) -> bool:
        return super().has_form or has_constrained_calls(self.tool_use())

    def check_together(self, limits: ServerLimits) -> None:
        super().check_together(limits)
        self.tool_use()

    def tool_use(self) -> ToolUse | None:
        """Raises ApiError (400)."""
        return tool_use(self.tools, None, is_parallel=True)

    def prepare(
        self, text: TextFrontend, params: SamplingParams, max_num_tokens: int | None
    ) -> list[PreparedRequest]:
        last = [*self.messages][-1]
        is_continued = last["role"] == "assistant" and "tool_calls" not in last
        asked = AskedConversation(
            messages=self.messages,
            use=self.tool_use(),
            effort=self.think,
            template_kwargs={
                "add_generation_prompt": not is_continued,
                "continue_final_message": is_continued,
            },
        )
        return [asked.prepare(text, params, max_num_tokens)]


class OllamaPromptRequest(OllamaRequest):
    """A body of /api/generate."""

    prompt_field = "prompt"
    shape = PromptShape()

    prompt = optional(_TEXT, "The text, of a user; without it nothing is generated.", default="")
    system = optional(_TEXT, "A text in front of it.", default="")
    raw = optional(Boolean(), "Continue the prompt as it is.", default=False)
    images = label(NoImages(), "Not built: images.")
    suffix = unsupported("filling in a middle", "")
    template = unsupported("a chat template of the request's own", "")
    context = unsupported("an earlier answer as tokens, in place of /api/chat's messages", [])
    width = unsupported("making images")
    height = unsupported("making images")
    steps = unsupported("making images")

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
            effort=self.think,
            template_kwargs={},
        )
        return [asked.prepare(text, params, max_num_tokens)]


_ENDING: dict[str, Schema] = {
    "model": TEXT,
    "created_at": TEXT,
    "done": {"type": "boolean"},
    "done_reason": TEXT,
}


def _route(name: str, summary: str, body: type[OllamaRequest], held: dict[str, Schema]) -> ApiRoute:
    return ApiRoute(
        name=f"ollama_{name}",
        method="POST",
        path=f"/api/{name}",
        policy="key",
        summary=summary,
        answers=AnswerSchema(name=f"Ollama{name.title()}", schema=object_of({**_ENDING, **held})),
        statuses=GENERATION_STATUSES,
        body=body,
        can_stream=True,
    )


OLLAMA_CHAT = GeneratingEndpoint(
    route=_route(
        "chat",
        "Answer a conversation, as Ollama does.",
        OllamaChatRequest,
        {"message": object_of({"role": TEXT, "content": TEXT})},
    ),
    request_type=OllamaChatRequest,
)
OLLAMA_GENERATE = GeneratingEndpoint(
    route=_route(
        "generate", "Answer a prompt, as Ollama does.", OllamaPromptRequest, {"response": TEXT}
    ),
    request_type=OllamaPromptRequest,
)
