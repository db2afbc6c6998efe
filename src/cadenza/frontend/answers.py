"""`AnswerPlanner`: the parser of reasoning and tool calls for an answer, and its grammar.
Invariant: a required call, and the requested response format, are in the grammar, after the
reasoning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

from cadenza.errors import ConfigError, InvalidRequestError, show
from cadenza.structured import CallRule, ConstraintSpec, ThinkingBound
from cadenza.text import Tokenizer
from cadenza.text.answers.answer_grammar import (
    MAX_CALLS,
    AnswerFrame,
    Arguments,
    MarkedFrame,
    calls_grammar,
    either_grammar,
    text_or_calls_grammar,
)
from cadenza.text.answers.harmony import (
    HARMONY,
    HarmonyFrame,
    message_calls,
    text_or_message_calls,
)
from cadenza.text.answers.input_grammar import Escapes, arguments_of_written
from cadenza.text.answers.json_calls import DEEPSEEK_V3, DEEPSEEK_V31, GENERIC
from cadenza.text.answers.part_parser import (
    REASONING_ALIASES,
    REASONING_FORMATS,
    MakeParser,
    PartPlan,
    ReasoningFormat,
)
from cadenza.text.answers.tool_calls import (
    ANY_OBJECT,
    FORCED,
    TOOL_ALIASES,
    TOOL_FORMATS,
    call_rule,
    format_shown_by,
    holds_schemas,
    required_calls,
)
from cadenza.text.answers.tool_format import CallGrammar, Marks, Tool, ToolFormat
from cadenza.text.schemas.grammar import ARGUMENTS_STYLE, DEFAULT_STYLE, GrammarCheck
from cadenza.text.schemas.json_schema import compile_schema

AUTO = "auto"
NO_PARSER = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request."""

    tools: tuple[Tool, ...]
    choice: Literal["auto", "required"] = "auto"  # required: the answer is calls
    named: str | None = None  # the only function that may be called
    is_parallel: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.named in (None, tool.name))

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        return {
            tool.name: {} if tool.input is not None else tool.parameters or {}
            for tool in self.tools
        }

    @property
    def is_constrained(self) -> bool:
        return self.choice == "required" or any(tool.is_strict for tool in self.tools)

    @classmethod
    def of_rendered(cls, tools: Sequence[Mapping[str, Any]]) -> "ToolUse":
        """As chat templates read them, as far as they have names."""
        functions = [cast(Mapping[str, Any], each.get("function") or each) for each in tools]
        return cls(
            tools=tuple(
                Tool(name=str(each["name"]), parameters=each.get("parameters"))
                for each in functions
                if each.get("name")
            )
        )

    def rendered(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": _described(tool)} for tool in self.tools]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAnswer:
    """What is asked of an answer besides its form."""

    use: ToolUse | None = None  # the tools that it may, or must, call
    max_thinking: int | None = None  # tokens of reasoning; None: as many as the model likes
    # False: without reasoning, where its marks are tokens and nothing else bounds it
    thinks: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParsers:
    """The names of the parsers, of which auto is as the chat template shows and none is without;
    and what is done for templates without a place for something. Raises ConfigError."""

    reasoning: str = AUTO
    tool_calls: str = AUTO
    max_string: int | None = DEFAULT_STYLE.max_string  # characters that no schema bounds
    strict_tools: bool = False  # refuse tools where the chat template has no place for them
    # refuse a conversation that the chat template refuses, which otherwise gets another form
    strict_messages: bool = False
    stable_prompts: bool = False  # move or remove what agents change in system prompts

    def __post_init__(self) -> None:
        reasoning = (AUTO, NO_PARSER, *REASONING_FORMATS, *REASONING_ALIASES)
        tool_calls = (AUTO, *TOOL_FORMATS, *TOOL_ALIASES)
        for flag, name, known in (
            ("--reasoning-parser", self.reasoning, reasoning),
            ("--tool-call-parser", self.tool_calls, tool_calls),
        ):
            if name not in known:
                raise ConfigError(f"{flag} {show(name)} is not one of {', '.join(known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """How one answer is parsed and constrained."""

    make_parser: MakeParser | None = None
    constraint: ConstraintSpec | None = None
    shows_special_tokens: bool = False  # its marks are special tokens


class AnswerPlanner:
    """Plans answers of one model, whose chat template is `template`."""

    def __init__(
        self,
        template: str,
        tokenizer: Tokenizer,
        parsers: AnswerParsers,
        *,
        reads_tools: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._reasoning = _reasoning_format(parsers.reasoning, template)
        self._tools = _tool_format(parsers.tool_calls, template, reads_tools=reads_tools)
        own = TOOL_FORMATS[format_shown_by(template)]
        further = own.forms if own is DEEPSEEK_V3 else ()
        # What is read where the generic form is asked for: the model may write its own.
        self._generic = replace(GENERIC, forms=(*GENERIC.forms, *further))

    @property
    def tool_format(self) -> ToolFormat:
        return self._tools

    @property
    def format_names(self) -> tuple[str, ...]:
        """Of the formats of reasoning and of tool calls."""
        formats: Sequence[tuple[str, object]] = (
            *REASONING_FORMATS.items(),
            *TOOL_FORMATS.items(),
        )
        used = (self._reasoning, self._tools)
        return tuple(name for name, each in formats if any(each is one for one in used))

    @property
    def has_reasoning(self) -> bool:
        return self._reasoning is not None

    def plan(
        self,
        prompt: str,
        form: ConstraintSpec | None,
        asked: AskedAnswer,
        check: GrammarCheck,
    ) -> AnswerPlan:
        """`check` is the request's. Raises InvalidRequestError."""
        use, frame = asked.use, self._frame(prompt)
        grammar, rule = None if form is None else form.grammar, None
        calls = None if use is None else self._calls(use, check, has_form=grammar is not None)
        marks = self._marks(None if calls is None else calls.format, frame)
        if use is None or calls is None:
            grammar = None if grammar is None else frame.with_content(grammar, marks)
        elif grammar is not None or use.is_constrained:
            arguments = {tool.name: _arguments(tool, calls.inputs, check) for tool in calls.tools}
            is_free = use.choice != "required" and grammar is None
            write = partial(_written, use, calls, arguments, is_free=is_free)
            content = None if use.choice == "required" else grammar
            # The check has no tokens: the marks are texts there.
            trial = frame.behind_reasoning(_answered(frame, content, write, {}), {})
            _refuse_unfit(trial, check)
            grammar = _answered(frame, content, write, marks)
        else:
            rule = _call_rule(replace(calls, tools=use.tools), marks, check)
        if grammar is not None:
            grammar = frame.behind_reasoning(grammar, marks)
        if rule is not None:
            rule = frame.placed(rule)
        bound = None
        if asked.max_thinking is not None:
            bound = self._thinking_bound(frame, asked.max_thinking)
        elif not asked.thinks:
            bound = self._bound_by_marks(frame, 0)
        is_constrained = grammar is not None or bound is not None or rule is not None
        spec = ConstraintSpec(grammar=grammar, thinking=bound, calls=rule)
        tools = None if calls is None else calls.format
        plan = PartPlan(
            tools=self._generic if tools is GENERIC else tools,
            functions={} if use is None else use.schemas,
        )
        return AnswerPlan(
            make_parser=frame.make_parser(plan),
            constraint=spec if is_constrained else None,
            shows_special_tokens=not self._tokenizer.special_token_ids.isdisjoint(marks.values()),
        )

    def _frame(self, prompt: str) -> AnswerFrame:
        if self._tools is HARMONY:
            return HarmonyFrame.of(self._reasoning, prompt)
        return MarkedFrame.of(self._reasoning, prompt)

    def _calls(self, use: ToolUse, check: GrammarCheck, *, has_form: bool) -> CallGrammar:
        format, tools = self._written_in(use, has_form=has_form), use.callable_tools
        inputs = _inputs(tools, format, check)
        return CallGrammar(tools=tools, format=format, compile=_lenient_grammar, inputs=inputs)

    def _written_in(self, use: ToolUse, *, has_form: bool) -> ToolFormat:
        own = self._tools
        if own.is_json or not (use.is_constrained or has_form):
            return own
        is_whole = use.choice == "required" or has_form
        return own if is_whole and holds_schemas(own, use.callable_tools) else FORCED

    def _thinking_bound(self, frame: AnswerFrame, max_tokens: int) -> ThinkingBound | None:
        reasoning = frame.reasoning
        bound = self._bound_by_marks(frame, max_tokens)
        if bound is None and reasoning is not None:
            raise InvalidRequestError(
                f"a bound on thinking needs marks that are tokens; in this model {reasoning.begin} "
                f"and {reasoning.end} are not",
                param="thinking_token_budget",
            )
        return bound

    def _bound_by_marks(self, frame: AnswerFrame, max_tokens: int) -> ThinkingBound | None:
        reasoning = frame.reasoning
        if reasoning is None:
            return None
        end = self._tokenizer.added_tokens.get(reasoning.end)
        *before, begin = self._opening(reasoning)
        if end is None or (begin is None and not frame.has_begun):
            return None
        if frame.has_begun:
            return ThinkingBound(begin=None, end=end, max_tokens=max_tokens)
        return ThinkingBound(
            begin=begin,
            end=end,
            max_tokens=max_tokens,
            before=tuple(each for each in before if each is not None),
            recurs=reasoning.recurs,
        )

    def _opening(self, reasoning: ReasoningFormat) -> Sequence[int | None]:
        added, encode = self._tokenizer.added_tokens, self._tokenizer.encode
        first, *rest = reasoning.opening or (reasoning.begin,)
        if not {first, *rest[-1:]} <= added.keys():
            return (None,)
        texts = (encode(text, add_special_tokens=False) for text in rest[:-1])
        return (added[first], *(each for ids in texts for each in ids), *map(added.get, rest[-1:]))

    def _marks(self, tools: ToolFormat | None, frame: AnswerFrame) -> Marks:
        texts = [*frame.marks]
        if tools is not None:
            texts += [tools.begin, tools.end, *tools.inner_marks]
        added = self._tokenizer.added_tokens
        return {text: added[text] for text in texts if text in added}


def _inputs(tools: Sequence[Tool], format: ToolFormat, check: GrammarCheck) -> dict[str, str]:
    found: dict[str, str] = {}
    for tool in tools:
        if tool.input is None:
            continue
        try:
            found[tool.name] = tool.input.written(check, Escapes(also=format.escaped))
            problem = check(found[tool.name])
        except InvalidRequestError as error:
            problem = str(error)
        if problem is not None:
            raise InvalidRequestError(
                f"the grammar of the tool {tool.name} is refused: {problem}", param="tools"
            )
    return found


def _arguments(tool: Tool, inputs: Mapping[str, str], check: GrammarCheck) -> str:
    if tool.name in inputs:
        return arguments_of_written(inputs[tool.name])
    try:
        compiled = compile_schema(tool.schema, ARGUMENTS_STYLE, is_strict=tool.is_strict)
        grammar = compiled.text
        problem = check(grammar)
    except InvalidRequestError as error:
        grammar, problem = "", str(error)
    if problem is not None:
        raise InvalidRequestError(
            f"the parameters of the tool {tool.name} are refused: {problem}", param="tools"
        )
    return grammar


def _lenient_grammar(schema: str) -> str:
    return compile_schema(schema, ARGUMENTS_STYLE, is_strict=False).text


def _call_rule(calls: CallGrammar, marks: Marks, check: GrammarCheck) -> CallRule | None:
    """The calls that the model may begin; None where they cannot be followed: functions with such
    schemas allow any object. Raises InvalidRequestError for a custom tool's text without its
    grammar."""
    for is_loose in (False, True):
        if is_loose:
            calls = replace(calls, tools=[_loosened(tool, check) for tool in calls.tools])
        try:
            # The check has no tokens: the marks are texts there.
            trial = call_rule(calls, {})
            if trial is None:
                break
            if check(trial.grammar) is None:
                return call_rule(calls, marks)
        except InvalidRequestError:
            continue
    if calls.inputs:
        raise InvalidRequestError(
            f"the grammar of the tool {next(iter(calls.inputs))} cannot be followed together with "
            f"the other tools; send fewer of them, or name it in tool_choice",
            param="tools",
        )
    return None


def _loosened(tool: Tool, check: GrammarCheck) -> Tool:
    if tool.input is not None:
        return tool
    try:
        is_followed = check(_lenient_grammar(tool.schema)) is None
    except InvalidRequestError:
        is_followed = False
    return tool if is_followed else replace(tool, parameters=ANY_OBJECT)


def _refuse_unfit(grammar: str, check: GrammarCheck) -> None:
    """Raises for tools of which each can be followed, but not all of them together."""
    problem = check(grammar)
    if problem is not None:
        raise InvalidRequestError(
            f"the tools together are refused: {problem}; or send fewer of them", param="tools"
        )


def _written(
    use: ToolUse, calls: CallGrammar, arguments: Arguments, marks: Marks, *, is_free: bool
) -> str:
    """The grammar of calls; `is_free`: of text in which there may be some."""
    format, most = calls.format, MAX_CALLS if use.is_parallel else 1
    if format is HARMONY:
        return (text_or_message_calls if is_free else message_calls)(arguments, marks)
    if is_free:
        return text_or_calls_grammar(arguments, format, marks)
    if format.is_json:
        return calls_grammar(arguments, format, marks, max_calls=most)
    return required_calls(calls, marks, max_calls=most)


def _answered(
    frame: AnswerFrame, form: str | None, write: Callable[[Marks], str], marks: Marks
) -> str:
    called = frame.called(write(marks), marks)
    return called if form is None else either_grammar(frame.with_content(form, marks), called)


def _described(tool: Tool) -> dict[str, Any]:
    members = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {name: value for name, value in members.items() if value is not None}


def _reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    if name == NO_PARSER:
        return None
    if name != AUTO:
        return REASONING_FORMATS[REASONING_ALIASES.get(name, name)]
    formats: Mapping[str, ReasoningFormat] = REASONING_FORMATS
    return next((each for each in formats.values() if each.is_shown_by(template)), None)


def _tool_format(name: str, template: str, *, reads_tools: bool) -> ToolFormat:
    if name != AUTO:
        return TOOL_FORMATS[TOOL_ALIASES.get(name, name)]
    shown = TOOL_FORMATS[format_shown_by(template)]
    return shown if reads_tools or shown in (HARMONY, DEEPSEEK_V31) else GENERIC
