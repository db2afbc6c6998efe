"""A request's bytes become a `Body`: JSON objects with members declared once, as `Field`s.
Invariants: check and JSON Schema follow from one declaration; null counts as absent; a member that
nothing declares is refused, or among the ignored names, as far as there is room for them."""

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, overload
from urllib.parse import quote

from cadenza.request import show
from cadenza.server.errors import ApiError, Headers, invalid_value, unknown_field
from cadenza.server.fields.types import (
    NULL,
    FieldType,
    Schema,
    String,
    Unsupported,
    anything,
    check_member,
    checked_dict,
    object_schema,
    or_null,
    read_json,
)
from cadenza.text.templates.notices import Notices

logger = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
D = TypeVar("D")
ObjectT = TypeVar("ObjectT", bound="DeclaredObject")

UnknownFields = Literal["refuse", "suggest", "ignore"]
"""`refuse` refuses all that have a value, `suggest` likely typing errors, `ignore` none."""

MAX_IGNORED = 32  # names that are kept of a request
MAX_NEAR_CHECKS = 64  # unknown fields of a request whose names are compared with the known ones
MAX_SHOWN_NAME_CHARS = 64
_LONG_NAME_CHARS, _SHORT_NAME_CHARS = 10, 5

IGNORED_HEADER = "x-cadenza-ignored"
_FIELD = (
    "ignored %s in a request, which is unknown here (said once for each name; --strict-fields "
    "refuses such fields)"
)
_FORMAT = (
    "%s of a schema is an annotation here, which no answer is held to (said once for each name)"
)


class Effect(Enum):
    """What a field's value changes."""

    SAMPLING = "sampling"  # it is one of `SamplingParams`, under its own name
    REQUEST = "request"  # the endpoint reads it
    NONE = "none"  # nothing: a label, or a value that does not use a feature that is not built


class Field(Generic[T_co]):
    """One member of a declared object; an instance has its checked value, or the default.
    `default`: the value for null or absence, shown in the description; None: not fixed. `target` is
    the name under which a body has the value; for an `Alias` it is not `name`."""

    def __init__(
        self,
        type: FieldType[Any],
        help: str,
        *,
        default: object = None,
        is_required: bool = False,
        effect: Effect = Effect.REQUEST,
    ) -> None:
        self.name = self.target = ""
        self.type = type
        self.help = help
        self.default = default
        self.is_required = is_required
        self.effect = effect

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.target = name

    @property
    def is_alias(self) -> bool:
        return self.target != self.name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: "DeclaredObject", owner: type) -> T_co: ...
    def __get__(self, instance: "DeclaredObject | None", owner: type) -> Any:
        return self if instance is None else self.default

    def schema(self) -> Schema:
        described = self.type.schema()
        schema = described if self.is_required else or_null(described)
        shown: Schema = {} if self.default is None else {"default": self.default}
        return {**schema, **shown, **({"description": self.help} if self.help else {})}


class Alias(Field[Any]):
    """Another engine's name of a field; its value is that field's. `targets`: the names of that
    field; the first one that a body has. `type`: of the values, where it is not that field's."""

    def __init__(self, *targets: str, type: FieldType[Any] | None = None) -> None:
        super().__init__(anything, "")
        self._targets = targets
        self._type = type

    def resolved(self, fields: Mapping[str, Field[Any]]) -> Field[Any] | None:
        """The field of a body under this name; None if the body lacks all targets."""
        known = (fields.get(name) for name in self._targets)
        target = next((each for each in known if each and not isinstance(each, Alias)), None)
        if target is None:
            return None
        help = f"Another name of {target.name}."
        field: Field[Any] = Field(self._type or target.type, help, effect=target.effect)
        field.name, field.target = self.name, target.name
        return field


def required(type: FieldType[T], help: str = "") -> Field[T]:
    return Field(type, help, is_required=True)


@overload
def optional(type: FieldType[T], help: str = "") -> Field[T | None]: ...
@overload
def optional(type: FieldType[T], help: str = "", *, default: D) -> Field[T | D]: ...
def optional(type: FieldType[Any], help: str = "", *, default: object = None) -> Field[Any]:
    return Field(type, help, default=default)


def label(type: FieldType[Any], help: str = "") -> Field[None]:
    """A value that does not change the answer; its size is checked, then it is dropped."""
    return Field(type, help, effect=Effect.NONE)


def labels(names: str, type: FieldType[Any] = anything) -> dict[str, Field[Any]]:
    """A label for each of the names, which are separated by blanks."""
    return {name: label(type) for name in names.split()}


def unsupported(what: str, *harmless: object) -> Field[None]:
    """`harmless` are the values that do not use the feature; any other is refused."""
    return Field(Unsupported(what, harmless), f"Not built: {what}.", effect=Effect.NONE)


class DeclaredObject:
    """A JSON object: its subclass declares the members as `Field`s, an instance has the values.
    Members are inherited. `more` are members that code never reads as attributes."""

    more: ClassVar[Mapping[str, Field[Any]]] = {}
    fields: ClassVar[Mapping[str, Field[Any]]] = {}
    effective_names: ClassVar[tuple[str, ...]] = ()
    required_names: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, object]] = {}
    is_open: ClassVar[bool] = False
    """Whether it is data or a hint, in which an unknown name is never taken for a typing error."""

    def __init_subclass__(cls) -> None:
        found: dict[str, Field[Any]] = {}
        for name, each in cls.__dict__.get("more", {}).items():
            each.__set_name__(cls, name)
        for base in reversed(cls.__mro__):
            found |= {name: each for name, each in vars(base).items() if isinstance(each, Field)}
            found |= vars(base).get("more", {})
        resolved = {
            name: each.resolved(found) if isinstance(each, Alias) else each
            for name, each in found.items()
        }
        cls.fields = found = {name: each for name, each in resolved.items() if each is not None}
        cls.effective_names = tuple(
            name
            for name, field in found.items()
            if field.effect is not Effect.NONE and not field.is_alias
        )
        cls.required_names = tuple(name for name, field in found.items() if field.is_required)
        cls.defaults = {name: found[name].default for name in cls.effective_names}

    def __init__(self, values: Mapping[str, Any]) -> None:
        # Instance attributes hide the descriptors of the class, so reading one is no call.
        self.__dict__.update(self.defaults)
        self.__dict__.update(values)
        self.values = values

    @classmethod
    def object_schema(cls) -> Schema:
        members = {name: field.schema() for name, field in cls.fields.items()}
        return object_schema(members, cls.required_names, additionalProperties=further_members())

    @classmethod
    def take_unknown(cls, name: str, key: str) -> None:
        """Ignores an undeclared member, or raises ApiError (400) where the policy refuses it or its
        name is near a declared one."""
        unknown = unknown_members()
        meant = None if cls.is_open else unknown.suggestion(field_of(name), key, cls.fields)
        if meant is not None:
            raise invalid_value(f"{name} has no member {show(key)}; did you mean {meant}?", name)
        if unknown.policy == "refuse":
            known = ", ".join(cls.fields)
            raise invalid_value(f"{name} has no member {show(key)}; it has {known}", name)
        unknown.ignore(f"{field_of(name)}.{key}")


@dataclass(frozen=True, slots=True)
class ObjectOf(Generic[ObjectT]):
    """An object nested in a body."""

    declared: type[ObjectT]

    def check(self, name: str, value: object) -> ObjectT:
        fields, values = self.declared.fields, dict[str, Any]()
        for key, item in checked_dict(name, value).items():
            if item is None:
                continue
            if key not in fields:
                self.declared.take_unknown(name, key)
                continue
            checked = check_member(name, key, fields[key].type, item)
            if fields[key].effect is not Effect.NONE:
                values[key] = checked
        for needed in self.declared.required_names:
            if needed not in values:
                raise invalid_value(f"{name}.{needed} is missing; it is needed here", name)
        return self.declared(values)

    def schema(self) -> Schema:
        return self.declared.object_schema()


class Body(DeclaredObject):
    """`num_bytes`: its encoded size; `ignored`: undeclared names, without effect."""

    model = optional(
        String(min_chars=1, max_chars=256),
        "A name of GET /v1/models; the first of them when absent.",
    )

    def __init__(
        self, values: Mapping[str, Any], num_bytes: int = 0, ignored: Sequence[str] = ()
    ) -> None:
        super().__init__(values)
        self.num_bytes = num_bytes
        self.ignored = ignored

    @classmethod
    def read(cls, body: bytes, unknown: UnknownFields = "suggest") -> Self:
        """Raises ApiError (400) naming the first field at fault."""
        with taking_unknown(UnknownMembers(unknown)) as found:
            values = cls.checked(read_json(body))
        return cls(values, len(body), found.ignored)

    @classmethod
    def check(
        cls, given: Mapping[str, object], unknown: UnknownFields = "suggest"
    ) -> dict[str, Any]:
        """The checked values of the given fields that have an effect. Raises as `read`."""
        with taking_unknown(UnknownMembers(unknown)):
            return cls.checked(given)

    @classmethod
    def checked(cls, given: Mapping[str, object]) -> dict[str, Any]:
        """As `check`, within `taking_unknown`."""
        fields, values, names = cls.fields, dict[str, Any](), dict[str, str]()
        for name, value in given.items():
            if value is None:
                continue
            field = fields.get(name)
            if field is None:
                cls._take_unknown_field(name)
                continue
            checked = field.type.check(name, value)
            if field.effect is Effect.NONE:
                continue
            other = names.setdefault(field.target, name)
            if other != name and values[field.target] != checked:
                raise invalid_value(
                    f"{other} and {name} are two names of one field, and their values differ; give "
                    f"one of them",
                    name,
                )
            values[field.target] = checked
        for name in cls.required_names:
            if name not in values:
                raise invalid_value(f"{name} is missing; it is needed here", name)
        return values

    @classmethod
    def _take_unknown_field(cls, name: str) -> None:
        unknown = unknown_members()
        meant = unknown.suggestion("", name, cls.fields)
        if meant is not None or unknown.policy == "refuse":
            raise unknown_field(name[:64], list(cls.effective_names), meant)
        unknown.ignore(name)


def further_members() -> Schema | bool:
    """The `additionalProperties` of an object's JSON Schema."""
    return NULL if unknown_members().policy == "refuse" else True


def field_of(name: str) -> str:
    """A field without the place in its list: `messages` of `messages[3].content`."""
    return name.partition("[")[0]


class UnknownMembers:
    """The unknown members of one request."""

    def __init__(self, policy: UnknownFields = "suggest") -> None:
        self.policy: UnknownFields = policy
        self._ignored: dict[str, None] = {}
        self._compared: dict[tuple[str, str], str | None] = {}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Each with the field that it is in, as `messages.frob`, in the order of the request."""
        return tuple(self._ignored)

    def suggestion(self, field: str, name: str, known: Iterable[str]) -> str | None:
        """The known name that may be meant. Raises ApiError (400) where a request has too many
        unknown names to compare."""
        if self.policy == "ignore":
            return None
        if (field, name) not in self._compared:
            if len(self._compared) == MAX_NEAR_CHECKS:
                message = f"the request has over {MAX_NEAR_CHECKS} unknown fields; leave them out"
                raise ApiError(400, "unknown_field", message)
            self._compared[field, name] = near_name(name, known)
        return self._compared[field, name]

    def ignore(self, name: str) -> None:
        if len(self._ignored) < MAX_IGNORED:
            self._ignored[name[:MAX_SHOWN_NAME_CHARS]] = None


_CURRENT: ContextVar[UnknownMembers] = ContextVar("unknown members")


@contextmanager
def taking_unknown(members: UnknownMembers) -> Generator[UnknownMembers]:
    """Within it `unknown_members` returns `members`: those of the request being checked."""
    token = _CURRENT.set(members)
    try:
        yield members
    finally:
        _CURRENT.reset(token)


def unknown_members() -> UnknownMembers:
    """Those of the request being checked; outside of a check, new ones that are not read."""
    return _CURRENT.get(None) or UnknownMembers()


def near_name(name: str, known: Iterable[str]) -> str | None:
    """Equal but for case and separators, or one edit away, two for long names; short names have no
    edits."""
    wanted = _plain(name[: 2 * MAX_SHOWN_NAME_CHARS])
    letters = frozenset(wanted)
    most = 0 if len(wanted) < _SHORT_NAME_CHARS else 1 if len(wanted) < _LONG_NAME_CHARS else 2
    found: tuple[int, str] | None = None
    for each in known:
        plain = _plain(each)
        if plain == wanted:
            return each
        is_far = abs(len(plain) - len(wanted)) > most or len(
            letters.symmetric_difference(plain)
        ) > (2 * most)
        if is_far or len(plain) < _SHORT_NAME_CHARS - 1:
            continue
        distance = _edits(wanted, plain)
        if distance <= most and (found is None or distance < found[0]):
            found = (distance, each)
    return None if found is None else found[1]


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def _edits(left: str, right: str) -> int:
    before: list[int] = []
    row = list(range(len(right) + 1))
    for index, letter in enumerate(left, 1):
        before, last, row = row, before, [index]
        for at, other in enumerate(right, 1):
            cost = min(before[at] + 1, row[at - 1] + 1, before[at - 1] + (letter != other))
            is_swap = index > 1 and at > 1 and (letter, left[index - 2]) == (right[at - 2], other)
            row.append(min(cost, last[at - 2] + 1) if is_swap else cost)
    return row[-1]


class IgnoredNames:
    """Of all requests of a server."""

    def __init__(self) -> None:
        self._notices = Notices(logger)

    def headers(self, names: Sequence[str]) -> Headers:
        """The header of the answer to a request in which these fields were ignored."""
        return self._headers([_quoted(name) for name in names], _FIELD)

    def format_headers(self, names: Sequence[str]) -> Headers:
        """Of the formats in a request's schema that are not followed."""
        return self._headers(["format." + _quoted(name)[:64] for name in names], _FORMAT, 16)

    def _headers(self, names: list[str], line: str, most: int | None = None) -> Headers:
        for name in names:
            self._notices.tell(name, line, name)
        return ((IGNORED_HEADER, ", ".join(names[:most])),) if names else ()


def _quoted(name: str) -> str:
    return quote(name, safe="", errors="backslashreplace")
