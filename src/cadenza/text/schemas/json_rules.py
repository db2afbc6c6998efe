"""`JsonRules`: JSON as rules and terminals in Lark's notation; owns where blanks may stand.
`number_terminal`: numbers within bounds; without a bound a model may write digits for ever."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, cast

from cadenza.structured import JsonStyle

_WORD = re.compile(r"\w+")
_CHAR = r'([^"\\\x00-\x1F\x7F]|\\["\\bfnrt]|\\u00([01][0-9a-fA-F]|7[fF]))'
# Each name of a member has one spelling, so that those that are taken are excluded.
_KEY_CHAR = r'([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])'
_LINE = r"\n( {0,32}|\t{0,8})"
_ANY_BLANKS = r"[ \n\t]{0,16}"
MAX_COUNT = 1 << 31


class _Blanks(NamedTuple):
    """Expressions of what may stand behind and before the tokens of JSON."""

    inside: str
    before_comma: str
    behind_comma: str
    behind_colon: str


_BLANKS: Mapping[str, _Blanks] = {
    "usual": _Blanks(f"( |{_LINE})?", "", f"( |{_LINE})?", " ?"),
    "compact": _Blanks("", "", "", ""),
    "any": _Blanks(_ANY_BLANKS, _ANY_BLANKS, _ANY_BLANKS, _ANY_BLANKS),
}


def library_options(style: JsonStyle) -> dict[str, object]:
    blanks = _BLANKS[style.whitespace]
    return {
        "item_separator": f"{blanks.before_comma},{blanks.behind_comma}",
        "key_separator": f"{blanks.before_comma}:{blanks.behind_colon}",
        "whitespace_flexible": False,
    }


class Extra(NamedTuple):
    """What may follow the named members of an object, so many times."""

    member: str
    least: int
    most: int | None


class JsonRules:
    """Rules and terminals by their bodies; equal bodies are one."""

    def __init__(self, style: JsonStyle) -> None:
        blanks = _BLANKS[style.whitespace]
        self._max_string = style.max_string
        self._names: dict[str, str] = {}
        self.bodies = {
            "OPEN": rf"/\{{{blanks.inside}/",
            "CLOSE": rf"/{blanks.inside}\}}/",
            "EMPTY": rf"/\{{{blanks.inside}\}}/",
            "LIST": rf"/\[{blanks.inside}/",
            "END": rf"/{blanks.inside}\]/",
            "NONE": rf"/\[{blanks.inside}\]/",
            "COMMA": f"/{blanks.before_comma},{blanks.behind_comma}/",
            "COLON": f"/{blanks.before_comma}:{blanks.behind_colon}/",
        }
        self._parametric: set[str] = set()

    def terminal(self, body: str) -> str:
        return self._named("T", body)

    def rule(self, body: str) -> str:
        return self._named("r", body)

    def new_rule(self) -> str:
        name = f"r{len(self.bodies)}"
        self.bodies[name] = ""
        return name

    def text_from(self, start: str) -> str:
        needed, waiting = {start}, [start]
        while waiting:
            for word in _WORD.findall(self.bodies[waiting.pop()]):
                if word in self.bodies and word not in needed:
                    needed.add(word)
                    waiting.append(word)
        lines = [
            f"{name}::_: {body}" if name in self._parametric else f"{name}: {body}"
            for name, body in self.bodies.items()
            if name in needed
        ]
        return "\n".join([f"start: {start}", *lines])

    def _named(self, prefix: str, body: str) -> str:
        if body not in self._names:
            self._names[body] = f"{prefix}{len(self.bodies)}"
            self.bodies[self._names[body]] = body
        return self._names[body]

    def text(self, least: int, most: int | None) -> str:
        return self.terminal(rf'/"{_CHAR}{_count(least, most)}"/')

    def one_of(self, scalars: Iterable[object]) -> str:
        return self.terminal(" | ".join(_quoted(_json(each)) for each in scalars))

    def literal(self, value: object) -> str:
        if isinstance(value, list):
            items = [self.literal(each) for each in cast(list[object], value)]
            return f"LIST {' COMMA '.join(items)} END" if items else "NONE"
        if isinstance(value, dict):
            members = cast(dict[str, object], value).items()
            parts = [f"{self.name(name)} {self.literal(each)}" for name, each in members]
            return f"OPEN {' COMMA '.join(parts)} CLOSE" if parts else "EMPTY"
        return self.one_of([value])

    def name(self, name: str) -> str:
        return self.terminal(f"{_quoted(_json(name))} COLON")

    def other_name(self, taken: Iterable[str]) -> str:
        body = rf'/"{_KEY_CHAR}{_count(0, self._max_string)}"/'
        excluded = " | ".join(_quoted(_json(name)) for name in taken)
        if excluded:
            body += f" & ~({excluded})"
        return f"{self.terminal(body)} COLON"

    def repeated(self, item: str, least: int, most: int | None) -> str:
        if most == 0:
            return self.rule("NONE")
        more = _times(f"COMMA {item}", max(least - 1, 0), None if most is None else most - 1)
        return self._list(f"{item} {more}", least)

    def tuple_of(self, items: Sequence[str], rest: str | None, least: int, most: int | None) -> str:
        """A list whose first items have rules of their own."""
        count = len(items)
        tail = ""
        if rest is not None and most != count:
            more = None if most is None else most - count
            tail = _times(f"COMMA {rest}", max(least - count, 0), more)
        for index in range(count - 1, 0, -1):
            tail = f"COMMA {items[index]} {tail}"
            if index >= least:
                tail = f"({self.rule(tail)})?"
        return self._list(f"{items[0]} {tail}", least)

    def distinct(self, values: Sequence[object], least: int, most: int) -> str:
        """None of the values is twice: a bit of the rule's parameter for each."""
        items = [self.rule(self.literal(each)) for each in values]
        name = self.new_rule()
        self._parametric.add(name)
        few = f"bit_count_lt(_, {most})"
        is_clear = "bit_clear({})" if most == len(items) else f"and(bit_clear({{}}), {few})"
        chosen = [
            f"COMMA {item} {name}::set_bit({bit}) %if {is_clear.format(bit)}"
            for bit, item in enumerate(items)
        ]
        self.bodies[name] = "\n | ".join([f'"" %if bit_count_ge(_, {least})', *chosen])
        first = " | ".join(f"{item} {name}::{1 << bit:#x}" for bit, item in enumerate(items))
        return self._list(f"({first})", least)

    def _list(self, items: str, least: int) -> str:
        body = f"LIST {items} END"
        return self.rule(body if least else f"NONE | {body}")

    def object_of(
        self, members: Sequence[tuple[str, bool]], extra: Extra | None, *, is_filled: bool = False
    ) -> str:
        """`members`: each with whether it is required; `is_filled`: there is one at least."""
        tail = first_extra = ""
        if extra is not None and extra.most != 0:
            member, least, most = extra
            tail = _times(f"COMMA {member}", least, most)
            more = _times(f"COMMA {member}", max(least - 1, 0), None if most is None else most - 1)
            first_extra = f"{member} {more}"
        firsts = [first_extra] if first_extra else []
        may_be_empty = not is_filled and (extra is None or extra.least == 0)
        for member, is_required in reversed(members):
            begin = f"{member} {tail}"
            firsts = [begin] if is_required else [begin, *firsts]
            may_be_empty &= not is_required
            optional = f"(COMMA {member})? {tail}"
            tail = f"COMMA {begin}" if is_required else self.rule(optional)
        bodies = [f"OPEN {each} CLOSE" for each in firsts]
        return self.rule(" | ".join(["EMPTY", *bodies] if may_be_empty else bodies))


def _count(least: int, most: int | None) -> str:
    if most is None or most >= MAX_COUNT:
        return f"{{{least},}}" if least else "*"
    return f"{{{least},{most}}}"


def _times(part: str, least: int, most: int | None) -> str:
    return "" if most == 0 else f"({part}){_count(least, most)}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


INT_DIGITS = 19
FRACTION_DIGITS = 17  # at most so many, and as many as the schema's bounds have
_EXPONENT = r"[eE](\+?([0-9]{1,2}|1[0-9]{2}|2[0-8][0-9])|-[0-9]{1,3})"
"""With 19 digits before it, a number of at most 1e308: none is infinite where it is read."""

_MAX_DIGITS = 400  # of a bound itself, which may be written as 1e300


class UnboundedDigitsError(ValueError):
    """A bound has more digits than a terminal may have."""


class EmptyRangeError(ValueError):
    """No number is within the bounds."""


def number_terminal(schema: Mapping[str, Any], *, is_integer: bool) -> str:
    """Raises EmptyRangeError or UnboundedDigitsError."""
    low, is_low_open = _bound(schema, "minimum", "exclusiveMinimum", max)
    high, is_high_open = _bound(schema, "maximum", "exclusiveMaximum", min)
    if low is not None and high is not None:
        if low > high or (low == high and (is_low_open or is_high_open)):
            raise EmptyRangeError
        if is_integer and not _has_integer(low, high, is_low_open, is_high_open):
            raise EmptyRangeError
    given = [each for each in (low, high) if each is not None]
    int_digits = max(INT_DIGITS, *(len(_digits(each)[0]) for each in given), 0)
    fraction_digits = max(FRACTION_DIGITS, *(len(_digits(each)[1]) for each in given), 0)
    whole = rf"-?(0|[1-9][0-9]{{0,{int_digits - 1}}})"
    fraction = "" if is_integer else rf"(\.[0-9]{{1,{fraction_digits}}})?"
    if not given:
        exponent = "" if is_integer else f"({_EXPONENT})?"
        return f"/{whole}{fraction}{exponent}/"
    parts = [f"/{whole}{fraction}/"]
    if low is not None:
        parts.append(f"/{_at_least(low, is_low_open)}/")
    if high is not None:
        parts.append(f"/{_at_most(high, is_high_open)}/")
    return " & ".join(parts)


def _bound(
    schema: Mapping[str, Any], name: str, exclusive_name: str, stricter: Any
) -> tuple[Decimal | None, bool]:
    """A bound, and whether it is itself outside; `stricter` is max of minima, min of maxima."""
    bound, exclusive = schema.get(name), schema.get(exclusive_name)
    if exclusive is True:  # as draft 4 has it
        return (None, False) if bound is None else (_decimal(bound), True)
    if exclusive is None or exclusive is False:
        return (None, False) if bound is None else (_decimal(bound), False)
    opened = _decimal(exclusive)
    if bound is None:
        return opened, True
    closed = _decimal(bound)
    chosen = stricter(opened, closed)
    return chosen, chosen == opened


def _decimal(bound: object) -> Decimal:
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise UnboundedDigitsError
    found = Decimal(repr(bound))
    if not found.is_finite() or abs(found.adjusted()) > _MAX_DIGITS:
        raise UnboundedDigitsError
    return found


def _has_integer(low: Decimal, high: Decimal, is_low_open: bool, is_high_open: bool) -> bool:
    first = math.ceil(low) + (is_low_open and low % 1 == 0)
    last = math.floor(high) - (is_high_open and high % 1 == 0)
    return first <= last


def _digits(number: Decimal) -> tuple[str, str]:
    """Before the point, and after it up to the last that is not 0."""
    whole, _, fraction = f"{abs(number):f}".partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _at_least(bound: Decimal, is_open: bool) -> str:
    if bound > 0 or (bound == 0 and is_open):
        return _above(bound, is_open)
    if bound == 0:
        return r"[0-9].*"
    return rf"[0-9].*|-({_below(bound, is_open)})"


def _at_most(bound: Decimal, is_open: bool) -> str:
    if bound < 0 or (bound == 0 and is_open):
        return f"-({_above(bound, is_open)})"
    return f"-.*|{_below(bound, is_open)}"


def _above(bound: Decimal, is_open: bool) -> str:
    whole, fraction = _digits(bound)
    larger = [rf"[1-9][0-9]{{{len(whole)},}}(\.[0-9]+)?"]
    for index, digit in enumerate(whole):
        if digit != "9":
            rest = len(whole) - index - 1
            larger.append(rf"{whole[:index]}[{int(digit) + 1}-9][0-9]{{{rest}}}(\.[0-9]+)?")
    larger += [
        rf"{whole}\.{fraction[:index]}[{int(digit) + 1}-9][0-9]*"
        for index, digit in enumerate(fraction)
        if digit != "9"
    ]
    behind = rf"{fraction}[0-9]*[1-9][0-9]*" if is_open else rf"{fraction}[0-9]*"
    if not fraction and not is_open:
        larger.append(rf"{whole}(\.[0-9]+)?")
    else:
        larger.append(rf"{whole}\.{behind}")
    return "|".join(larger)


def _below(bound: Decimal, is_open: bool) -> str:
    whole, fraction = _digits(bound)
    smaller: list[str] = []
    if len(whole) > 1:
        smaller.append(rf"(0|[1-9][0-9]{{0,{len(whole) - 2}}})(\.[0-9]+)?")
    for index, digit in enumerate(whole):
        least = 1 if index == 0 and len(whole) > 1 else 0
        if int(digit) > least:
            rest = len(whole) - index - 1
            first = f"[{least}-{int(digit) - 1}]"
            smaller.append(rf"{whole[:index]}{first}[0-9]{{{rest}}}(\.[0-9]+)?")
    if fraction:
        smaller.append(whole)
    for index, digit in enumerate(fraction):
        if digit != "0":
            smaller.append(rf"{whole}\.{fraction[:index]}[0-{int(digit) - 1}][0-9]*")
        if index:
            smaller.append(rf"{whole}\.{fraction[:index]}")
    if not is_open:
        smaller.append(rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(\.0+)?")
    return "|".join(smaller) or "[^0-9]"
