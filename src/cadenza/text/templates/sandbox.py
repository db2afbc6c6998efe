"""`BoundedTemplate`: renders untrusted Jinja as transformers does. Invariant: every loop iteration,
call and filter is counted, operations that can multiply their input have their result's size
checked first (`text.templates.bounds`), and only text of the template's source is marked
(`text.tokens.provenance`)."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from cadenza.errors import CheckpointError, InvalidRequestError, MessagesRefusedError
from cadenza.text.templates.bounds import (
    MAX_CHARS,
    BoundExceededError,
    Budget,
    check_chars,
    check_format,
    check_indent,
    check_join,
    check_operator,
    check_replace,
    check_widths,
    measure,
    start_budget,
)
from cadenza.text.tokens.provenance import (
    MarkedText,
    format_braces,
    join_marked,
    written_by_template,
)

MAX_REASON_CHARS = 500
BUDGET = "budget of this rendering"  # no identifier, so that no template can refer to it

# Names of filters for `_Instrument` alone: no template can name them, as they are no identifiers.
_COUNTED = "counted iterable"
_CONCATENATED = "concatenated parts"
_KEPT = "kept block"
_MEASURED = "measured operand"
_OWN = "own constant"
_REMOVED_GLOBALS = ("lipsum",)
_REMOVED_FILTERS = ("urlize", "xmlattr", "pprint", "random", "filesizeformat", "wordwrap")
_SHALLOW_FILTERS = frozenset(  # those that do not read nested members are not measured
    "abs attr count d default first float int items kept last length list map reject rejectattr "
    "reverse select selectattr".split()
)

_WIDTH_FILTERS = frozenset({"center", "batch", "slice", "truncate", "round"})
_WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})

Filter = Callable[..., Any]


class _RefusedError(Exception):
    """The template itself called `raise_exception` with the argument."""


class BoundedTemplate:
    """A compiled template. Raises CheckpointError where the source is not valid."""

    __slots__ = ("_clock", "_template", "variables")

    variables: frozenset[str]  # names that the template reads but does not define

    def __init__(
        self,
        source: str,
        *,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        try:
            environment = _new_environment(now)
            tree = cast(nodes.Template, _Instrument().visit(environment.parse(source)))
            self.variables = frozenset(
                meta.find_undeclared_variables(tree) - environment.globals.keys()
            )
            self._template = environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template is not valid Jinja (line {error.lineno}); correct it"
            ) from error
        except (TemplateError, RecursionError, SyntaxError, MemoryError, ValueError) as error:
            raise CheckpointError(
                "the chat template cannot be compiled; simplify or correct it"
            ) from error

    def render(self, variables: Mapping[str, object]) -> MarkedText:
        """With the characters of the template's source marked. Raises InvalidRequestError: the
        template rejects the variables, fails, or exceeds its budget; raises CheckpointError: it
        uses something that the sandbox does not allow."""
        try:
            return self._collect({**variables, BUDGET: start_budget(self._clock)})
        except _RefusedError as refusal:
            raise MessagesRefusedError(
                f"the chat template refuses these messages: {refusal.args[0]}", param="messages"
            ) from refusal
        except BoundExceededError as error:
            raise _template_error(
                f"takes {error.args[0]} for these messages; shorten them"
            ) from error
        except (RecursionError, MemoryError, OverflowError) as error:
            raise _template_error(
                "takes too much memory or recursion for these messages; shorten them"
            ) from error
        except SecurityError as error:
            raise CheckpointError(
                "the chat template uses something that its sandbox does not allow; use another one"
            ) from error
        except Exception as error:  # a template can raise anything that Python's operators raise
            raise MessagesRefusedError(
                f"the chat template fails on these messages ({type(error).__name__}); check their "
                f"roles and the types of their fields",
                param="messages",
            ) from error

    def _collect(self, variables: dict[str, object]) -> MarkedText:
        parts: list[str] = []
        num_chars = 0
        for part in self._template.generate(variables):
            num_chars += len(part)
            if num_chars > MAX_CHARS:
                check_chars(num_chars)
            parts.append(part)
        return _join_emitted(parts)


def _template_error(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the chat template {reason}", param="messages")


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox as transformers has it, with calls counted and result sizes checked."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        _budget_of(context).charge(result)
        return result

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        budget = _budget_of(context)
        budget.step()
        method = getattr(obj, "__wrapped__", obj)  # Jinja's sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            name = getattr(method, "__name__", "")
            if name == "join" and len(args) == 1:
                args = (list(args[0]),)
            _check_method(owner, name, [*args, *kwargs.values()])
            if name == "format" and isinstance(owner, MarkedText):
                return format_braces(SandboxedFormatter(self), owner, args, kwargs)
        result = _as_marked(super().call(context, obj, *args, **kwargs))
        budget.charge(result)
        return result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, MarkedText) and not hasattr(str, attr):  # what `str` has not
            return False
        return super().is_safe_attribute(obj, attr, value)

    @staticmethod
    def concat(parts: Iterable[str]) -> MarkedText:
        parts = list(parts)
        check_chars(sum(map(len, parts)))
        return _join_emitted(parts)


class _Instrument(NodeTransformer):
    """Counts or measures what can be slow without a call; marks string constants, except
    subscripts, as the template's."""

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        is_text = isinstance(node.value, str)
        return _filter_node(node, _OWN, line=node.lineno) if is_text else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)
        if not isinstance(node.arg, nodes.Const):
            node.arg = self.visit(node.arg)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter_node(node.iter, _COUNTED, line=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes).set_lineno(node.lineno)
        return _filter_node(parts, _CONCATENATED, line=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filter_node(node.expr, _MEASURED, line=node.lineno)
        for operand in node.ops:
            operand.expr = _filter_node(operand.expr, _MEASURED, line=node.lineno)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filter_node(node.filter, _KEPT, line=node.lineno)
        return node


class _GenerationExtension(Extension):
    """`{% generation %}` blocks, which mark assistant text for training: rendered as their body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render_body"), [], [], body).set_lineno(line)

    def render_body(self, caller: Macro) -> str:
        return caller()


def _filter_node(inner: nodes.Node | None, name: str, *, line: int) -> nodes.Filter:
    node = nodes.Filter(cast(nodes.Expr, inner), name, [], [], None, None)
    return cast(nodes.Filter, node.set_lineno(line))


def _new_environment(now: Callable[[], datetime]) -> _BoundedEnvironment:
    environment = _BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, _GenerationExtension],
        finalize=_emit,
    )
    for name in _REMOVED_GLOBALS:
        environment.globals.pop(name)

    def strftime_now(format: str) -> str:
        return now().strftime(format)

    offered = {"raise_exception": _raise_exception, "strftime_now": strftime_now}
    cast(dict[str, object], environment.globals).update(offered)
    filters: dict[str, Filter] = {
        name: filter for name, filter in environment.filters.items() if name not in _REMOVED_FILTERS
    }
    filters |= {"tojson": _to_json, _CONCATENATED: _concatenate, _KEPT: _keep}
    environment.filters = {name: _bound_filter(name, filters[name]) for name in filters}
    environment.filters[_COUNTED] = _count_rounds
    environment.filters[_MEASURED] = _measured
    environment.filters[_OWN] = _own_filter()
    return environment


def _bound_filter(name: str, filter: Filter) -> Filter:
    wanted = getattr(getattr(filter, "jinja_pass_arg", None), "name", None)

    @jinja2.pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget_of(context)
        budget.step()
        if name == "join":
            value = value if isinstance(value, str) else list(value)
            separator = args[0] if args else kwargs.pop("d", "")
            args = (_as_marked(separator), *args[1:])
        _check_filter(name, value, [*args, *kwargs.values()])
        passed = {
            "context": context,
            "eval_context": context.eval_ctx,
            "environment": context.environment,
        }
        leading = () if wanted is None else (passed[wanted],)
        result = _as_marked(filter(*leading, value, *args, **kwargs))
        budget.charge(result)
        return result

    return bounded


def _check_filter(name: str, value: object, arguments: list[Any]) -> None:
    if name in _WIDTH_FILTERS:
        check_widths(arguments)
    elif name in ("indent", "tojson"):
        check_indent(value, arguments if name == "indent" else [])
    elif name == "replace" and len(arguments) > 1:
        check_replace(str(value), str(arguments[0]), str(arguments[1]))
    elif name == "format":
        check_format(str(value), arguments)
    elif name == "join":
        check_join(str(arguments[0]) if arguments else "", value)
    elif name not in _SHALLOW_FILTERS:
        measure(value)


def _check_method(owner: str, name: str, arguments: list[Any]) -> None:
    if name in _WIDTH_METHODS:
        check_widths(arguments)
        check_chars(len(owner) * 64)
    elif name in ("format", "format_map"):
        check_format(owner, arguments)
    elif name == "replace" and len(arguments) > 1:
        check_replace(owner, str(arguments[0]), str(arguments[1]))
    elif name == "join" and arguments:
        check_join(owner, arguments[0])
    elif name == "translate":
        raise SecurityError("str.translate is not available to templates")


@jinja2.pass_context
def _count_rounds(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    budget = _budget_of(context)
    for value in values:
        budget.step()
        yield value


def _concatenate(parts: list[Any]) -> str:
    check_chars(sum(map(measure, parts)))
    return join_marked(map(str, parts))


def _own_filter() -> Filter:
    marked = cache(written_by_template)

    @jinja2.pass_context  # which keeps Jinja from folding the filter at compile time
    def own(context: Context, text: str) -> MarkedText:  # noqa: ARG001
        return marked(text)

    return own


def _as_marked(value: Any) -> Any:
    is_plain = isinstance(value, str) and not isinstance(value, MarkedText)
    return MarkedText(value) if is_plain else value


def _emit(value: Any) -> MarkedText:
    if isinstance(value, MarkedText):
        return value
    return MarkedText(value if isinstance(value, str) else str(_measured(value)))


def _join_emitted(parts: Iterable[str]) -> MarkedText:
    # Plain strings in Jinja's output are the template's text outside `{{ }}`.
    return join_marked(parts, is_plain_own=True)


def _keep(text: str) -> str:
    return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > 16:
        raise BoundExceededError("an indentation of over 16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _measured(value: Any) -> Any:
    if not isinstance(value, str):
        measure(value)
    return value


def _raise_exception(message: object) -> NoReturn:
    measure(message)
    raise _RefusedError(str(message)[:MAX_REASON_CHARS])


def _budget_of(context: Context) -> Budget:
    return cast(Budget, context.parent[BUDGET])
