"""/v1/responses: answers a conversation of items, and stores the answer. Invariant: a response
continues the whole conversation that `previous_response_id` names, or is refused."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from cadenza.frontend.prepared_request import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import SamplingParams, show
from cadenza.server.calls.conversation import AskedConversation, with_system
from cadenza.server.calls.endpoint import (
    AnswerHead,
    CallContext,
    GeneratingEndpoint,
    GenerationRequest,
    StreamEncoder,
    check_stream_options,
)
from cadenza.server.errors import invalid_value, response_not_found
from cadenza.server.fields.body import ObjectOf, label, optional, required, unsupported
from cadenza.server.fields.messages import chat_messages, template_variables
from cadenza.server.fields.sampling import LabelledBody, SamplingField
from cadenza.server.fields.thinking import BUDGET, BUDGET_HELP, AskedThinking, ThinkingSwitches
from cadenza.server.fields.tools import ResponseTool
from cadenza.server.fields.types import (
    MAX_TOKEN_ID,
    AnyJson,
    Boolean,
    Integer,
    OneOf,
    String,
    StringMap,
)
from cadenza.server.limits import ServerLimits
from cadenza.server.openai.response_answer import (
    RESPONSE_ANSWER,
    RESPONSE_PREFIX,
    ResponseEncoder,
    ResponseFrame,
)
from cadenza.server.openai.response_items import (
    REFERENCE,
    TEXT_FORM,
    ReasoningOptions,
    ResponseStreamOptions,
    TextOptions,
    includes,
    input_items,
    messages_of,
    response_tool_choice,
    response_tools,
)
from cadenza.server.response_store import StoredResponse
from cadenza.structured import StructuredOutput


class ResponseRequest(ThinkingSwitches, LabelledBody, GenerationRequest):
    """A body of /v1/responses."""

    prompt_field = "input"
    param_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
    }

    input = required(input_items, "A text, or the items of a conversation.")
    instructions = optional(
        String(max_chars=1 << 26), "A system text in front of the conversation; it is not kept."
    )
    previous_response_id = optional(
        String(min_chars=1, max_chars=256), "The stored response that this one goes on from."
    )
    max_output_tokens = SamplingField("Most new tokens (default: the rest).", sets="max_tokens")
    stop = SamplingField()
    tools = optional(response_tools, "Functions and custom tools that the answer may call.")
    tool_choice = optional(
        response_tool_choice,
        "none; auto: the model decides; required; or a function that is called.",
    )
    parallel_tool_calls = optional(Boolean(), "Several calls in an answer.", default=True)
    text = optional(ObjectOf(TextOptions), "The form of the answer's text.")
    reasoning = optional(ObjectOf(ReasoningOptions), "How much the model reasons.")
    thinking_token_budget = optional(BUDGET, BUDGET_HELP)
    include = optional(includes, "What the answer has besides.")
    store = optional(Boolean(), "Keep the response for later calls.", default=True)
    stream_options = optional(ObjectOf(ResponseStreamOptions), "With stream.")
    metadata = optional(
        StringMap(max_items=16, max_key_chars=64, max_value_chars=512),
        "Labels, which the response has, too.",
    )
    chat_template_kwargs = template_variables()

    client_metadata = label(AnyJson(max_chars=16 << 10), "A label of the client.")
    max_tool_calls = label(
        Integer(1, MAX_TOKEN_ID), "Of tools that the server runs, of which there are none."
    )
    top_logprobs = unsupported("log probabilities", 0)
    background = unsupported("a response in the background", False)
    conversation = unsupported("conversations; use previous_response_id")
    prompt = unsupported("stored prompts")
    truncation = label(
        OneOf(("auto", "disabled")), "Nothing is left out: beyond the context is an error."
    )
    moderation = unsupported("moderation")
    context_management = unsupported("compaction", [])
    image = unsupported("images")
    access_programs = unsupported("access programs", {})
    background_options = unsupported("a response in the background", {})

    _context: CallContext
    _turns: Sequence[StoredResponse] = ()
    _referred: Mapping[str, StoredResponse | None] = {}
    """The stored responses with the items that `input` refers to, by the items' ids."""
    _max_referred_bytes = 0  # a bound on the items that `input` refers to, together
    _given: bytes = b""
    """`input` as JSON, with the items themselves in place of references, each with an id."""

    @property
    def form_field(self) -> str | None:
        return None if self.form is None else "text"

    def own_thinking(self) -> dict[str, AskedThinking]:
        own = super().own_thinking()
        if self.reasoning is not None:
            own["reasoning"] = AskedThinking(
                is_on=self.reasoning.enabled,
                effort=self.reasoning.effort,
                max_tokens=self.reasoning.max_tokens,
            )
        return own

    def check_together(self, limits: ServerLimits) -> None:
        self._max_referred_bytes = limits.max_body_bytes
        check_stream_options(self.stream_options, self.stream)
        if not self.input and self.previous_response_id is None:
            raise invalid_value("input has no items; give at least one", "input")
        _ = self.asked, self.use
        for name, shown in self._shown().items():
            _check_unicode(name, shown)

    def enter(self, context: CallContext) -> None:
        self._context = context
        if self.previous_response_id is not None:
            turns = context.responses.conversation(context.tenant, self.previous_response_id)
            if turns is None:
                raise response_not_found(self.previous_response_id, "previous_response_id")
            self._turns = turns
        self._referred = {
            item["id"]: context.responses.find(context.tenant, _response_of(item["id"]))
            for item in self.input
            if item["type"] == REFERENCE
        }
        stored = {turn.id: turn for turn in (*self._turns, *self._referred.values()) if turn}
        self.num_bytes += sum(turn.num_bytes for turn in stored.values())

    @property
    def form(self) -> StructuredOutput | None:
        return (self._text.format or TEXT_FORM).form

    def prompts(self, text: TextFrontend) -> list[ChatPrompt]:
        given, messages = self._conversation
        asked = AskedConversation(
            messages=messages,
            use=self.use,
            thinking=self.asked,
            verbosity=self._text.verbosity,
            variables=self.chat_template_kwargs,
        )
        made = asked.prompt(text)
        if self.store:
            self._given = _encode_items(given, self._context.request_id)
        return [made]

    @cached_property
    def _conversation(self) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]]]:
        """The items of `input` without references, and the messages of the whole conversation; made
        once, since images are opened once. Slow. Raises ApiError (400)."""
        items = [item for turn in self._turns for item in _items_of(turn)]
        given = [*_without_references(self.input, self._referred, self._max_referred_bytes)]
        messages = with_system(self.instructions, messages_of([*items, *given], len(items)))
        return given, chat_messages.check("input", messages)

    def encoder(self, head: AnswerHead) -> StreamEncoder:
        frame = ResponseFrame(
            fields=self._response(head, self.sampling(head.text)),
            input=self._given,
            tenant=self._context.tenant,
            store=self._context.responses if self.store else None,
            tools={tool.name: tool for tool in self.tools or ()},
        )
        return ResponseEncoder(head, frame)

    def param_of(self, param: str | None) -> str | None:
        if param == "thinking_token_budget" and self.thinking_token_budget is None:
            return self.bound_field() or "reasoning"
        return super().param_of(param)

    @property
    def _text(self) -> TextOptions:
        return self.text or TextOptions({})

    def _response(self, head: AnswerHead, params: SamplingParams) -> dict[str, Any]:
        return {
            "id": RESPONSE_PREFIX + head.request_id,
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.asked.effort, "summary": None},
            "store": self.store,
            "temperature": params.temperature,
            "tool_choice": _shown_choice(self.tool_choice),
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": self.user,
            **self._shown(),
        }

    def _shown(self) -> dict[str, Any]:
        asked = self._text
        verbosity = {} if asked.verbosity is None else {"verbosity": asked.verbosity}
        return {
            "metadata": self.metadata or {},
            "text": {"format": (asked.format or TEXT_FORM).given, **verbosity},
            "tools": _shown_tools(self.tools or ()),
        }


def _check_unicode(name: str, value: object) -> None:
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError:
        raise invalid_value(
            f"{name} has half a surrogate pair; send whole characters", name
        ) from None


def _response_of(item_id: str) -> str:
    """The id of the response that has the item: both contain the request's id."""
    return RESPONSE_PREFIX + item_id.partition("_")[2].rpartition("_")[0]


def _encode_items(items: Sequence[dict[str, Any]], request_id: str) -> bytes:
    named = [
        item if "id" in item else {**item, "id": f"item_{request_id}_{index}"}
        for index, item in enumerate(items)
    ]
    return msgspec.json.encode(named)


def _without_references(
    items: Sequence[dict[str, Any]],
    referred: Mapping[str, StoredResponse | None],
    max_num_bytes: int,
) -> Iterator[dict[str, Any]]:
    """Raises ApiError (400) for a missing item, or more than `max_num_bytes` together: a short body
    may refer to a long item many times."""
    num_bytes = 0
    known: dict[str, dict[str, dict[str, Any]]] = {}
    for index, item in enumerate(items):
        if item["type"] != REFERENCE:
            yield item
            continue
        response = referred.get(item["id"])
        if response is not None and response.id not in known:
            known[response.id] = {each["id"]: each for each in _items_of(response)}
        found = None if response is None else known[response.id].get(item["id"])
        if found is None:
            raise invalid_value(
                f"input[{index}] refers to the item {show(item['id'])}, which is in no stored "
                f"response that has ended; send the item itself",
                "input",
            )
        num_bytes += len(msgspec.json.encode(found))
        if num_bytes > max_num_bytes:
            raise invalid_value(
                f"up to input[{index}] the items that input refers to have over {max_num_bytes} "
                f"bytes, the most that a body may have; refer to fewer items",
                "input",
            )
        yield found


def _items_of(turn: StoredResponse) -> list[dict[str, Any]]:
    return [*msgspec.json.decode(turn.input), *msgspec.json.decode(turn.body)["output"]]


def _shown_choice(choice: str | None) -> str | dict[str, str]:
    if choice is None or not choice.startswith(":"):
        return choice or "auto"
    return {"type": "function", "name": choice[1:]}


def _shown_tools(tools: Sequence[ResponseTool]) -> list[Mapping[str, Any]]:
    """As they were given: a namespace once, and a custom tool as its object."""
    shown: list[Mapping[str, Any]] = []
    for tool in tools:
        if tool.given is None:
            function = {"description": tool.description, "parameters": tool.parameters}
            shown.append(
                {"type": "function", "name": tool.name, **function, "strict": tool.is_strict}
            )
        elif not shown or shown[-1] is not tool.given:
            shown.append(tool.given)
    return shown


RESPONSES = GeneratingEndpoint(
    "responses",
    "/v1/responses",
    "Answer a conversation of items.",
    ResponseRequest,
    RESPONSE_ANSWER,
)
