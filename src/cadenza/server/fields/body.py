"""A request's bytes become a `Body`: JSON objects with members declared once, as `Field`s.
Invariant: check and JSON Schema follow from one declaration; null counts as absent; an instance
holds only checked values with an effect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

from cadenza.request import show
from cadenza.server.errors import invalid_value, unknown_field
from cadenza.server.fields.json_text import read_json
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
)
from cadenza.server.fields.unknown_members import (
    UnknownFields,
    UnknownMembers,
    taking_unknown,
    unknown_members,
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
D = TypeVar("D")
ObjectT = TypeVar("ObjectT", bound="DeclaredObject")


class Effect(Enum):
    """What a field's value changes."""

    SAMPLING = "sampling"
    """It is one of `SamplingParams`, under its own name."""
    REQUEST = "request"
    """The endpoint reads it."""
    NONE = "none"
    """Nothing: a label, or a value that does not use a feature that is not built."""


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
