"""`ChatPrompts`: conversations as texts, by a checkpoint's chat template; in other forms, or with
tools described in a message, where the template does not take them as they are. Invariant: without
its options `strict_*` a conversation is refused only if the template takes it in no form.
"""

import logging
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, cast

from cadenza.errors import InvalidRequestError, MessagesRefusedError, must_be, show
from cadenza.frontend.answers import AnswerParsers, AnswerPlanner
from cadenza.text import ChatTemplate
from cadenza.text.answers.generic_tools import generic_messages, has_calls
from cadenza.text.answers.tool_calls import HARMONY, LFM2
from cadenza.text.answers.written_calls import with_description, with_listed_calls
from cadenza.text.templates.chat import plain_objects
from cadenza.text.templates.harmony_messages import harmony_messages, harmony_tools
from cadenza.text.templates.message_forms import other_forms
from cadenza.text.templates.notices import Notices
from cadenza.text.templates.stable_prompts import stable_messages
from cadenza.text.templates.tool_responses import reads_responses_only, with_responses

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


class ChatPrompts:
    """Of one checkpoint; without a `template` it refuses every conversation."""

    def __init__(
        self,
        template: ChatTemplate | None,
        planner: AnswerPlanner | None,
        parsers: AnswerParsers,
    ) -> None:
        self.template = template
        self._planner = planner
        self._reads_responses = template is not None and reads_responses_only(template.source)
        self._strict_messages = parsers.strict_messages
        self._stable_prompts = parsers.stable_prompts
        self._is_strict = parsers.strict_tools
        self._notices = Notices(logger)

    @property
    def source(self) -> str | None:
        """The template's; None without one."""
        return None if self.template is None else self.template.source

    @property
    def has_reasoning(self) -> bool:
        """Whether the model marks its reasoning, as far as the template shows."""
        return self._planner is not None and self._planner.has_reasoning

    @property
    def takes_tools(self) -> bool:
        """Whether conversations may have tools: the chat template has a place for them, or they are
        described in place of it."""
        template = self.template
        return template is not None and (template.reads_tools or not self._is_strict)

    @property
    def has_channels(self) -> bool:
        """Whether the template is one of the harmony format."""
        return self._planner is not None and self._planner.tool_format is HARMONY

    @property
    def efforts(self) -> tuple[str, ...]:
        """The efforts of reasoning that the model knows, the least first; empty: any."""
        return ("low", "medium", "high") if self.has_channels else ()

    @property
    def options(self) -> frozenset[str]:
        """The further variables that the chat template reads, such as `enable_thinking`."""
        return frozenset() if self.template is None else self.template.options

    def known(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the variables that the chat template reads. The others have no effect; a log
        line names each of them once."""
        options = self.options
        for name in variables.keys() - options:
            shown = show(name)
            self._notices.tell(shown, "the chat template has no variable %s: it is ignored", shown)
        return {name: value for name, value in variables.items() if name in options}

    def render(
        self,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The prompt's text, up to where the assistant answers. Raises InvalidRequestError."""
        if self.template is None:
            raise InvalidRequestError(
                "this model has no chat template; give a plain prompt instead", param="messages"
            )
        given: object = {} if template_kwargs is None else template_kwargs
        names = [*cast(Mapping[object, object], given)] if isinstance(given, Mapping) else [None]
        if [name for name in names if not isinstance(name, str) or name in ("messages", "tools")]:
            wanted = "a mapping of the chat template's own options"
            raise must_be("chat_template_kwargs", given, wanted)
        if self._stable_prompts and _are_objects(messages):
            messages = stable_messages(messages)
        if _are_objects(messages):
            messages, tools = self._prepared(self.template, messages, tools)
        return self._render_in_some_form(
            self.template, messages, tools, dict(template_kwargs or {})
        )

    def _prepared(
        self,
        template: ChatTemplate,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None,
    ) -> tuple[SequenceOf[Message], SequenceOf[Message] | None]:
        """A conversation and its tools as the template has room for them, so that it passes over
        none of them."""
        format = None if self._planner is None else self._planner.tool_format
        is_listed = format is LFM2 and template.reads_tools and not template.renders_calls
        if format is HARMONY or self._reads_responses or is_listed:
            messages = plain_objects(messages, "messages") or []
            tools = plain_objects(tools, "tools")
        if format is HARMONY:
            messages, tools = harmony_messages(messages), tools and harmony_tools(tools)
        elif self._reads_responses:
            messages = with_responses(messages)
        elif is_listed:
            messages = with_listed_calls(messages, LFM2)
        if not self._is_generic(template, messages, tools):
            return messages, tools
        assert format is not None, "what is generic has a planner"
        if tools and format.example and template.renders_calls:
            return with_description(messages, tools, format), None
        return generic_messages(messages, tools, format), None

    def _render_in_some_form(
        self,
        template: ChatTemplate,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None,
        variables: dict[str, Any],
    ) -> str:
        """As given; where the template refuses that, in the first form that it takes."""
        try:
            return template.render(messages, tools, **variables)
        except MessagesRefusedError as refusal:
            if self._strict_messages:
                raise
            for form in other_forms(messages):
                try:
                    text = template.render(form.messages, tools, **variables)
                except InvalidRequestError:
                    continue
                self._notices.tell(
                    form.change,
                    "the chat template refuses some conversations as they are, which are rendered "
                    "with %s; --strict-messages refuses them",
                    form.change,
                )
                return text
            raise refusal from None

    def _is_generic(
        self,
        template: ChatTemplate,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None,
    ) -> bool:
        """Whether a conversation has tools, or calls, for which its template has no place."""
        if self._is_strict or self._planner is None or template.reads_tools:
            return False
        if not (_are_objects(messages) and _are_objects(() if tools is None else tools)):
            return False  # the template refuses them
        return bool(tools) or (not template.reads_calls and has_calls(messages))


def _are_objects(values: object) -> bool:
    if not isinstance(values, list | tuple):
        return False
    return all(isinstance(each, Mapping) for each in cast(SequenceOf[object], values))
