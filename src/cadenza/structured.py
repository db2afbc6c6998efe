"""What an answer's text must be: `StructuredOutput` as a client asks for it, `ConstraintSpec`, to
which the text front end resolves it, and `Constraint`, which says what may follow in a stream. Owns
the bounds on their size; knows no tokens and no grammar."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, cast, get_args

from cadenza.errors import InvalidRequestError, show

# Most bytes of a schema, an expression, a grammar, or all choices together.
MAX_STRUCTURED_BYTES = 64 << 10

MAX_CHOICES = 4096

# Blanks in constrained JSON: one space or a line's indentation where JSON is usually written with
# them; none; up to 16 between all tokens.
Whitespace = Literal["usual", "compact", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonStyle:
    """How constrained JSON is written where its schema does not say."""

    whitespace: Whitespace = "usual"
    # Characters of a text without a bound; None: as many as the model likes.
    max_string: int | None = None
    max_items: int | None = None  # items of a list, and members of an object, without a bound
    max_depth: int | None = None  # levels of free JSON, and of what refers to itself


# The members of a `StructuredOutput` of which one is given.
FORMS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The form of an answer; exactly one of json, json_object, regex, choice and grammar is given.

    Args:
        json: a JSON Schema, as an object or its text; stored as text.
        json_object: any JSON object.
        regex: a regular expression that the whole answer matches.
        choice: the answer is one of these texts.
        grammar: a grammar in Lark's notation, or in GBNF, whose rules have `::=`.
        whitespace: of JSON; None: as it is usually written.
        strict: refuse a schema with keywords that no grammar holds, in place of checking the answer
            at its end.

    Raises:
        InvalidRequestError: none or several are given, or one has the wrong type or is too large.
    """

    json: Mapping[str, Any] | bool | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    whitespace: Whitespace | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise _refused(f"has {found}; give one of json, json_object, regex, choice and grammar")
        if not isinstance(self.json_object, bool):
            raise _refused(f"has json_object {show(self.json_object)}; it must be true or false")
        if self.whitespace not in (None, *get_args(Whitespace)):
            raise _refused(
                f"has whitespace {show(self.whitespace)}; give one of "
                f"{', '.join(get_args(Whitespace))}"
            )
        if self.whitespace is not None and given[0] not in ("json", "json_object"):
            raise _refused(f"has whitespace, which is of JSON only; leave it out with {given[0]}")
        if not isinstance(self.strict, bool):
            raise _refused(f"has strict {show(self.strict)}; it must be true or false")
        if self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", _json_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choice(self.choice))
        for name in ("json", "regex", "grammar"):
            _check_text(name, getattr(self, name))

    @property
    def kind(self) -> str:
        return self._given()[0]

    def _given(self) -> list[str]:
        named = [(name, getattr(self, name)) for name in FORMS]
        return [
            name
            for name, value in named
            if value is not None and (value is not False or name != "json_object")
        ]


def as_structured(given: object) -> StructuredOutput:
    """Of a mapping of its members, with vLLM's `disable_any_whitespace` as compact whitespace, too.
    Raises InvalidRequestError."""
    if isinstance(given, StructuredOutput):
        return given
    is_mapping = isinstance(given, Mapping)
    members = {**cast(Mapping[str, Any], cast(object, given))} if is_mapping else {}
    if members.pop("disable_any_whitespace", None) is True:
        members.setdefault("whitespace", "compact")
    known = [each.name for each in fields(StructuredOutput)]
    unknown = [show(name) for name in members if name not in known]
    if unknown or not members:
        raise _refused(
            f"is {show(given)}; it must be a StructuredOutput, or a mapping of {', '.join(known)}"
        )
    return StructuredOutput(**members)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBound:
    """The most tokens of a stream's thinking; then the token that ends it is forced."""

    begin: int | None  # the token that begins it; None where the prompt does
    end: int  # the token that ends it
    max_tokens: int
    before: tuple[int, ...] = ()  # the tokens that must stand in front of `begin`
    recurs: bool = False  # further thinking may follow, which counts alike


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRule:
    """What a call of a tool may be, in an answer that may be any text: constrained from where
    its beginning is written up to its end, as often as one begins after the reasoning."""

    begin: str  # a regular expression of a call's beginning
    grammar: str  # of the text after the beginning, up to the call's end
    is_read: bool = False  # the beginning is a part of what the grammar is of
    # The marks around reasoning, in which nothing is constrained; None: there is none.
    reasoning: tuple[str, str] | None = None
    has_begun: bool = False  # the prompt has the mark that begins reasoning
    is_needed: bool = False  # an answer whose calls cannot be constrained is an error
    prompt_end: str = ""  # the end of the prompt, where that may be a part of a beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintSpec:
    """What decides which tokens may follow in a stream."""

    # Of the text from the stream's first token on, in the form of the library that compiles it;
    # None: any text.
    grammar: str | None = None
    thinking: ThinkingBound | None = None
    # Of calls, where there is no grammar. An engine without constraints leaves them out unless
    # they are needed.
    calls: CallRule | None = None

    @property
    def is_needed(self) -> bool:
        """Whether an answer without it would not be what was asked for."""
        are_calls_needed = self.calls is not None and self.calls.is_needed
        return self.grammar is not None or self.thinking is not None or are_calls_needed


class Constraint(Protocol):
    """Which tokens may follow in one stream: a function of the tokens that it accepted, so that it
    is rebuilt from them wherever the stream goes on."""

    @property
    def is_complete(self) -> bool:
        """Nothing may follow: the stream ends after its last token."""
        ...

    @property
    def has_failed(self) -> bool:
        """A limit was reached, or a token was accepted that it forbids."""
        ...

    def accept(self, token_id: int) -> None:
        """Takes the stream's next token."""
        ...

    def allowed(self) -> bytes:
        """One bit for each token, the least significant first; bits beyond the vocabulary have no
        meaning."""
        ...

    def forced(self) -> Sequence[int]:
        """The next tokens, as far as it is known that no others may follow."""
        ...

    def fork(self) -> "Constraint | None":
        """A constraint of the same state, to try drafts on, until the next fork; None while it is
        being compiled. Nothing that it accepts, and no limit that it reaches, changes this one."""
        ...


class PendingConstraint(Protocol):
    """Compiled on another thread."""

    def done(self) -> bool: ...

    def cancel(self) -> bool:
        """False if it has begun. Nothing may be asked of it after."""
        ...

    def result(self, timeout: float | None = None) -> Constraint | None:
        """Waits at most `timeout` seconds; None if it cannot be compiled. Raises TimeoutError."""
        ...


# Starts compiling a constraint, which has accepted no token.
CompileConstraint = Callable[[ConstraintSpec], PendingConstraint]


def _refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the structured output {problem}", param="structured")


def _json_text(schema: object) -> str:
    if not isinstance(schema, Mapping | bool):
        raise _refused(f"has json {show(schema)}; it must be a JSON Schema: an object, or its text")
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise _refused(
            "has a json that is not plain JSON; give objects, lists and scalars"
        ) from None


def _checked_choice(choice: object) -> tuple[str, ...]:
    is_list = isinstance(choice, list | tuple)
    texts = cast(Sequence[object], choice) if is_list else ()
    if not texts or not all(isinstance(each, str) and each for each in texts):
        raise _refused(f"has choice {show(choice)}; it must be a list of texts, none of them empty")
    if len(texts) > MAX_CHOICES:
        raise _refused(f"has {len(texts)} choices; at most {MAX_CHOICES} are allowed")
    found = tuple(cast(Sequence[str], texts))
    _check_text("choice", "".join(found))
    return found


def _check_text(name: str, text: object) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise _refused(f"has {name} {show(text)}; it must be a text")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _refused(f"has half a surrogate pair in {name}; send whole characters") from None
    if size > MAX_STRUCTURED_BYTES:
        raise _refused(f"has {size} bytes in {name}; at most {MAX_STRUCTURED_BYTES} are allowed")
