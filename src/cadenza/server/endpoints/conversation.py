"""`AskedConversation`: what every endpoint that answers a conversation makes of its body.

Owns how messages, tools and switches become a request of the front end. Knows no fields and no
shape of an answer. Invariant: equal conversations have equal answers, whatever API they came by.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.frontend.answers import ToolUse
from cadenza.frontend.text_frontend import Message, PreparedRequest, TextFrontend
from cadenza.request import SamplingParams
from cadenza.server.errors import invalid_value

NO_THINKING = {"enable_thinking": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedConversation:
    """A conversation that waits for an answer.

    Args:
        use: the tools that the answer may call; None: none.
        effort: none: no thinking, where the chat template has a switch for it.
        template_kwargs: what the chat template is rendered with.
    """

    messages: Sequence[Message]
    use: ToolUse | None
    effort: str | None
    template_kwargs: Mapping[str, Any]

    def prepare(
        self, text: TextFrontend, params: SamplingParams, max_num_tokens: int | None
    ) -> PreparedRequest:
        """The request to the engine. Slow. Raises as `GenerationRequest.prepare`."""
        return text.prepare_answer(
            self.messages,
            params,
            use=self.use,
            template_kwargs=self._kwargs(text),
            max_num_tokens=max_num_tokens,
        )

    def count(self, text: TextFrontend, max_num_tokens: int | None) -> int:
        """The number of the prompt's tokens. Slow. Raises as `prepare`."""
        tools = None if self.use is None else self.use.rendered()
        kwargs = self._kwargs(text)
        _, ids = text.render_chat(
            self.messages, tools=tools, template_kwargs=kwargs, max_num_tokens=max_num_tokens
        )
        return len(ids)

    def _kwargs(self, text: TextFrontend) -> dict[str, Any]:
        switches: Mapping[str, bool] = {}
        if self.effort == "none" and NO_THINKING.keys() <= text.chat_template_options:
            switches = NO_THINKING
        return {**switches, **self.template_kwargs}


def check_form_and_call(use: ToolUse | None, *, has_form: bool) -> None:
    """Raises ApiError (400) where a call is required, so that the answer cannot have a form."""
    if use is not None and use.choice == "required" and has_form:
        raise invalid_value(
            "tool_choice requires a call, so that the answer cannot have another form; leave "
            "one of them out",
            "tool_choice",
        )


def new_call_id() -> str:
    """The id of a call: nine letters and digits, which some chat templates ask for."""
    return secrets.token_hex(5)[:9]
