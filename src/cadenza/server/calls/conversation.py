"""`AskedConversation`: what every endpoint that answers a conversation makes of its body.
Invariant: equal conversations have equal answers, whatever API they came by."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cadenza.frontend.answers import AskedAnswer, ToolUse
from cadenza.frontend.prepared_request import ChatPrompt, Message
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.media.image_input import need_files
from cadenza.server.fields.thinking import (
    EFFORTS,
    NOTHING_ASKED,
    AskedThinking,
    nearest_effort,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedConversation:
    """A conversation that waits for an answer.

    Args:
        use: the tools that the answer may call; None: none.
        thinking: the effort, the switch and the bound; the switch and the bound take precedence
            over what the effort implies.
        verbosity: for the chat template; None: as the template does.
        variables: of the chat template, as the request names them; those that the template does
            not read are ignored.
        template_kwargs: further arguments of the chat template.
        is_off_unasked: the request does not mention thinking, which its API takes for off: only a
            switch of the chat template turns it off.
    """

    messages: Sequence[Message]
    use: ToolUse | None
    thinking: AskedThinking = NOTHING_ASKED
    verbosity: str | None = None
    variables: Mapping[str, object] = field(default_factory=dict[str, object])
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_off_unasked: bool = False

    def prompt(self, text: TextFrontend) -> ChatPrompt:
        """The prompt, for a model. Slow. Raises InvalidRequestError and ImagesToFetch."""
        if text.prompts.takes_images:
            need_files(self.messages)
        return ChatPrompt(
            messages=self.messages,
            template_kwargs=self._kwargs(text),
            asked=AskedAnswer(
                use=self.use, max_thinking=self._max_thinking(text), thinks=self._thinks(text)
            ),
        )

    def count(self, text: TextFrontend) -> int:
        """Whatever the context. Slow. Raises as `prompt`."""
        return len(text.render_chat(self.prompt(text))[1])

    def _kwargs(self, text: TextFrontend) -> dict[str, Any]:
        """The arguments of the template; the request's own variables take precedence."""
        switches: dict[str, Any] = {}
        effort, is_on = self.thinking.effort, self.thinking.is_on
        if effort is not None:
            known = nearest_effort(effort, text.prompts.efforts)
            switches |= {"enable_thinking": effort != "none", "reasoning_effort": known}
        if is_on is not None:
            switches |= {"enable_thinking": is_on, "thinking": is_on}
        if self.verbosity is not None:
            switches["verbosity"] = self.verbosity
        read = {k: v for k, v in switches.items() if k in text.prompts.options}
        return {**read, **text.prompts.known(self.variables), **self.template_kwargs}

    def _thinks(self, text: TextFrontend) -> bool:
        """False where thinking is off and the chat template has no switch for it."""
        asked, read = self.thinking, text.prompts.options
        is_off = asked.is_on is False or (asked.is_on is None and asked.effort == "none")
        has_switch = not read.isdisjoint(("enable_thinking", "thinking"))
        if asked.effort == "none":  # which a template may know as an effort
            has_switch = has_switch or ("reasoning_effort" in read and not text.prompts.efforts)
        return has_switch or not is_off or self.is_off_unasked

    def _max_thinking(self, text: TextFrontend) -> int | None:
        asked = self.thinking
        if asked.bound is not None or asked.effort is None:
            return asked.bound
        if "reasoning_effort" not in text.prompts.options:
            return EFFORTS[asked.effort]
        # A model that knows no such effort does not think either.
        return 0 if asked.effort == "none" and text.prompts.efforts else None


def continuing(is_continued: bool) -> dict[str, bool]:
    """How the chat template ends the prompt: within the last message, or where an answer begins."""
    return {"add_generation_prompt": not is_continued, "continue_final_message": is_continued}


def new_call_id() -> str:
    """The id of a call: nine letters and digits, which some chat templates ask for."""
    return secrets.token_hex(5)[:9]
