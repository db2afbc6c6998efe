"""Chat templates rendered by Cadenza and by transformers, to the last character and token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza.errors import InvalidRequestError
from cadenza.text import ChatTemplate, Tokenizer
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
    "modes in words": [
        {"role": "system", "content": "Be terse. /no_think"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "\nb"},
        {"role": "user", "content": "c\n\n  d"},
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
    "documents": {"documents": [{"title": "A", "text": "é <b>"}, {"text": "2", "title": "B"}]},
    "tools and documents": {"tools": [TOOL], "documents": [{"title": "A", "text": "x"}]},
    "tools elsewhere": {"tools": [TOOL], "tools_in_user_message": False, "date_string": "1 May"},
}
CALLERS = {"tools", "documents", "add_generation_prompt"}
"""Arguments that every template may be given."""


CONTROLS = (
    "<think> </think> <tools> </tools> <call> </call> <result> </result> <|turn|> <|over|> "
    "<|colon|> <|tool|> <|/tool|> <|system|> <|user|> <|assistant|> [ASK] [/ASK] [TOOLS] "
    "[/TOOLS] [CALLS] [RESULTS] [/RESULTS] <image>"
).split()

each_template = pytest.mark.parametrize(
    "template", [*TEMPLATES, BUNDLED], ids=lambda path: path.parent.name + "/" + path.stem
)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With each control token of the templates, half of them special."""
    from tokenizers import Tokenizer as NativeTokenizer

    path = byte_level(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    native = NativeTokenizer.from_file(str(path))
    native.add_special_tokens(CONTROLS[::2])
    native.add_tokens(CONTROLS[1::2])
    native.save(str(path))
    return path


@pytest.fixture(scope="module")
def oracle(tokenizer_file: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), **VARIABLES)


def outcome(render: Callable[[], Any]) -> Any:
    """What it gives, or `None` for a refusal or a failure of any kind."""
    from jinja2.exceptions import TemplateError

    try:
        return render()
    except (InvalidRequestError, TemplateError, TypeError, ValueError):
        return None


@each_template
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_templates_render_as_in_transformers(
    oracle: Any, tokenizer_file: Path, template: Path, options: dict[str, Any]
):
    source = template.read_text()
    options = {"add_generation_prompt": False, **options}
    ours = ChatTemplate(source, VARIABLES)
    read = {key: value for key, value in options.items() if key in ours.options | CALLERS}
    if "tools" in read and not ours.reads_tools:
        # transformers passes over them; here the prompt says what they are in another way.
        with pytest.raises(InvalidRequestError, match="no place for tools"):
            ours.render(CONVERSATIONS["one turn"], **read)
        return
    tokenizer = Tokenizer(tokenizer_file)
    num_rendered = 0
    for name, messages in CONVERSATIONS.items():
        expected, expected_ids = (
            outcome(
                lambda messages=messages, tokenize=tokenize: oracle.apply_chat_template(
                    messages,
                    chat_template=source,
                    tokenize=tokenize,
                    return_dict=False,
                    **options,
                )
            )
            for tokenize in (False, True)
        )
        text = outcome(lambda messages=messages: ours.render(messages, **read))
        assert text == expected, name
        if text is None or holds_controls(messages):
            continue
        assert tokenizer.encode(text, add_special_tokens=False) == expected_ids, name
        num_rendered += 1
    assert num_rendered >= 2


def holds_controls(messages: list[dict[str, Any]]) -> bool:
    """What a caller spells is text to us, and a control token to transformers."""
    return any(control in str(messages) for control in CONTROLS)


@each_template
def test_a_last_message_is_continued_as_in_transformers(oracle: Any, template: Path):
    source = template.read_text()
    ours = ChatTemplate(source, VARIABLES)
    num_rendered = 0
    for ending in ("The sum is", "The sum is ", "x\n", ""):
        messages = [{"role": "user", "content": "add"}, {"role": "assistant", "content": ending}]
        expected = outcome(
            lambda messages=messages: oracle.apply_chat_template(
                messages, chat_template=source, tokenize=False, continue_final_message=True
            )
        )
        text = outcome(
            lambda messages=messages: ours.render(
                messages, add_generation_prompt=False, continue_final_message=True
            )
        )
        assert text == expected
        num_rendered += text is not None
    assert num_rendered or template.stem == "constructs"
