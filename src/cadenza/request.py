"""Requests: `Request`, how its tokens are chosen (`SamplingParams`), or how its prompt becomes one
vector (`PoolingParams`). Owns the bounds of every number that a client controls. Knows no text,
rows or pages. Invariant: every `SamplingParams` instance is finite and within bounds."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields
from functools import wraps
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from cadenza.bounds import (
    ListBound,
    NumberBound,
    SamplingParameter,
    as_biases,
    as_number,
    as_token_ids,
    as_tuple,
    parameter,
)
from cadenza.config import MAX_LOGPROBS_BOUND
from cadenza.errors import InvalidRequestError, must_be, show
from cadenza.sparse_prefill import SparsePrefill, SpecPrefillChoice, as_spec_prefill
from cadenza.speculative_config import MAX_SPECULATIVE_TOKENS, Speculative, as_speculative
from cadenza.structured import ConstraintSpec, StructuredOutput, as_structured
from cadenza.tenant import ONE_TENANT, Tenant

Kind = TypeVar("Kind")

MAX_DRAFTS = MAX_SPECULATIVE_TOKENS  # of a stream in a step, that a request may ask for

MAX_PRIORITY = 1000  # priorities of requests are from minus this number to it
_PRIORITY = NumberBound(-MAX_PRIORITY, MAX_PRIORITY, is_integer=True)

GREEDY_BELOW = 1e-5  # lower temperatures mean greedy sampling, as in vLLM

# No token alone has less than this of the mass where it is the likeliest, so that it, and 0, keep
# the likeliest token only.
LEAST_TOP_P = 1e-6

NO_SEED = -1  # means that there is no seed, as in llama.cpp and LM Studio

# Tokens of all bad words of a request; each word counts one extra token for its length.
MAX_BAD_WORD_TOKENS = 1000


# CPython has a single empty tuple, so `is _EMPTY` recognises defaults without a check.
_EMPTY: tuple[()] = ()

_MOST = 1 << 31


def _takes_vllm_names(kind: type[Kind]) -> type[Kind]:
    """`structured` may be given as `structured_outputs`, which is no field: nothing has to be sent
    or compared twice."""
    plain: Callable[..., None] = kind.__init__

    @wraps(plain)
    def __init__(self: Any, *, structured_outputs: object = None, **given: Any) -> None:
        if structured_outputs is not None:
            if given.get("structured") is not None:
                raise InvalidRequestError(
                    "structured and structured_outputs are both given, and are one; give one",
                    param="structured_outputs",
                )
            given["structured"] = as_structured(structured_outputs)
        plain(self, **given)

    setattr(kind, "__init__", __init__)  # noqa: B010 - a class's own attribute, which has a type
    return kind


@_takes_vllm_names
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample a request's tokens, and what to return with them. Raises InvalidRequestError: a
    value has the wrong type or is out of bounds.

    Tuples may be given as lists or arrays, `stop` as one string, `logit_bias` as a mapping, and
    numbers as numpy scalars; they are stored as tuples and Python numbers."""

    max_tokens: int | None = parameter(
        16,
        "Most new tokens.",
        (0, _MOST),
        renamed="max_completion_tokens max_output_tokens",
        also="max_new_tokens n_predict num_predict",
        recommended="max_new_tokens",
    )
    """None: up to `max_model_len`. 0: only the prompt is computed, say for `prompt_logprobs`."""
    min_tokens: int = parameter(
        0,
        "No end before this many new tokens.",
        (0, _MOST),
        also="min_new_tokens",
        recommended="min_new_tokens",
    )
    temperature: float = parameter(
        1.0,
        "Randomness; below 1e-5 always takes the likeliest token.",
        (0.0, 100.0),
        recommended="temperature",
    )
    top_k: int = parameter(
        0, "Keep this many likeliest tokens; 0 and -1 are off.", (-1, _MOST), recommended="top_k"
    )
    top_p: float = parameter(
        1.0, "Keep the likeliest tokens of this mass; 0 keeps one.", (0.0, 1.0), recommended="top_p"
    )
    min_p: float = parameter(
        0.0,
        "Drop tokens less likely than this times the likeliest.",
        (0.0, 1.0),
        recommended="min_p",
    )
    top_n_sigma: float = parameter(
        0.0,
        "Drop tokens this many standard deviations of the logits below the largest; 0 and -1 are "
        "off.",
        (-1.0, 100.0),
    )
    seed: int | None = parameter(
        None, "Fixes the randomness; -1 is none.", (-(1 << 63), (1 << 64) - 1)
    )
    """Any integer of 64 bits, with or without a sign, stored as the unsigned one of the same bits.
    None, as which -1 is stored: derived from the engine's seed and the request's id."""
    presence_penalty: float = parameter(
        0.0, "Taken off the logit of each generated token.", (-2.0, 2.0)
    )
    frequency_penalty: float = parameter(
        0.0, "Taken off a token's logit once for each time it was generated.", (-2.0, 2.0)
    )
    repetition_penalty: float = parameter(
        1.0,
        "Divides positive logits of tokens of prompt and output, and multiplies negative ones.",
        (0.01, 100.0),
        also="repeat_penalty",
        recommended="repetition_penalty",
    )
    logit_bias: Mapping[int, float] | SequenceOf[tuple[int, float]] = parameter(
        (), 'Added to the logits of at most 300 tokens, as {"12": -5}.'
    )
    allowed_token_ids: SequenceOf[int] | None = parameter(
        None, "No other token is chosen.", ListBound(1 << 20)
    )
    bad_words: SequenceOf[str] = parameter((), "Texts that are not generated.", ListBound(128, 256))
    n: int = parameter(1, "Answers to each prompt, each with its own seed.", (1, 16))
    ignore_eos: bool = parameter(False, "Go on after the end-of-sequence token.")
    stop_token_ids: SequenceOf[int] = parameter((), "Tokens that end the answer.", ListBound(128))
    stop: SequenceOf[str] = parameter(
        (), "Texts that end the answer, at most 64.", ListBound(64, 256), renamed="stop_sequences"
    )
    include_stop_str_in_output: bool = parameter(False, "Show the text that stopped it.")
    skip_special_tokens: bool = parameter(True, "Leave special tokens out of the text.")
    logprobs: int | None = parameter(
        None, "Log probabilities of chosen tokens and this many others.", (0, MAX_LOGPROBS_BOUND)
    )
    prompt_logprobs: int | None = parameter(
        None, "Log probabilities of the prompt's tokens.", (0, MAX_LOGPROBS_BOUND)
    )
    truncate_prompt_tokens: int | None = parameter(
        None, "Keep this many tokens of the prompt's end.", (1, _MOST), also="truncate"
    )
    structured: StructuredOutput | None = parameter(None, "The form of the answer.")
    if TYPE_CHECKING:
        structured_outputs: StructuredOutput | Mapping[str, Any] | None = None
    else:

        @property
        def structured_outputs(self) -> StructuredOutput | None:
            return self.structured

    speculative: bool | int | Mapping[str, int] | None = parameter(
        None,
        "Verify drafts, which changes no token: true, false, or at most how many in a step; "
        "otherwise as --speculative-config says.",
    )
    spec_prefill: bool | SpecPrefillChoice | None = parameter(
        None,
        "Compute only a part of a long prompt, which changes the answer: false is all of it, true "
        "as the server is configured, or an object of keep, threshold, when and spans.",
    )

    def __post_init__(self) -> None:
        for name, bound in BOUNDS.items():
            value: Any = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(bound, ListBound):
                if value is _EMPTY:
                    continue
                # Messages between processes decode an empty tuple to an empty list.
                is_empty = isinstance(value, list) and not len(cast(list[Any], value))
                kept = _EMPTY if is_empty else as_tuple(name, cast(object, value), bound)
            elif type(value) is float and not bound.is_integer and bound.low <= value <= bound.high:
                continue  # fast path: nothing to convert
            elif type(value) is int and bound.low <= value <= bound.high:
                continue
            else:
                kept = as_number(name, value, bound)
            object.__setattr__(self, name, kept)
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise must_be(name, getattr(self, name), "true or false")
        if isinstance(self.logit_bias, list) and not self.logit_bias:
            object.__setattr__(self, "logit_bias", _EMPTY)
        elif self.logit_bias is not _EMPTY:
            object.__setattr__(self, "logit_bias", as_biases(self.logit_bias))
        if self.speculative is not None:
            object.__setattr__(self, "speculative", as_speculative(self.speculative))
        if self.spec_prefill is not None:
            object.__setattr__(self, "spec_prefill", as_spec_prefill(self.spec_prefill))
        if self.top_p < LEAST_TOP_P:
            object.__setattr__(self, "top_p", LEAST_TOP_P)
        if self.seed is not None and self.seed < 0:
            unsigned = None if self.seed == NO_SEED else self.seed + (1 << 64)
            object.__setattr__(self, "seed", unsigned)
        self._check_together()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @property
    def drafts(self) -> Speculative:
        return cast(Speculative, self.speculative)

    def _check_together(self) -> None:
        if not isinstance(self.structured, StructuredOutput | None):
            raise must_be("structured", self.structured, "a StructuredOutput")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; the first "
                f"must not be above the second",
                param="min_tokens",
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids is empty, so that nothing could be generated; name one token "
                "or more, or leave it out",
                param="allowed_token_ids",
            )


PARAMETERS: Mapping[str, SamplingParameter] = {
    each.name: each.metadata["parameter"] for each in fields(SamplingParams)
}
DEFAULTS: Mapping[str, Any] = {each.name: each.default for each in fields(SamplingParams)}
# Of numbers and lists; `BIAS` bounds `logit_bias`.
BOUNDS = {name: each.within for name, each in PARAMETERS.items() if each.within is not None}
_OPTIONAL = {each.name for each in fields(SamplingParams) if NoneType in get_args(each.type)}
_BOOLEANS = tuple(each.name for each in fields(SamplingParams) if each.type is bool)


# The hidden state of a prompt's last token, or the mean of all its tokens'.
Pooling = Literal["last", "mean"]

DIMENSIONS = NumberBound(1, 1 << 20, is_integer=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How the model's last hidden states, those after its final norm, become an embedding.

    Args:
        pooling: "last" or "mean"; `None` is as the checkpoint says, otherwise "last".
        dimensions: keep only so many of the first values; `None` keeps all. What is kept is scaled
            to unit length.
        normalize: false gives the hidden state, or the mean, as it is.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of bounds.
    """

    pooling: Pooling | None = None
    dimensions: int | None = None
    normalize: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.normalize, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise must_be("normalize", self.normalize, "true or false")
        if self.pooling is not None and self.pooling not in get_args(Pooling):
            raise must_be("pooling", self.pooling, f"one of {', '.join(get_args(Pooling))}")
        if self.dimensions is not None:
            number = as_number("dimensions", self.dimensions, DIMENSIONS)
            object.__setattr__(self, "dimensions", number)


def prompt_only(truncate_prompt_tokens: int | None = None) -> SamplingParams:
    """Of a request that samples nothing, as one that is pooled."""
    return SamplingParams(
        max_tokens=0, temperature=0.0, truncate_prompt_tokens=truncate_prompt_tokens
    )


MAX_DIGEST_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Data of tokens [start, start + length) of a prompt, such as the image of placeholders.

    Prompts with equal tokens share cached pages only if their attachments are equal too."""

    start: int  # index of the first token in the prompt
    # Number of tokens, to the last placeholder. Tokens between placeholders that are none have
    # their own embedding.
    length: int
    # Identifies the payload and its shape, 1 to 64 bytes: equal digests mean equal embeddings.
    # Set by the front end, never by a client.
    digest: bytes
    payload: bytes = b""  # bytes for the backend: of an image part, its rows of RGB bytes
    width: int = 0  # width, height: of an image part, in pixels
    height: int = 0
    rows: int = 0  # rows, columns: of its placeholders; there are rows * columns
    columns: int = 0

    def __post_init__(self) -> None:
        for name in ("start", "length", "width", "height", "rows", "columns"):
            number = as_number(name, getattr(self, name), NumberBound(0, 1 << 31, is_integer=True))
            object.__setattr__(self, name, number)
        for name in ("digest", "payload"):
            if not isinstance(getattr(self, name), bytes):
                raise InvalidRequestError(
                    f"an attachment's {name} is {show(getattr(self, name))}; it must be bytes",
                    param="attachments",
                )
        if not 0 < len(self.digest) <= MAX_DIGEST_BYTES:
            raise InvalidRequestError(
                f"an attachment's digest has {len(self.digest)} bytes; it must have 1 to "
                f"{MAX_DIGEST_BYTES}",
                param="attachments",
            )

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it. Immutable: lists and arrays are copied to tuples.

    Args:
        prompt_token_ids: the tokens of the prompt; `RequestCheck` requires at least one.
        params: how to sample; of a pooled request those of `prompt_only`, which are also its
            default.
        pooling: how its prompt becomes an embedding; `None` samples.
        bad_word_token_ids: token sequences that are not generated, those of `params.bad_words`.
        attachments: ordered, non-overlapping spans within the prompt.
        constraint: that of `params.structured`.
        prediction: tokens that the output may repeat in part, for drafts; changes no token.
        cache_salt: ASCII; requests share prefix-cache pages only if their salts are equal.
        priority: with `--scheduling-policy priority`, requests with a smaller one start first;
            from -`MAX_PRIORITY` to `MAX_PRIORITY`.
        tenant: among those whose requests wait, service is shared out by weight. Unlike the salt
            it does not separate cached prefixes.
        sparse_prefill: the prompt is pruned; `None` computes all of it.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of bounds.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()
    attachments: tuple[Attachment, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    constraint: ConstraintSpec | None = None
    prediction: tuple[int, ...] = ()
    tenant: Tenant = ONE_TENANT
    pooling: PoolingParams | None = None
    sparse_prefill: SparsePrefill | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise must_be("params", self.params, "SamplingParams")
        if self.pooling is not None:
            object.__setattr__(self, "params", self._checked_pooled())
        ids = as_token_ids("prompt", self.prompt_token_ids)
        object.__setattr__(self, "prompt_token_ids", ids)
        if self.bad_word_token_ids is not _EMPTY:
            object.__setattr__(self, "bad_word_token_ids", self._checked_bad_words())
        if self.prediction is not _EMPTY:
            predicted = as_token_ids("prediction", self.prediction)
            object.__setattr__(self, "prediction", predicted)
        if self.attachments is not _EMPTY:
            object.__setattr__(self, "attachments", self._checked_attachments())
        salt = self.cache_salt
        if not isinstance(salt, str) or not salt.isascii():
            raise must_be("cache_salt", salt, "a text of ASCII characters")
        object.__setattr__(self, "cache_salt", str.__str__(salt))
        object.__setattr__(self, "priority", as_number("priority", self.priority, _PRIORITY))
        constraint: object = self.constraint
        if constraint is not None and not isinstance(constraint, ConstraintSpec):
            raise must_be("constraint", constraint, "a ConstraintSpec")
        if not isinstance(self.tenant, Tenant):
            raise must_be("tenant", self.tenant, "a Tenant")
        if not isinstance(self.sparse_prefill, SparsePrefill | None):
            raise must_be("sparse_prefill", self.sparse_prefill, "a SparsePrefill")

    def _checked_attachments(self) -> tuple[Attachment, ...]:
        given: object = self.attachments
        entries = cast(SequenceOf[object], given if isinstance(given, tuple | list) else [None])
        last, num_tokens = 0, len(self.prompt_token_ids)
        for each in entries:
            if not isinstance(each, Attachment):
                raise must_be("attachments", given, "a tuple of Attachment")
            if not last <= each.start < each.end <= num_tokens:
                raise InvalidRequestError(
                    f"an attachment spans tokens {each.start} to {each.end}; spans hold 1 token or "
                    f"more, are in order, do not overlap and end within the prompt's {num_tokens}",
                    param="attachments",
                )
            last = each.end
        return tuple(cast(SequenceOf[Attachment], entries))

    def _checked_pooled(self) -> SamplingParams:
        if not isinstance(self.pooling, PoolingParams):
            raise must_be("pooling", self.pooling, "PoolingParams")
        params = prompt_only() if self.params == SamplingParams() else self.params
        is_sampled = params != prompt_only(params.truncate_prompt_tokens)
        if is_sampled or self.bad_word_token_ids or self.constraint or self.prediction:
            raise InvalidRequestError(
                "a request with pooling generates nothing, but it has options of generating; "
                "leave out either",
                param="pooling",
            )
        return params

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether each token of the prompt needs a logit row."""
        is_mean = self.pooling is not None and self.pooling.pooling == "mean"
        return is_mean or self.params.prompt_logprobs is not None

    def _checked_bad_words(self) -> tuple[tuple[int, ...], ...]:
        words: object = self.bad_word_token_ids
        if not isinstance(words, tuple | list):
            raise InvalidRequestError(
                f"bad_word_token_ids is {show(words)}; it must hold token ids for each word",
                param="bad_words",
            )
        found = tuple(as_token_ids("bad_words", word) for word in cast(SequenceOf[object], words))
        if not all(found):
            raise InvalidRequestError("bad_words holds an empty word", param="bad_words")
        size = sum(len(word) + 1 for word in found)
        if size > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"bad_words are {size} tokens long, each word counted with one more; at most "
                f"{MAX_BAD_WORD_TOKENS} are allowed: give fewer or shorter words",
                param="bad_words",
            )
        return found
