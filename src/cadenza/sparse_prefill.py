"""Sparse prefill: the value of --spec-prefill, a request's choice, and the tokens that are computed
(`KeptTokens`): the chunks of `CHUNK` tokens that a draft model scores highest. What is kept follows
from the request and the settings, never from load. A token's index counts the whole prompt, its
position the computed tokens. Source: SpecPrefill, arXiv 2502.02789."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from math import ceil, isfinite
from numbers import Real
from typing import Any, Literal, NamedTuple, cast, get_args

from cadenza.errors import ConfigError, InvalidRequestError, must_be, show
from cadenza.speculative_config import DraftQuantization, options_of

CHUNK = 32  # tokens that are kept or left out together; the last chunk of a prompt may have fewer

# Queries that score a prompt: its last token and the tokens that the draft generates after it.
LOOK_AHEAD = 8

LOOK_AHEAD_TOKENS = LOOK_AHEAD - 1  # tokens after a prompt that its scoring computes

# Keys whose attention is averaged, centred on each key; those outside the prompt count as 0.
POOL = 13

LAST_TOKENS = 64  # the last tokens of a prompt, which are always kept

LEAST_KEEP, MOST_KEEP = 0.01, 1.0

When = Literal["always", "cold"]


class PromptSpan(NamedTuple):
    """Tokens [start, stop) of a prompt."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePrefill:
    """How a request's prompt is pruned. Raises InvalidRequestError: a value has the wrong
    type or is out of bounds."""

    keep: float  # the fraction of chunks that is kept, from 0.01 to 1
    # Spans whose chunks are kept whatever they score; the first chunk and the last 64 tokens
    # are, besides. More than `keep` allows are all kept, and nothing else.
    forced: tuple[PromptSpan, ...] = ()
    # "cold" computes the whole prompt where more of it than `cold_from` tokens is in the prefix
    # cache, the one case in which what was computed before decides.
    when: When = "always"
    cold_from: int = 0  # see `when`
    # The chunks that an earlier computation of the request kept (`KeptTokens.mask`); the prompt
    # is then not scored.
    kept: bytes | None = None

    def __post_init__(self) -> None:
        if not LEAST_KEEP <= self.keep <= MOST_KEEP:
            raise must_be("keep", self.keep, f"a number from {LEAST_KEEP} to {MOST_KEEP:g}")
        spans = tuple(PromptSpan(*each) for each in self.forced)
        for start, stop in spans:
            if not 0 <= start < stop:
                raise InvalidRequestError(
                    f"spec_prefill: the span from {show(start)} to {show(stop)} is not one; it "
                    f"must begin at 0 or later and end behind its beginning",
                    param="spec_prefill",
                )
        object.__setattr__(self, "forced", spans)

    def forced_chunks(self, num_tokens: int) -> frozenset[int]:
        spans = (
            *self.forced,
            PromptSpan(0, 1),
            PromptSpan(max(0, num_tokens - LAST_TOKENS), num_tokens),
        )
        return frozenset(chain.from_iterable(_chunks_of(span, num_tokens) for span in spans))

    def num_kept_chunks(self, num_tokens: int) -> int:
        wanted = ceil(num_chunks(num_tokens) * self.keep)
        return max(wanted, len(self.forced_chunks(num_tokens)))

    def num_kept_tokens(self, num_tokens: int) -> int:
        """The last chunk, which may be shorter, is always among them."""
        missing = num_chunks(num_tokens) * CHUNK - num_tokens
        return self.num_kept_chunks(num_tokens) * CHUNK - missing

    def select(self, scores: Sequence[float], num_tokens: int) -> "KeptTokens":
        """The forced chunks and those that score highest, of equal ones the earlier. `scores`: [C],
        finite."""
        assert len(scores) == num_chunks(num_tokens), "each chunk has a score"
        kept = set(self.forced_chunks(num_tokens))
        count = self.num_kept_chunks(num_tokens) - len(kept)
        others = (chunk for chunk in range(len(scores)) if chunk not in kept)
        kept.update(sorted(others, key=lambda chunk: (-scores[chunk], chunk))[:count])
        return KeptTokens(num_prompt_tokens=num_tokens, chunks=tuple(sorted(kept)))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """Of `chunks`, ascending; the first and the last chunk are among them."""

    num_prompt_tokens: int
    chunks: tuple[int, ...]

    def __post_init__(self) -> None:
        last = num_chunks(self.num_prompt_tokens) - 1
        assert {0, last} <= {*self.chunks}, "both ends are kept"
        assert all(a < b for a, b in zip(self.chunks, self.chunks[1:], strict=False)), "ascending"

    @property
    def num_tokens(self) -> int:
        missing = num_chunks(self.num_prompt_tokens) * CHUNK - self.num_prompt_tokens
        return len(self.chunks) * CHUNK - missing

    @property
    def num_skipped(self) -> int:
        return self.num_prompt_tokens - self.num_tokens

    def index_of(self, position: int) -> int:
        """Of the token at a position of what is computed, prompt or output."""
        if position >= self.num_tokens:
            return position + self.num_skipped
        return self.chunks[position // CHUNK] * CHUNK + position % CHUNK

    def indices(self, start: int, stop: int) -> list[int]:
        """Of the tokens at positions [start, stop)."""
        return [self.index_of(position) for position in range(start, stop)]

    def first_position_from(self, index: int) -> int:
        """The first whose token has an index of at least `index`."""
        if index >= self.num_prompt_tokens:
            return index - self.num_skipped
        rank = bisect_left(self.chunks, index // CHUNK)
        start = self.chunks[rank] * CHUNK
        return rank * CHUNK + max(0, index - start)

    @property
    def num_dense(self) -> int:
        return self.first_gap * CHUNK if self.num_skipped else self.num_prompt_tokens

    @property
    def first_gap(self) -> int:
        """The first chunk that is left out; the number of chunks if none is."""
        for rank, chunk in enumerate(self.chunks):
            if rank != chunk:
                return rank
        return len(self.chunks)

    def of_prompt(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        spans = (token_ids[chunk * CHUNK : (chunk + 1) * CHUNK] for chunk in self.chunks)
        return tuple(chain.from_iterable(spans))

    @property
    def mask(self) -> bytes:
        """A bit for each chunk, the lowest of the first byte for the first."""
        bits = sum(1 << chunk for chunk in self.chunks)
        return bits.to_bytes(-(-num_chunks(self.num_prompt_tokens) // 8), "little")


def kept_of_mask(mask: bytes, num_tokens: int) -> KeptTokens:
    """Raises InvalidRequestError where the mask is not of such a prompt."""
    bits = int.from_bytes(mask, "little")
    count = num_chunks(num_tokens)
    chunks = tuple(chunk for chunk in range(count) if bits >> chunk & 1)
    is_whole = len(mask) == -(-count // 8) and not bits >> count
    if not is_whole or not chunks or chunks[0] != 0 or chunks[-1] != count - 1:
        raise InvalidRequestError(
            f"spec_prefill: {show(mask)} does not say which chunks of a prompt of {num_tokens} "
            f"tokens were kept; it must be what an answer to that prompt had",
            param="spec_prefill",
        )
    return KeptTokens(num_prompt_tokens=num_tokens, chunks=chunks)


def num_chunks(num_tokens: int) -> int:
    return -(-num_tokens // CHUNK)


def chunk_scores(token_scores: Iterable[float], num_tokens: int) -> list[float]:
    """The mean of each chunk's tokens, added in order in float64. Raises ValueError for one not
    finite."""
    scores = [float(score) for score in token_scores]
    assert len(scores) == num_tokens, "each token has a score"
    found: list[float] = []
    for start in range(0, num_tokens, CHUNK):
        chunk, total = scores[start : start + CHUNK], 0.0
        for score in chunk:
            total += score
        found.append(total / len(chunk))
    if not all(map(isfinite, found)):
        raise ValueError("a score of the prompt is not finite")
    return found


def _chunks_of(span: PromptSpan, num_tokens: int) -> range:
    stop = min(span.stop, num_tokens)
    return range(
        span.start // CHUNK, num_chunks(stop) if stop > span.start else span.start // CHUNK
    )


MAX_THRESHOLD = 1 << 24
MAX_SPANS = 64  # that a request may have kept

NO_MODEL = "none"

_FLAG = "--spec-prefill"
_EXAMPLE = 'write for example {"model": "small-model", "keep": 0.3}'


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecPrefillConfig:
    """How prompts are pruned. Raises ConfigError: a value is outside its bounds."""

    # The draft model that scores prompts, as models are named; None is the one that the package
    # has for the bundled model. "none": there is none, and only prompts are pruned whose
    # kept chunks are given, as a receipt gives them.
    model: str | None = None
    # How the draft model's weights are quantised while they are loaded.
    quantization: DraftQuantization = "none"
    keep: float = 0.3  # the fraction of a prompt's chunks that is computed
    threshold: int = 8192  # shorter prompts are computed whole, in tokens
    # The first tokens of a conversation, its system texts and tools, that are always kept, at
    # most.
    head: int = 2048
    when: When = "always"  # as in `SparsePrefill`; also "cold"
    # Whether requests may choose for themselves; they may always choose none.
    allow_request: bool = True
    # Thin out also where that is predicted to take longer than computing the whole.
    force: bool = False

    def __post_init__(self) -> None:
        name: object = self.model
        if name is not None and not (isinstance(name, str) and name and name.isprintable()):
            raise ConfigError(
                f"{_FLAG}: the model {show(name)} must be a folder, a GGUF file or a hub model as "
                f"owner/model; {_EXAMPLE}"
            )
        if not _is_fraction(self.keep):
            raise ConfigError(
                f"{_FLAG}: keep {show(self.keep)} must be a number from {LEAST_KEEP} to "
                f"{MOST_KEEP:g}"
            )
        object.__setattr__(self, "keep", float(self.keep))
        for key in ("threshold", "head"):
            value = getattr(self, key)
            if type(value) is not int or not 0 <= value <= MAX_THRESHOLD:
                raise ConfigError(
                    f"{_FLAG}: {key} {show(value)} must be a whole number from 0 to {MAX_THRESHOLD}"
                )
        for key in ("allow_request", "force"):
            if not isinstance(getattr(self, key), bool):
                raise ConfigError(
                    f"{_FLAG}: {key} {show(getattr(self, key))} must be true or false"
                )
        for key, known in (("when", get_args(When)), ("quantization", get_args(DraftQuantization))):
            if getattr(self, key) not in known:
                raise ConfigError(
                    f"{_FLAG}: {key} {show(getattr(self, key))} is not one of {', '.join(known)}"
                )
        for key in ("model", "when", "quantization"):
            given = getattr(self, key)
            # Of a subclass of str only the text can go to another process.
            object.__setattr__(self, key, None if given is None else str.__str__(given))

    @property
    def has_model(self) -> bool:
        return self.model != NO_MODEL


def parse_spec_prefill(value: object) -> SpecPrefillConfig:
    """From a JSON object, as text or parsed. Raises ConfigError."""
    if isinstance(value, SpecPrefillConfig):
        return value
    known = [field.name for field in fields(SpecPrefillConfig)]
    return SpecPrefillConfig(**options_of(_FLAG, value, known, _EXAMPLE))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecPrefillChoice:
    """What a request says about its own prompt; what is None is as the server is configured.
    Raises InvalidRequestError: a value has the wrong type or is out of bounds."""

    keep: float | None = None  # keep, threshold, when: as in `SpecPrefillConfig`
    threshold: int | None = None
    when: When | None = None
    # Tokens [start, stop) of the prompt that are kept whatever they score.
    spans: tuple[PromptSpan, ...] = ()

    def __post_init__(self) -> None:
        if self.keep is not None:
            if not _is_fraction(self.keep):
                wanted = f"a number from {LEAST_KEEP} to {MOST_KEEP:g}"
                raise _wrong("keep", self.keep, wanted)
            object.__setattr__(self, "keep", float(self.keep))
        if self.threshold is not None and not _is_whole(self.threshold, MAX_THRESHOLD):
            wanted = f"a whole number from 0 to {MAX_THRESHOLD}"
            raise _wrong("threshold", self.threshold, wanted)
        if self.when is not None and self.when not in get_args(When):
            raise _wrong("when", self.when, f"one of {', '.join(get_args(When))}")
        object.__setattr__(self, "spans", _as_spans(self.spans))


# A request's choice: True and an object ask for it, False for the whole prompt, None leaves it to
# the server.
SpecPrefill = bool | SpecPrefillChoice | None


def as_spec_prefill(value: object) -> SpecPrefill:
    """May be a mapping. Raises InvalidRequestError."""
    if value is None or isinstance(value, bool | SpecPrefillChoice):
        return value
    known = [field.name for field in fields(SpecPrefillChoice)]
    if not isinstance(value, Mapping) or not set(cast(Mapping[Any, Any], value)) <= {*known}:
        wanted = f"true, false or an object with some of {', '.join(known)}"
        raise must_be("spec_prefill", cast(object, value), wanted)
    return SpecPrefillChoice(**cast(Mapping[str, Any], value))


def _wrong(name: str, given: object, wanted: str) -> InvalidRequestError:
    found = must_be(f"spec_prefill.{name}", given, wanted)
    return InvalidRequestError(str(found), param="spec_prefill")


def _is_fraction(value: object) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and LEAST_KEEP <= cast(float, value) <= MOST_KEEP


def _is_whole(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _as_spans(given: object) -> tuple[PromptSpan, ...]:
    entries = cast(list[object], given) if isinstance(given, tuple | list) else [None]
    found = tuple(span for each in entries if (span := _as_span(each)) is not None)
    if len(found) < len(entries) or len(found) > MAX_SPANS:
        wanted = f"a list of at most {MAX_SPANS} spans [start, stop) of tokens, none of them empty"
        raise _wrong("spans", cast(object, given), wanted)
    return found


def _as_span(given: object) -> PromptSpan | None:
    ends = cast(list[int], given) if isinstance(given, tuple | list) else []
    is_span = len(ends) == 2 and all(_is_whole(end, 1 << 31) for end in ends) and ends[0] < ends[1]
    return PromptSpan(ends[0], ends[1]) if is_span else None
