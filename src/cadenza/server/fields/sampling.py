"""Fields that several generating endpoints accept, in bodies that extend each other; sampling
fields are those of `request.PARAMETERS`. Invariant: every value is used, has no effect by its
meaning, or is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast, get_args

from cadenza.bounds import BIAS, MAX_BIASES, ListBound
from cadenza.config import MAX_LOGPROBS_BOUND
from cadenza.errors import show
from cadenza.request import BOUNDS, DEFAULTS, MAX_DRAFTS, MAX_PRIORITY, PARAMETERS
from cadenza.server.errors import invalid_value
from cadenza.server.fields.body import (
    Body,
    DeclaredObject,
    Effect,
    Field,
    ObjectOf,
    label,
    optional,
    unsupported,
)
from cadenza.server.fields.other_engines import OtherEnginesBody
from cadenza.server.fields.structured import (
    answer_format,
    guided,
    ollama_format,
    one_form,
    or_nothing,
)
from cadenza.server.fields.types import (
    Boolean,
    FieldType,
    Integer,
    ListOf,
    Number,
    OneOf,
    Schema,
    String,
    StringMap,
    TokenIds,
    array_schema,
    as_whole,
    check_member,
    checked_dict,
    checked_list,
    field_type,
    members_of,
    object_schema,
    refuse,
)
from cadenza.sparse_prefill import LEAST_KEEP, MAX_SPANS, MAX_THRESHOLD, MOST_KEEP, When

MAX_CHOICES = 2048  # answers of one call: its prompts times `n`
MAX_PROMPT_TOKENS = 1 << 24
MAX_PROMPT_CHARS = 1 << 26

PlainPrompt = str | tuple[int, ...]

LABEL = String(max_chars=256)
LOGPROBS = Integer(0, MAX_LOGPROBS_BOUND)
NUM_DRAFTS = Integer(1, MAX_DRAFTS)

_PROMPT = String(min_chars=1, max_chars=MAX_PROMPT_CHARS)
_PROMPT_IDS = TokenIds(MAX_PROMPT_TOKENS, min_items=1)
_ONE_PROMPT: Schema = {"anyOf": [_PROMPT.schema(), _PROMPT_IDS.schema()]}


@field_type({"anyOf": [*_ONE_PROMPT["anyOf"], array_schema(_ONE_PROMPT, 1, MAX_CHOICES)]})
def plain_prompts(name: str, value: object) -> tuple[PlainPrompt, ...]:
    """A text, token ids, or a list of either; checked into a tuple of prompts, none empty."""
    if not isinstance(value, list):
        return (_PROMPT.check(name, value),)
    items = cast(list[object], value)
    if items and isinstance(items[0], int | float):
        return (_PROMPT_IDS.check(name, items),)
    checked_list(name, items, "a list", (1, MAX_CHOICES), "prompts")
    return tuple([_plain_prompt(name, item) for item in items])


def _plain_prompt(name: str, item: object) -> PlainPrompt:
    if isinstance(item, str):
        return _PROMPT.check(name, item)
    if isinstance(item, list):
        return _PROMPT_IDS.check(name, cast(object, item))
    raise refuse(name, item, "a text, token ids, or a list of texts or of lists of token ids")


_BIAS = Number(BIAS.low, BIAS.high)


@field_type(
    {
        "type": "object",
        "maxProperties": MAX_BIASES,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": _BIAS.schema(),
    }
)
def logit_bias(name: str, value: object) -> dict[int, float]:
    entries = checked_dict(name, value, "an object from token ids to biases")
    if len(entries) > MAX_BIASES:
        raise invalid_value(
            f"{name} has {len(entries)} entries; at most {MAX_BIASES} are allowed", name
        )
    return {_token_id(name, key): _BIAS.check(name, v) for key, v in entries.items()}


def _token_id(name: str, key: str) -> int:
    if key.isascii() and key.isdigit() and len(key) <= 10:
        return int(key)
    raise invalid_value(f"{name} has the key {show(key)}; keys are token ids", name)


_COUNT = {"num_speculative_tokens": NUM_DRAFTS.schema()}


@field_type({"anyOf": [Boolean().schema(), object_schema(_COUNT, additionalProperties=False)]})
def speculative_choice(name: str, value: object) -> bool | dict[str, int]:
    """A boolean, or an object with a number of drafts."""
    if isinstance(value, bool):
        return value
    given = members_of(value)
    if given.keys() != {"num_speculative_tokens"}:
        raise refuse(name, value, 'true, false or an object {"num_speculative_tokens": N}')
    return {key: check_member(name, key, NUM_DRAFTS, item) for key, item in given.items()}


_INDEX = Integer(0, 1 << 31)


@field_type(array_schema(_INDEX.schema(), 2, 2))
def token_span(name: str, value: object) -> tuple[int, int]:
    """[start, stop), in which there is a token."""
    ends = cast(list[object], value) if isinstance(value, list) else []
    if len(ends) == 2:
        start, stop = (_INDEX.check(name, each) for each in ends)
        if start < stop:
            return start, stop
    raise refuse(name, cast(object, value), "two places of tokens, the first below the second")


_SPARSE: Mapping[str, FieldType[Any]] = {
    "keep": Number(LEAST_KEEP, MOST_KEEP),
    "threshold": Integer(0, MAX_THRESHOLD),
    "when": OneOf(get_args(When)),
    "spans": ListOf(item=token_span, max_items=MAX_SPANS),
}
_SPARSE_SCHEMA = object_schema(
    {key: each.schema() for key, each in _SPARSE.items()},
    required=(),
    minProperties=1,
    additionalProperties=False,
)


@field_type({"anyOf": [Boolean().schema(), _SPARSE_SCHEMA]})
def spec_prefill_choice(name: str, value: object) -> bool | dict[str, Any]:
    """A boolean, or an object with some of the members of `SpecPrefillChoice`."""
    if isinstance(value, bool):
        return value
    given = members_of(value)
    if not given or not given.keys() <= _SPARSE.keys():
        raise refuse(name, value, f"true, false or an object with some of {', '.join(_SPARSE)}")
    return {key: check_member(name, key, _SPARSE[key], item) for key, item in given.items()}


@dataclass(frozen=True, slots=True)
class StopTexts:
    """One text, or a list of texts; empty ones are left out, since they stop nothing."""

    many: ListOf[str]

    def check(self, name: str, value: object) -> tuple[str, ...]:
        given = cast(list[object], value) if isinstance(value, list) else [value]
        return self.many.check(name, [each for each in given if each != ""])

    def schema(self) -> Schema:
        text = {**self.many.item.schema(), "minLength": 0}
        return {"anyOf": [text, array_schema(text)]}


UNBOUNDED = -1


@dataclass(frozen=True, slots=True)
class MostTokens:
    """A number of tokens; -1 is the rest of the context, as in other servers."""

    high: int

    def check(self, name: str, value: object) -> int | None:
        whole = as_whole(value)
        if whole == UNBOUNDED:
            return None
        if whole is None or not 0 <= whole <= self.high:
            wanted = f"a whole number from 0 to {self.high}, or -1 for what is left of the context"
            raise refuse(name, value, wanted)
        return whole

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": UNBOUNDED, "maximum": self.high}


def sampling_type(name: str) -> FieldType[Any]:
    """The field type of one of `SamplingParams`."""
    if name == "logit_bias":
        return logit_bias
    if name == "speculative":
        return speculative_choice
    if name == "spec_prefill":
        return spec_prefill_choice
    bound = BOUNDS.get(name)
    if bound is None:
        return Boolean()
    if isinstance(bound, ListBound):
        if bound.max_chars is None:
            return TokenIds(bound.max_items)
        text = String(min_chars=1, max_chars=bound.max_chars)
        many = ListOf(item=text, max_items=bound.max_items)
        return StopTexts(many) if name == "stop" else many
    if name == "max_tokens":
        return MostTokens(int(bound.high))
    if bound.is_integer:
        return Integer(int(bound.low), int(bound.high))
    return Number(bound.low, bound.high)


class SamplingField(Field[Any]):
    """Declared as in `SamplingParams`; `sets`: its name there, if another."""

    def __init__(self, help: str = "", *, sets: str = "", is_required: bool = False) -> None:
        super().__init__(Boolean(), help, is_required=is_required, effect=Effect.SAMPLING)
        self.sets = sets

    def __set_name__(self, owner: type, name: str) -> None:
        super().__set_name__(owner, name)
        self.sets = sets = self.sets or name
        self.type = sampling_type(sets)
        self.help = self.help or PARAMETERS[sets].help
        if sets != "max_tokens" and DEFAULTS[sets] != ():  # endpoints have lengths of their own
            self.default = DEFAULTS[sets]


_OF_CHOICES = ("max_tokens", "stop", "n", "logprobs", "prompt_logprobs", "structured")
"""Parameters that not all endpoints have, or under other names or in other forms."""


class StreamOptions(DeclaredObject):
    """The members of `stream_options`."""

    include_usage = optional(Boolean(), default=False)
    continuous_usage_stats = optional(Boolean(), default=False)
    include_obfuscation = unsupported("obfuscated chunks", False)


class PromptCacheOptions(DeclaredObject):
    """The members of `prompt_cache_options`."""

    is_open = True
    mode = label(OneOf(("implicit", "explicit")))
    ttl = label(String(max_chars=16))


class CallBody(Body):
    """The fields of all calls of the engine."""

    cache_salt = optional(
        String(max_chars=256), "Share cached prefixes only with requests of an equal salt."
    )
    priority = optional(
        Integer(-MAX_PRIORITY, MAX_PRIORITY),
        "With --scheduling-policy priority, requests with a smaller one start first.",
        default=0,
    )
    request_id = optional(
        String(min_chars=1, max_chars=128, is_identifier=True),
        "The answer's id, as in x-request-id.",
    )


class SamplingBody(CallBody, OtherEnginesBody):
    """Also the fields that all endpoints that generate have in common."""

    more: ClassVar[Mapping[str, Field[Any]]] = {
        name: SamplingField() for name in PARAMETERS if name not in _OF_CHOICES
    }

    stream = optional(Boolean(), "Send the answer as it comes.", default=False)


class LabelledBody(SamplingBody):
    """Also the labels that OpenAI's endpoints have in common."""

    user = optional(LABEL, "Who asks; it goes into the log's line.")
    metadata = label(
        StringMap(max_items=16, max_key_chars=64, max_value_chars=512), "Labels of the request."
    )
    safety_identifier = label(LABEL, "A label of who asks.")
    session_id = label(LABEL, "A label of what the request belongs to.")
    prompt_cache_key = label(LABEL, "A hint; prefixes are cached without it.")
    prompt_cache_options = label(
        ObjectOf(PromptCacheOptions), "A hint; prefixes are cached while there is room."
    )
    prompt_cache_retention = label(
        OneOf(("in_memory", "in-memory", "24h")), "A hint; prefixes are cached while there is room."
    )

    service_tier = label(LABEL, "A label: there is one tier.")


class TopLogprobsBody(Body):
    """The two fields that ask for log probabilities of an answer to a conversation."""

    logprobs = optional(Boolean(), "Log probabilities of each token.", default=False)
    top_logprobs = optional(LOGPROBS, "And of this many likeliest; with logprobs.")

    @property
    def num_top_logprobs(self) -> int | None:
        """The number of likeliest tokens to return; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_logprobs(self) -> None:
        """Raises ApiError (400) where the two do not go together."""
        if self.top_logprobs and not self.logprobs:
            raise invalid_value("top_logprobs needs logprobs; set it to true, too", "top_logprobs")


class GenerationBody(LabelledBody):
    """Also what completions and chat completions have in common."""

    max_tokens = SamplingField("Most new tokens (completions 16; chat: the rest).")
    stop = SamplingField()
    n = SamplingField()
    prompt_logprobs = SamplingField()

    response_format = optional(answer_format, "The answer's form: text, or JSON.")
    structured_outputs = optional(one_form, "The answer's form, of which one member is given.")
    guided_json = optional(guided("json"), "Older name of structured_outputs.json.")
    guided_regex = optional(guided("regex"), "Older name of structured_outputs.regex.")
    guided_choice = optional(guided("choice"), "Older name of structured_outputs.choice.")
    guided_grammar = optional(guided("grammar"), "Older name of structured_outputs.grammar.")
    format = optional(ollama_format, "Ollama's: json, or a JSON Schema.")
    json_schema = optional(or_nothing(guided("json"), {}), "llama.cpp's and SGLang's name of it.")
    grammar = optional(or_nothing(guided("grammar"), ""), "llama.cpp's name of it.")
    ebnf = optional(or_nothing(guided("grammar"), ""), "SGLang's name of it.")
    regex = optional(or_nothing(guided("regex"), ""), "SGLang's name of it.")
    stream_options = optional(
        ObjectOf(StreamOptions),
        "With stream: usage in a last chunk, and then, if asked for, in every chunk, too.",
    )
    return_token_ids = optional(Boolean(), "Token ids beside the texts.", default=False)
    return_tokens_as_token_ids = optional(
        Boolean(),
        "Log probabilities name tokens as token_id:N instead of by their texts.",
        default=False,
    )
    receipt = optional(
        Boolean(),
        "With the end of each choice, a receipt that `cadenza replay` recomputes: token ids of "
        "prompt and answer, parameters, log probabilities, fingerprint.",
        default=False,
    )

    return_mm_kwargs = label(Boolean(), "Changes nothing of a generated answer.")

    store = label(Boolean(), "Chats and completions are not stored.")
    truncation_side = unsupported("cutting the prompt's end off", "left")
    use_beam_search = unsupported("beam search", False)
    length_penalty = unsupported("beam search", 1)
    watermarking = unsupported("watermarks", False)
    repetition_detection = unsupported("ending an answer that repeats itself", {})
    spaces_between_special_tokens = unsupported("special tokens without spaces", True)
    logprob_token_ids = unsupported("log probabilities of chosen token ids", [])
    return_token_offsets = unsupported("offsets of the prompt's tokens", False)
    routed_experts_prompt_start = unsupported("the experts of each token", 0)
    stream_interval = unsupported("several tokens to a chunk", 1)
    kv_transfer_params = unsupported("prefill and decoding in separate servers", {})
    ec_transfer_params = unsupported("encoding and decoding in separate servers", {})
    vllm_xargs = unsupported("arguments of extensions", {})
