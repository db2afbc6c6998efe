"""What a client asks (`Request`, `SamplingParams`) and the engine's answers (the `Event`s).

Owns the bounds of every number a client controls. Knows nothing of text, rows or pages.
Invariant: a `SamplingParams` that exists is finite and within bounds.
"""

import re
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from numbers import Real
from operator import index
from typing import Any, Literal, cast

from cadenza.config import MAX_LOGPROBS_BOUND, MAX_SEED, is_whole
from cadenza.errors import InvalidRequestError, show

FinishReason = Literal["stop", "length", "abort", "error"]

ErrorKind = Literal[
    "not_finite",
    "none_allowed",
    "step_failed",
    "text_failed",
    "engine_lost",
    "engine_closed",
    "queue_timeout",
    "request_timeout",
]
"""Why a request ended with an error: its own logits were not finite, or its own options ruled out
every token (the request itself is the cause) · its step failed on the device · its tokens could not
be made text of · the engine died or hung · was shut down · it waited too long in the queue · it
took too long in all."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (the field's convention)."""

MAX_BAD_WORD_TOKENS = 1000
"""Of all of a request's bad words together, each counted with one more."""


@dataclass(frozen=True, slots=True)
class NumberBound:
    """A number from `low` to `high`, whole where `is_whole`, None where `is_optional`."""

    low: float
    high: float
    is_whole: bool = False
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class ListBound:
    """At most `most` entries, each a token id or a text of 1 to `longest` characters."""

    most: int
    longest: int | None = None


BOUNDS: Mapping[str, NumberBound | ListBound] = {
    "max_tokens": NumberBound(0, 1 << 31, is_whole=True, is_optional=True),
    "min_tokens": NumberBound(0, 1 << 31, is_whole=True),
    "temperature": NumberBound(0.0, 100.0),
    "top_k": NumberBound(-1, 1 << 31, is_whole=True),
    "top_p": NumberBound(1e-6, 1.0),
    "min_p": NumberBound(0.0, 1.0),
    "top_n_sigma": NumberBound(-1.0, 100.0),
    "seed": NumberBound(0, MAX_SEED, is_whole=True, is_optional=True),
    "presence_penalty": NumberBound(-2.0, 2.0),
    "frequency_penalty": NumberBound(-2.0, 2.0),
    "repetition_penalty": NumberBound(0.01, 100.0),
    "n": NumberBound(1, 16, is_whole=True),
    "logprobs": NumberBound(0, MAX_LOGPROBS_BOUND, is_whole=True, is_optional=True),
    "prompt_logprobs": NumberBound(0, MAX_LOGPROBS_BOUND, is_whole=True, is_optional=True),
    "truncate_prompt_tokens": NumberBound(1, 1 << 31, is_whole=True, is_optional=True),
    "stop_token_ids": ListBound(128),
    "allowed_token_ids": ListBound(1 << 20),
    "stop": ListBound(4, longest=256),
    "bad_words": ListBound(128, longest=256),
}
"""The bounds of every number and list that a client controls, but for those of a bias."""

_OPTIONAL = frozenset(
    name for name, bound in BOUNDS.items() if isinstance(bound, NumberBound) and bound.is_optional
) | {"allowed_token_ids"}

_EMPTY: tuple[()] = ()
"""The interpreter has one empty tuple only: asking for this very one finds what was left out."""

MAX_BIASES = 300
BIAS = NumberBound(-100.0, 100.0)

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, which no text of UTF-8 holds."""

_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose a request's tokens, and what to tell of them.

    Lists and arrays may be given for tuples, one text for `stop`, a mapping for `logit_bias`, and
    numpy's numbers for Python's; what is kept are tuples and Python's numbers.

    Args:
        max_tokens: at most this many new tokens; `None` means up to `max_model_len`. With 0 the
            prompt is computed, and described where `prompt_logprobs` asks for it.
        min_tokens: what would end the stream is not chosen before this many new tokens.
        temperature: below 1e-5 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1 is off.
        top_p: keep the smallest set of likeliest tokens whose mass reaches `top_p`.
        min_p: drop tokens less likely than `min_p` times the likeliest.
        top_n_sigma: drop tokens whose logit is more than this many standard deviations of all
            allowed tokens' logits below the largest; 0 or less is off.
        seed: fixes the randomness; `None` derives one from the engine's seed and the request id.
        presence_penalty: taken off the logit of every token that was generated.
        frequency_penalty: the same, once for each time.
        repetition_penalty: divides positive logits of tokens of prompt and output, multiplies
            negative ones.
        logit_bias: added to logits: (token id, bias) pairs, at most 300.
        allowed_token_ids: no other token is chosen; `None` allows all.
        bad_words: texts that are not generated.
        n: continuations of the one prompt, each with a seed of its own.
        ignore_eos: the end-of-sequence token does not stop the request.
        stop_token_ids: further tokens that stop it.
        stop: texts that stop it, at most 4.
        include_stop_str_in_output: the text that stopped it is shown.
        skip_special_tokens: special tokens have no text.
        logprobs: log probabilities of the chosen token and of the n likeliest ones; `None` is off.
        prompt_logprobs: the same for each token of the prompt but the first.
        truncate_prompt_tokens: keep this many tokens of the prompt's end; `None` keeps all.

    Raises:
        InvalidRequestError: a value is not of its kind, or not within its bounds.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | SequenceOf[tuple[int, float]] = ()
    allowed_token_ids: SequenceOf[int] | None = None
    bad_words: SequenceOf[str] = ()
    n: int = 1
    ignore_eos: bool = False
    stop_token_ids: SequenceOf[int] = ()
    stop: SequenceOf[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, bound in BOUNDS.items():
            value: Any = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(bound, ListBound):
                if value is _EMPTY:
                    continue
                kept = _as_tuple(name, value, bound)
            elif type(value) is float and not bound.is_whole and bound.low <= value <= bound.high:
                continue  # Python's own number, which is what it nearly always is
            elif type(value) is int and bound.low <= value <= bound.high:
                continue
            else:
                kept = _as_number(name, value, bound)
            object.__setattr__(self, name, kept)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(
                    f"{name} is {show(getattr(self, name))}; it must be true or false", param=name
                )
        if self.logit_bias is not _EMPTY:
            object.__setattr__(self, "logit_bias", _as_biases(self.logit_bias))
        self._check_together()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept: (token id, bias), by rising id."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    def _check_together(self) -> None:
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


MAX_DIGEST_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What stands behind tokens `start` to `start + length` of a prompt, say an image behind its
    placeholders.

    Two prompts of equal tokens share computed pages only where their attachments are the same.

    Args:
        digest: names the payload, 1 to 64 bytes: equal digests mean equal payloads.
        payload: for the backend.
    """

    start: int
    length: int
    digest: bytes
    payload: bytes = b""

    def __post_init__(self) -> None:
        for name in ("start", "length"):
            number = _as_number(name, getattr(self, name), NumberBound(0, 1 << 31, is_whole=True))
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
    """One prompt and how to continue it; frozen, whatever becomes of the lists it was made of.

    Args:
        prompt_token_ids: at least one token; a list or an array is kept as a tuple.
        bad_word_token_ids: the tokens of `params.bad_words`: no sequence of them is generated.
        attachments: in order of their spans, which lie in the prompt and do not overlap.
        cache_salt: requests share prefix-cache pages only under an equal salt.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()
    attachments: tuple[Attachment, ...] = ()
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise InvalidRequestError(
                f"params is {show(self.params)}; it must be SamplingParams", param="params"
            )
        ids = as_token_ids("prompt", self.prompt_token_ids)
        object.__setattr__(self, "prompt_token_ids", ids)
        if self.bad_word_token_ids is not _EMPTY:
            object.__setattr__(self, "bad_word_token_ids", self._checked_bad_words())
        if self.attachments is not _EMPTY:
            object.__setattr__(self, "attachments", self._checked_attachments())
        salt = self.cache_salt
        if not isinstance(salt, str) or not salt.isascii():
            raise InvalidRequestError(
                f"cache_salt is {show(salt)}; it must be a text of ASCII characters",
                param="cache_salt",
            )
        object.__setattr__(self, "cache_salt", str.__str__(salt))

    def _checked_attachments(self) -> tuple[Attachment, ...]:
        found: object = self.attachments
        entries = cast(SequenceOf[object], found if isinstance(found, tuple | list) else [None])
        last, num_tokens = 0, len(self.prompt_token_ids)
        for each in entries:
            if not isinstance(each, Attachment):
                raise InvalidRequestError(
                    f"attachments is {show(found)}; it must be a tuple of Attachment",
                    param="attachments",
                )
            if not last <= each.start < each.end <= num_tokens:
                raise InvalidRequestError(
                    f"an attachment spans tokens {each.start} to {each.end}; spans hold 1 token or "
                    f"more, are in order, do not overlap and end within the prompt's {num_tokens}",
                    param="attachments",
                )
            last = each.end
        return tuple(cast(SequenceOf[Attachment], entries))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities (natural log, of the unmodified logits) at one step.

    `top_ids` and `top_logprobs` are in falling order, as many as the request asked for.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A request was given its first row: it waits in the queue no longer. Once a request."""

    request_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A new token of a sample's stream. Never an end-of-sequence or stop token.

    `num_cached_tokens` comes with a stream's first token: who ends it from outside, say at a stop
    string, hears nothing later.
    """

    request_id: int
    token_id: int
    index: int
    sample: int = 0
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log probabilities of the prompt's tokens from position `start` on; never of the first.

    They come in order as the prompt is read, all before the first `Token` of sample 0.
    """

    request_id: int
    start: int
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The one terminal event of a sample that was not cancelled.

    A request is over when all of its `n` samples are.

    `num_generated_tokens` counts what the model produced, the stopping token included;
    `stop_token_id` is that token where it is one of the request's own `stop_token_ids`;
    `error` and `error_kind` are there together, when `finish_reason` is "error".
    """

    request_id: int
    finish_reason: FinishReason
    stop_token_id: int | None
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    sample: int = 0
    error: str | None = None
    error_kind: ErrorKind | None = None


Event = Started | Token | PromptLogprobs | Finished


def as_token_ids(name: str, value: object) -> tuple[int, ...]:
    """Whole numbers, of a sequence or a one-dimensional array, as a tuple of Python's own.

    Raises:
        InvalidRequestError: it is something else, or holds something else; `name` is its `param`.
    """
    entries = sequence_of(value)
    if entries is None:
        raise InvalidRequestError(f"{name} is {show(value)}; it must be token ids", param=name)
    if set(map(type, entries)) <= {int}:
        return tuple(cast(SequenceOf[int], entries))
    for entry in entries:
        if not is_whole(entry):
            raise InvalidRequestError(
                f"{name} holds {show(entry)}; token ids are whole numbers", param=name
            )
    return tuple(index(cast(int, entry)) for entry in entries)


def sequence_of(value: object) -> SequenceOf[object] | None:
    """The entries of a sequence or an array; None for texts, bytes and what is neither."""
    if isinstance(value, tuple | list):
        return cast(SequenceOf[object], value)
    # numpy's arrays and their like, which this layer does not import.
    as_list = None if isinstance(value, type) else getattr(value, "tolist", None)
    entries: object = as_list() if callable(as_list) else value
    is_text = isinstance(value, memoryview) or isinstance(entries, str | bytes | bytearray)
    is_sequence = isinstance(entries, SequenceOf) and not is_text
    return cast(SequenceOf[object], entries) if is_sequence else None


def _as_number(name: str, value: object, bound: NumberBound) -> int | float:
    is_number = is_whole(value) or (isinstance(value, Real) and not bound.is_whole)
    # Nothing is within bounds of NaN, and an integer of any size can be compared.
    if is_number and not isinstance(value, bool) and bound.low <= cast(float, value) <= bound.high:
        return index(cast(int, value)) if is_whole(value) else float(cast(float, value))
    kind = "a whole number" if bound.is_whole else "a number"
    raise InvalidRequestError(
        f"{name} is {show(value)}; it must be {kind} from {bound.low:g} to {bound.high:g}",
        param=name,
    )


def _as_tuple(name: str, value: object, bound: ListBound) -> tuple[Any, ...]:
    if isinstance(value, str) and name == "stop":
        value = (value,)
    longest = bound.longest
    entries = as_token_ids(name, value) if longest is None else _as_texts(name, value, longest)
    if len(entries) > bound.most:
        raise InvalidRequestError(
            f"{name} has {len(entries)} entries; at most {bound.most} are allowed", param=name
        )
    return entries


def _as_biases(value: object) -> tuple[tuple[int, float], ...]:
    """(token id, bias) by rising id; of a token named twice the last bias counts."""
    is_mapping = isinstance(value, Mapping)
    given = cast(Mapping[object, object], value).items() if is_mapping else sequence_of(value)
    try:
        biases = dict(cast(SequenceOf[tuple[int, float]], given))
    except (TypeError, ValueError):
        raise InvalidRequestError(
            f"logit_bias is {show(value)}; it must be a bias for each token id",
            param="logit_bias",
        ) from None
    if len(biases) > MAX_BIASES:
        raise InvalidRequestError(
            f"logit_bias has {len(biases)} entries; at most {MAX_BIASES} are allowed",
            param="logit_bias",
        )
    ids = as_token_ids("logit_bias", tuple(biases))
    numbers = [_as_number("logit_bias", bias, BIAS) for bias in biases.values()]
    return tuple(sorted(cast(list[tuple[int, float]], [*zip(ids, numbers, strict=True)])))


def _as_texts(name: str, texts: object, longest: int) -> tuple[str, ...]:
    if not isinstance(texts, tuple | list):
        raise InvalidRequestError(
            f"{name} is {show(texts)}; it must be a list of texts", param=name
        )
    for text in cast(SequenceOf[object], texts):
        if not isinstance(text, str) or not 0 < len(text) <= longest or _SURROGATE.search(text):
            raise InvalidRequestError(
                f"{name} holds {show(text)}; each entry is a text of 1 to {longest} whole "
                f"characters",
                param=name,
            )
    return tuple(str.__str__(text) for text in cast(SequenceOf[str], texts))
