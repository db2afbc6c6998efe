"""Every field a client may send: one table for checking, for the API's description and for tests.

Owns names, kinds, bounds, defaults and where a value goes. Sampling fields take their bounds from
`request.BOUNDS`. The table has every field of OpenAI's and vLLM's schemas. Invariant: a value is
used, or it asks for nothing, or it is refused by name; what changes an answer is never dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, cast, get_args

from cadenza.config import MAX_LOGPROBS_BOUND
from cadenza.request import BIAS, BOUNDS, MAX_BIASES, ListBound, show
from cadenza.server.errors import invalid_value, not_built, unknown_field
from cadenza.server.kinds import (
    NULL,
    Choice,
    Flag,
    Kind,
    ListOf,
    Number,
    OneOrMany,
    Record,
    Schema,
    Text,
    TextMap,
    TokenIds,
    Unbuilt,
    Whole,
    or_null,
    refuse,
)
from cadenza.server.messages import Messages

Endpoint = Literal["completions", "chat", "tokenize", "detokenize"]

MAX_ANSWERS = 2048
"""Of one call: its prompts times `n`."""
MAX_PROMPT_TOKENS = 1 << 24
MAX_PROMPT_CHARS = 1 << 26
TEMPLATE_SWITCHES = ("enable_thinking", "thinking", "preserve_thinking")


class Goes(Enum):
    """Where a value goes."""

    SAMPLING = "sampling"
    """Into `SamplingParams`, under its own name."""
    ANSWER = "answer"
    """What is asked, and what the answer holds and how it is sent."""
    REQUEST = "request"
    """To the engine beside the sampling, or into logs and ids."""
    NOWHERE = "nowhere"
    """It changes nothing: a label, or a value that asks for nothing of what is not built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field; `default` is what null and absence mean, in words where it depends."""

    name: str
    endpoints: tuple[Endpoint, ...]
    goes: Goes
    kind: Kind
    help: str
    default: object = None
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, token ids, or a list of either; always a tuple of prompts afterwards."""

    def check(self, name: str, value: object) -> tuple[str | tuple[int, ...], ...]:
        if not isinstance(value, list):
            return (_PROMPT_TEXT.check(name, value),)
        items = cast(list[object], value)
        if items and isinstance(items[0], int | float):
            return (_PROMPT_IDS.check(name, items),)
        if not 1 <= len(items) <= MAX_ANSWERS:
            raise invalid_value(
                f"{name} has {len(items)} prompts; from 1 to {MAX_ANSWERS} are allowed", name
            )
        return tuple(self._one(name, item) for item in items)

    @staticmethod
    def _one(name: str, item: object) -> str | tuple[int, ...]:
        if isinstance(item, str):
            return _PROMPT_TEXT.check(name, item)
        if isinstance(item, list):
            return _PROMPT_IDS.check(name, cast(object, item))
        raise refuse(name, item, "a text, token ids, or a list of texts or of lists of token ids")

    def schema(self) -> Schema:
        text, ids = _PROMPT_TEXT.schema(), _PROMPT_IDS.schema()
        many = {
            "type": "array",
            "items": {"anyOf": [text, ids]},
            "minItems": 1,
            "maxItems": MAX_ANSWERS,
        }
        return {"anyOf": [text, ids, many]}


_TEXT = Text(max_chars=MAX_PROMPT_CHARS)
_PROMPT_TEXT = Text(min_chars=1, max_chars=MAX_PROMPT_CHARS)
_PROMPT_IDS = TokenIds(MAX_PROMPT_TOKENS, min_items=1)


@dataclass(frozen=True, slots=True)
class LogitBias:
    """An object from token ids (as strings) to biases."""

    def check(self, name: str, value: object) -> dict[int, float]:
        if not isinstance(value, dict):
            raise refuse(name, value, "an object from token ids to biases")
        entries = cast(dict[str, object], value)
        if len(entries) > MAX_BIASES:
            raise invalid_value(
                f"{name} has {len(entries)} entries; at most {MAX_BIASES} are allowed", name
            )
        number = Number(BIAS.low, BIAS.high)
        return {self._token_id(name, key): number.check(name, v) for key, v in entries.items()}

    @staticmethod
    def _token_id(name: str, key: str) -> int:
        if key.isascii() and key.isdigit() and len(key) <= 10:
            return int(key)
        raise invalid_value(f"{name} has the key {show(key)}; keys are token ids", name)

    def schema(self) -> Schema:
        return {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": Number(BIAS.low, BIAS.high).schema(),
        }


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Text is what there is; the others are refused by name."""

    def check(self, name: str, value: object) -> str:
        if not isinstance(value, dict):
            raise refuse(name, value, 'an object such as {"type": "text"}')
        members = cast(dict[str, object], value)
        wanted = {key: item for key, item in members.items() if item is not None}
        if wanted.get("type") in ("json_object", "json_schema"):
            raise not_built(name, f"the type {wanted['type']}")
        if wanted != {"type": "text"}:
            raise refuse(name, wanted, 'an object such as {"type": "text"}')
        return "text"

    def schema(self) -> Schema:
        return {
            "type": "object",
            "properties": {"type": {"type": "string", "enum": ["text"]}},
            "required": ["type"],
            "additionalProperties": NULL,
        }


def _bounded(name: str) -> Kind:
    """The kind that `request.BOUNDS` makes of a sampling field."""
    bound = BOUNDS[name]
    if isinstance(bound, ListBound):
        if bound.longest is None:
            return TokenIds(bound.most)
        text = Text(min_chars=1, max_chars=bound.longest)
        many = ListOf(item=text, max_items=bound.most)
        return OneOrMany(many) if name == "stop" else many
    if bound.is_whole:
        return Whole(int(bound.low), int(bound.high))
    return Number(bound.low, bound.high)


_BOTH: tuple[Endpoint, ...] = ("completions", "chat")
_COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
_CHAT: tuple[Endpoint, ...] = ("chat",)
_RENDERED: tuple[Endpoint, ...] = ("chat", "tokenize")
_ALL: tuple[Endpoint, ...] = get_args(Endpoint)


def _sampling(
    name: str, help: str, default: object, endpoints: tuple[Endpoint, ...] = _BOTH
) -> Field:
    kind = LogitBias() if name == "logit_bias" else _bounded(name) if name in BOUNDS else Flag()
    return Field(
        name=name, endpoints=endpoints, goes=Goes.SAMPLING, kind=kind, help=help, default=default
    )


def _answer(
    name: str, kind: Kind, help: str, default: object = None, *, on: tuple[Endpoint, ...] = _BOTH
) -> Field:
    return Field(name=name, endpoints=on, goes=Goes.ANSWER, kind=kind, help=help, default=default)


def _needed(name: str, kind: Kind, help: str, on: tuple[Endpoint, ...]) -> Field:
    return Field(name=name, endpoints=on, goes=Goes.ANSWER, kind=kind, help=help, is_required=True)


def _unbuilt(name: str, what: str, *harmless: object, on: tuple[Endpoint, ...] = _BOTH) -> Field:
    """`harmless` are the values that ask for nothing of it; each other one is refused."""
    kind = Unbuilt(what, harmless)
    return Field(name=name, endpoints=on, goes=Goes.NOWHERE, kind=kind, help=f"Not built: {what}.")


def _label(name: str, kind: Kind, help: str, on: tuple[Endpoint, ...] = _BOTH) -> Field:
    """A value that changes nothing of the answer; it is checked for its size and dropped."""
    return Field(name=name, endpoints=on, goes=Goes.NOWHERE, kind=kind, help=help)


def _request(name: str, kind: Kind, help: str) -> Field:
    return Field(name=name, endpoints=_BOTH, goes=Goes.REQUEST, kind=kind, help=help)


_LABEL = Text(max_chars=256)
_LOGPROBS = Whole(0, MAX_LOGPROBS_BOUND)
_IDENTIFIER = Text(min_chars=1, max_chars=128, is_identifier=True)
_MODEL = Text(min_chars=1, max_chars=256)

SAMPLING_FIELDS = (
    _sampling("temperature", "Below 1e-5 always takes the likeliest token.", 1.0),
    _sampling("top_p", "Keep the likeliest tokens of this mass.", 1.0),
    _sampling("top_k", "Keep this many likeliest tokens; 0 and -1 are off.", 0),
    _sampling("min_p", "Drop tokens less likely than this times the likeliest.", 0.0),
    _sampling(
        "top_n_sigma",
        "Drop tokens this many standard deviations of the logits below the largest; 0 and -1 are "
        "off.",
        0.0,
    ),
    _sampling("presence_penalty", "Taken off the logit of each generated token.", 0.0),
    _sampling("frequency_penalty", "The same, once for each time.", 0.0),
    _sampling("repetition_penalty", "Divides logits of tokens of prompt and output.", 1.0),
    _sampling("seed", "Fixes the randomness.", None),
    _sampling("max_tokens", "Most new tokens (completions 16; chat: the rest).", "see help"),
    _sampling("min_tokens", "No end before this many new tokens.", 0),
    _sampling("stop", "Texts that end the answer.", None),
    _sampling("stop_token_ids", "Tokens that end the answer.", None),
    _sampling("include_stop_str_in_output", "Show the text that stopped it.", False),
    _sampling("ignore_eos", "Go on after the end-of-sequence token.", False),
    _sampling("n", "Answers to each prompt.", 1),
    _sampling("prompt_logprobs", "Log probabilities of the prompt's tokens.", None),
    _sampling("logit_bias", "Added to the logits of tokens.", None),
    _sampling("bad_words", "Texts that are not generated.", None),
    _sampling("allowed_token_ids", "No other token is chosen.", None),
    _sampling("skip_special_tokens", "Special tokens have no text.", True),
    _sampling("truncate_prompt_tokens", "Keep this many tokens of the prompt's end.", None),
)

LABELS = (
    _label(
        "metadata",
        TextMap(max_items=16, max_key_chars=64, max_value_chars=512),
        "Labels of the request.",
    ),
    _label("safety_identifier", _LABEL, "A label of who asks."),
    _label("session_id", _LABEL, "A label of what the request belongs to."),
    _label("prompt_cache_key", _LABEL, "A hint; prefixes are cached without it."),
    _label(
        "prompt_cache_options",
        Record({"mode": Choice(("implicit", "explicit")), "ttl": Text(max_chars=16)}),
        "A hint; prefixes are cached while there is room.",
    ),
    _label(
        "prompt_cache_retention",
        Choice(("in_memory", "in-memory", "24h")),
        "A hint; prefixes are cached while there is room.",
    ),
    _label("parallel_tool_calls", Flag(), "Changes nothing: no tool is called.", _CHAT),
    _label("return_mm_kwargs", Flag(), "Changes nothing of a generated answer."),
)

UNBUILT = (
    _unbuilt("tools", "calling tools", [], on=_CHAT),
    _unbuilt("tool_choice", "calling tools", "none", "auto", on=_CHAT),
    _unbuilt("functions", "calling functions", [], on=_CHAT),
    _unbuilt("function_call", "calling functions", "none", "auto", on=_CHAT),
    _unbuilt("web_search_options", "searching the web", on=_CHAT),
    _unbuilt("include_reasoning", "leaving reasoning out", True, on=_CHAT),
    _unbuilt("thinking_token_budget", "a bound on reasoning", -1),
    _unbuilt("verbosity", "a choice of verbosity", "medium", on=_CHAT),
    _unbuilt("modalities", "another modality than text", ["text"], on=_CHAT),
    _unbuilt("audio", "audio", on=_CHAT),
    _unbuilt("media_io_kwargs", "another modality than text", {}, on=_CHAT),
    _unbuilt("mm_processor_kwargs", "another modality than text", {}, on=_CHAT),
    _unbuilt("moderation", "moderation", on=_CHAT),
    _unbuilt("prediction", "a predicted output", on=_CHAT),
    _unbuilt("store", "storing answers", False),
    _unbuilt("service_tier", "a choice of service tier", "auto", "default"),
    _unbuilt("priority", "scheduling by priority", 0),
    _unbuilt("structured_outputs", "structured output"),
    _unbuilt("chat_template", "a chat template of the request's own", "", on=_CHAT),
    _unbuilt("documents", "documents in the prompt", [], on=_CHAT),
    _unbuilt("echo", "beginning the answer with the last message", False, on=_CHAT),
    _unbuilt("add_special_tokens", "special tokens around a conversation", False, on=_CHAT),
    _unbuilt("truncation_side", "cutting the prompt's end off", "left"),
    _unbuilt("prompt_embeds", "a prompt of embeddings", on=_COMPLETIONS),
    _unbuilt("suffix", "filling in a middle", "", on=_COMPLETIONS),
    _unbuilt("best_of", "choosing among several answers", 1, on=_COMPLETIONS),
    _unbuilt("use_beam_search", "beam search", False),
    _unbuilt("length_penalty", "beam search", 1),
    _unbuilt("watermarking", "watermarks", False),
    _unbuilt("repetition_detection", "ending an answer that repeats itself", {}),
    _unbuilt("spaces_between_special_tokens", "special tokens without spaces", True),
    _unbuilt("logprob_token_ids", "log probabilities of chosen token ids", []),
    _unbuilt("return_prompt_text", "the prompt's text in the answer", False, on=_CHAT),
    _unbuilt("return_token_offsets", "offsets of the prompt's tokens", False),
    _unbuilt("routed_experts_prompt_start", "the experts of each token", 0),
    _unbuilt("stream_interval", "several tokens to a chunk", 1),
    _unbuilt("kv_transfer_params", "prefill and decoding in separate servers", {}),
    _unbuilt("ec_transfer_params", "encoding and decoding in separate servers", {}),
    _unbuilt("vllm_xargs", "arguments of extensions", {}),
)
"""What the schemas have and this server lacks, and which values ask for nothing of it."""

TABLE: tuple[Field, ...] = (
    Field(
        name="model",
        endpoints=_ALL,
        goes=Goes.ANSWER,
        kind=_MODEL,
        help="A name of GET /v1/models; the first of them when absent.",
    ),
    _needed("messages", Messages(), "The conversation so far.", _CHAT),
    *SAMPLING_FIELDS,
    _answer(
        "max_completion_tokens",
        _bounded("max_tokens"),
        "Another name of max_tokens.",
        on=_CHAT,
    ),
    _answer(
        "logprobs", _LOGPROBS, "Log probabilities of each token and the likeliest.", on=_COMPLETIONS
    ),
    _answer("logprobs", Flag(), "Log probabilities of each token.", False, on=_CHAT),
    _answer("top_logprobs", _LOGPROBS, "And of this many likeliest; with logprobs.", on=_CHAT),
    _answer("echo", Flag(), "Begin the answer with the prompt.", False, on=_COMPLETIONS),
    _answer("response_format", ResponseFormat(), "The answer's form.", {"type": "text"}),
    _answer("stream", Flag(), "Send the answer as it comes.", False),
    _answer(
        "stream_options",
        Record(
            {
                "include_usage": Flag(),
                "continuous_usage_stats": Flag(),
                "include_obfuscation": Unbuilt("obfuscated chunks", (False,)),
            }
        ),
        "With stream: usage in a last chunk, and then, if asked for, in every chunk, too.",
    ),
    _answer("return_token_ids", Flag(), "Token ids beside the texts.", False),
    _answer(
        "return_tokens_as_token_ids",
        Flag(),
        "Log probabilities name tokens as token_id:N instead of by their texts.",
        False,
    ),
    _answer(
        "chat_template_kwargs",
        Record(dict.fromkeys(TEMPLATE_SWITCHES, Flag())),
        "Switches of the model's chat template.",
        on=_RENDERED,
    ),
    _answer(
        "add_generation_prompt",
        Flag(),
        "End the prompt where the assistant begins (default true, but for a continued message).",
        "see help",
        on=_RENDERED,
    ),
    _answer(
        "continue_final_message",
        Flag(),
        "End the prompt within the last message, which the answer continues.",
        False,
        on=_RENDERED,
    ),
    _answer(
        "reasoning_effort",
        Unbuilt("an effort of reasoning", ("none",)),
        "none: no thinking, where the chat template has a switch for it.",
        on=_CHAT,
    ),
    _request(
        "cache_salt",
        Text(max_chars=256),
        "Share cached prefixes only with requests of an equal salt.",
    ),
    _request("request_id", _IDENTIFIER, "The answer's id, as in x-request-id."),
    _request("user", _LABEL, "Who asks; it goes into the log's line."),
    *LABELS,
    *UNBUILT,
    _needed("prompt", Prompt(), "A text, token ids, or a list of either.", _COMPLETIONS),
    Field(
        name="prompt",
        endpoints=("tokenize",),
        goes=Goes.ANSWER,
        kind=_TEXT,
        help="The text; or give messages.",
    ),
    Field(
        name="messages",
        endpoints=("tokenize",),
        goes=Goes.ANSWER,
        kind=Messages(),
        help="A conversation, rendered through the chat template.",
    ),
    _answer(
        "add_special_tokens",
        Flag(),
        "Put around a text what the tokenizer puts around texts.",
        True,
        on=_COMPLETIONS,
    ),
    _answer(
        "add_special_tokens",
        Flag(),
        "As for completions (default: true for prompt, false for messages).",
        "see help",
        on=("tokenize",),
    ),
    _answer(
        "return_token_strs",
        Flag(),
        "Each token's piece of the vocabulary beside its id.",
        False,
        on=("tokenize",),
    ),
    _needed("tokens", TokenIds(MAX_PROMPT_TOKENS), "Token ids.", ("detokenize",)),
)

FIELDS: Mapping[Endpoint, Mapping[str, Field]] = {
    endpoint: {field.name: field for field in TABLE if endpoint in field.endpoints}
    for endpoint in _ALL
}


UnknownFields = Literal["refuse", "ignore"]
"""What becomes of a field that is not in the table and has a value."""


def check_body(
    endpoint: Endpoint, body: Mapping[str, object], unknown: UnknownFields = "refuse"
) -> dict[str, Any]:
    """The checked values of the fields that are there and go somewhere; null counts as absent.

    Raises ApiError (400) naming the first field at fault.
    """
    fields = FIELDS[endpoint]
    values: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        field = fields.get(name)
        if field is not None:
            checked = field.kind.check(name, value)
            if field.goes is not Goes.NOWHERE:
                values[name] = checked
        elif unknown == "refuse":
            built = [each.name for each in fields.values() if each.goes is not Goes.NOWHERE]
            raise unknown_field(name[:64], built)
    for field in fields.values():
        if field.is_required and field.name not in values:
            raise invalid_value(f"{field.name} is missing; it is needed here", field.name)
    return values


def sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the checked values that are `SamplingParams`' own."""
    names = {field.name for field in SAMPLING_FIELDS}
    return {name: value for name, value in values.items() if name in names}


def body_schema(endpoint: Endpoint, unknown: UnknownFields = "refuse") -> Schema:
    """JSON Schema of a body."""
    fields = FIELDS[endpoint].values()
    return {
        "type": "object",
        "properties": {field.name: _field_schema(field) for field in fields},
        "required": [field.name for field in fields if field.is_required],
        "additionalProperties": NULL if unknown == "refuse" else True,
    }


def _field_schema(field: Field) -> Schema:
    if field.is_required:
        return {**field.kind.schema(), "description": field.help}
    schema = or_null(field.kind.schema())
    shown = {} if field.default is None else {"default": field.default}
    if field.default == "see help":
        shown = {}
    return {**schema, **shown, "description": field.help}
