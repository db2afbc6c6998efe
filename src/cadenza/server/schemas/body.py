"""A request's bytes become a `Body`: JSON objects whose members are declared once, as `Field`s.

Owns declaring, checking and describing objects, and the bounds on the size and depth of JSON. Knows
no field. Invariant: the check and the JSON Schema follow from the same declaration; null counts as
absent; an instance holds only values that were checked and have an effect.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    Protocol,
    Self,
    TypeVar,
    cast,
    overload,
    runtime_checkable,
)

import msgspec

from cadenza.request import show
from cadenza.server.errors import ApiError, invalid_json, invalid_value, unknown_field
from cadenza.server.schemas.field_types import (
    NULL,
    FieldType,
    Schema,
    String,
    Unsupported,
    check_member,
    or_null,
    refuse,
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
D = TypeVar("D")
ObjectT = TypeVar("ObjectT", bound="DeclaredObject")

UnknownFields = Literal["refuse", "ignore"]
"""How undeclared fields that have a value are treated."""


@runtime_checkable
class HasMembers(Protocol):
    """A type of values in which unknown members can be ignored."""

    def ignoring(self) -> FieldType[Any]: ...


MAX_JSON_DEPTH = 64
MAX_LENIENT_BYTES = 1 << 16
"""Up to this size a body that is not strict JSON is decoded again by a decoder that allows NaN."""


class Effect(Enum):
    """What a value changes."""

    SAMPLING = "sampling"
    """It is one of `SamplingParams`, under its own name."""
    REQUEST = "request"
    """The endpoint reads it."""
    NONE = "none"
    """Nothing: a label, or a value that does not use a feature that is not built."""


class Field(Generic[T_co]):
    """One member of a declared object; an instance has its checked value, or the default.

    Args:
        default: the value for null or absence, shown in the description; None: it depends.
    """

    def __init__(
        self,
        type: FieldType[Any],
        help: str,
        *,
        default: object = None,
        is_required: bool = False,
        effect: Effect = Effect.REQUEST,
    ) -> None:
        self.name = ""
        self.type = type
        self.help = help
        self.default = default
        self.is_required = is_required
        self.effect = effect

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: "DeclaredObject", owner: type) -> T_co: ...
    def __get__(self, instance: "DeclaredObject | None", owner: type) -> Any:
        return self if instance is None else self.default

    def type_with(self, unknown: UnknownFields) -> FieldType[Any]:
        found: object = self.type
        if unknown == "ignore" and isinstance(found, HasMembers):
            return found.ignoring()
        return self.type

    def schema(self, unknown: UnknownFields = "refuse") -> Schema:
        described = self.type_with(unknown).schema()
        schema = described if self.is_required else or_null(described)
        shown: Schema = {} if self.default is None else {"default": self.default}
        return {**schema, **shown, **({"description": self.help} if self.help else {})}


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


def unsupported(what: str, *harmless: object) -> Field[None]:
    """`harmless` are the values that do not use the feature; any other is refused."""
    return Field(Unsupported(what, harmless), f"Not built: {what}.", effect=Effect.NONE)


class DeclaredObject:
    """A JSON object: its subclass declares the members as `Field`s, an instance has the values.

    Subclasses of a subclass have its members, too.
    """

    fields: ClassVar[Mapping[str, Field[Any]]] = {}
    effective_names: ClassVar[tuple[str, ...]] = ()
    """Of the fields that change something."""
    required_names: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, object]] = {}

    def __init_subclass__(cls) -> None:
        found: dict[str, Field[Any]] = {}
        for base in reversed(cls.__mro__):
            found |= {name: each for name, each in vars(base).items() if isinstance(each, Field)}
        cls.fields = found
        cls.effective_names = tuple(
            name for name, field in found.items() if field.effect is not Effect.NONE
        )
        cls.required_names = tuple(name for name, field in found.items() if field.is_required)
        cls.defaults = {name: found[name].default for name in cls.effective_names}

    def __init__(self, values: Mapping[str, Any]) -> None:
        # Instance attributes hide the descriptors of the class, so reading one is no call.
        self.__dict__.update(self.defaults)
        self.__dict__.update(values)
        self.values = values

    @classmethod
    def object_schema(cls, unknown: UnknownFields = "refuse") -> Schema:
        fields = cls.fields.values()
        return {
            "type": "object",
            "properties": {field.name: field.schema(unknown) for field in fields},
            "required": list(cls.required_names),
            "additionalProperties": NULL if unknown == "refuse" else True,
        }


@dataclass(frozen=True, slots=True)
class ObjectOf(Generic[ObjectT]):
    """An object nested in a body; all of its members are optional."""

    declared: type[ObjectT]

    def check(self, name: str, value: object) -> ObjectT:
        if not isinstance(value, dict):
            raise refuse(name, value, "an object")

        fields, values = self.declared.fields, dict[str, Any]()
        for key, item in cast(dict[str, object], value).items():
            if item is None:
                continue
            if key not in fields:
                known = ", ".join(fields)
                raise invalid_value(f"{name} has no member {show(key)}; it has {known}", name)
            checked = check_member(name, key, fields[key].type, item)
            if fields[key].effect is not Effect.NONE:
                values[key] = checked
        return self.declared(values)

    def schema(self) -> Schema:
        return self.declared.object_schema()


class Body(DeclaredObject):
    """The body of a request; `num_bytes` is its encoded size."""

    model = optional(
        String(min_chars=1, max_chars=256),
        "A name of GET /v1/models; the first of them when absent.",
    )

    def __init__(self, values: Mapping[str, Any], num_bytes: int = 0) -> None:
        super().__init__(values)
        self.num_bytes = num_bytes

    @classmethod
    def read(cls, body: bytes, unknown: UnknownFields = "refuse") -> Self:
        """Raises ApiError (400) naming the first field at fault."""
        return cls(cls.check(read_json(body), unknown), len(body))

    @classmethod
    def check(
        cls, given: Mapping[str, object], unknown: UnknownFields = "refuse"
    ) -> dict[str, Any]:
        """The checked values of the fields that are there and have an effect; as `read`."""
        fields, values = cls.fields, dict[str, Any]()
        for name, value in given.items():
            if value is None:
                continue
            field = fields.get(name)
            if field is not None:
                checked = field.type_with(unknown).check(name, value)
                if field.effect is not Effect.NONE:
                    values[name] = checked
            elif unknown == "refuse":
                raise unknown_field(name[:64], list(cls.effective_names))
        for name in cls.required_names:
            if name not in values:
                raise invalid_value(f"{name} is missing; it is needed here", name)
        return values


def read_json(body: bytes) -> dict[str, Any]:
    """A JSON object nested at most `MAX_JSON_DEPTH` deep. Raises ApiError (400).

    Its numbers may still be NaN or of any size, so that the field they stand in can be named.
    """
    try:
        value = _decode(body)
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise invalid_json("is no JSON object")
    if body.count(b"[") + body.count(b"{") > MAX_JSON_DEPTH:
        _check_depth(cast(object, value))
    return cast(dict[str, Any], value)


def _decode(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except (ValueError, UnicodeDecodeError):
        if len(body) > MAX_LENIENT_BYTES:
            raise invalid_json("is not valid JSON") from None
    try:
        return json.loads(body.decode("utf-8"))
    except ValueError:
        raise invalid_json("is not valid JSON") from None


def _check_depth(value: object) -> None:
    """Walks level by level; lists without lists in them cost one pass."""
    level: list[object] = [value]
    for _ in range(MAX_JSON_DEPTH):
        deeper: list[object] = []
        for item in level:
            members = cast(list[object], list(item.values()) if isinstance(item, dict) else item)
            deeper += [member for member in members if isinstance(member, dict | list)]
        if not deeper:
            return
        level = deeper
    raise _too_deep()


def _too_deep() -> ApiError:
    return invalid_json(f"is nested over {MAX_JSON_DEPTH} deep")
