"""Chat templates rendered by Cadenza and by transformers, to the last character."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza.errors import InvalidRequestError
from cadenza.text import ChatTemplate
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.oracle

BUNDLED = Path("src/cadenza/models/bundled/chat_template.jinja")
TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
VARIABLES = {"bos_token": "<|start|>", "eos_token": "<|end|>"}

CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": [2, "é<&>"], "c": None}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds “numbers” <b>",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "  What is 1 + 1?\n"}],
    "system": [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "Größe 東京 🙂?"},
    ],
    "several turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "<result>x</result>"},
        {"role": "assistant", "content": " c \n"},
    ],
    "reasoning": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "\nfirst\nsecond\n"},
    ],
    "old names of reasoning": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "why"},
    ],
    "a call": [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 3."},
    ],
    "two calls": [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "Well.", "tool_calls": [CALL, CALL]},
    ],
    "content in parts": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ],
    "no content": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}],
    "roles out of order": [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ],
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "generation prompt": {"add_generation_prompt": True},
    "tools": {"tools": [TOOL, TOOL], "add_generation_prompt": True},
    "no thinking": {"enable_thinking": False, "add_generation_prompt": True},
    "thinking": {"enable_thinking": True, "add_generation_prompt": True},
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    path = byte_level(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=str(path), **VARIABLES)


def outcome(render: Callable[[], str]) -> str | None:
    """The text, or `None` for a refusal or a failure of any kind."""
    from jinja2.exceptions import TemplateError

    try:
        return render()
    except (InvalidRequestError, TemplateError, TypeError):
        return None


@pytest.mark.parametrize(
    "template", [*TEMPLATES, BUNDLED], ids=lambda path: path.parent.name + "/" + path.stem
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_templates_render_as_in_transformers(oracle: Any, template: Path, options: dict[str, Any]):
    source = template.read_text()
    options = {"add_generation_prompt": False, **options}
    ours = ChatTemplate(source, VARIABLES)
    num_rendered = 0
    for name, messages in CONVERSATIONS.items():
        expected = outcome(
            lambda messages=messages: oracle.apply_chat_template(
                messages, chat_template=source, tokenize=False, **options
            )
        )
        assert outcome(lambda messages=messages: ours.render(messages, **options)) == expected, name
        num_rendered += expected is not None
    assert num_rendered >= 3
