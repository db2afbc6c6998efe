"""Dialogues as the bundled chat template renders them.

Training dialogues are rendered with the template that is shipped with the checkpoint.
Assistant messages are learned; the last one is the answer.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from training.corpus.example import TURN_END, TURN_START, Example

Message = dict[str, Any]

TEMPLATE_PATH = (
    Path(__file__).parents[2] / "src" / "cadenza" / "models" / "bundled" / "chat_template.jinja"
)
ASSISTANT_TURN = re.compile(
    rf"(?<={re.escape(TURN_START)}assistant\n).*?{re.escape(TURN_END)}", re.DOTALL
)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def render(
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = False,
) -> str:
    return _template().render(
        messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
    )


def dialogue(
    task: str, messages: list[Message], tools: list[dict[str, Any]] | None = None
) -> Example:
    """A dialogue that ends with the assistant's answer."""
    text = render(messages, tools)
    learned = tuple(turn.span() for turn in ASSISTANT_TURN.finditer(text))
    return Example(task=task, text=text.rstrip("\n"), learned=learned, answer=learned[-1])


@functools.cache
def _template() -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment.from_string(TEMPLATE_PATH.read_text(encoding="utf-8"))
