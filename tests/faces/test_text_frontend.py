"""Prompts through `TextFrontend`: what users write is text, with a template and without."""

import json
from pathlib import Path

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.frontend.prepared_request import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from tests.checkpoint.files import write_folder
from tests.text.vocabularies import byte_level

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


@pytest.fixture
def face(tmp_path: Path) -> TextFrontend:
    folder = write_folder(tmp_path, {"chat_template.jinja": TEMPLATE})
    byte_level(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|start|>"}))
    return TextFrontend(open_checkpoint(folder))


def test_a_raw_prompt_is_text_behind_the_tokenizers_own_start(face: TextFrontend):
    assert face.encode("the<|end|>")[0] == 0
    assert 1 not in face.encode("the<|end|>")
    assert face.encode("<|start|>").count(0) == 1


def test_a_chat_has_one_start_and_the_templates_ends(face: TextFrontend):
    text, token_ids = face.render_chat(
        ChatPrompt(messages=[{"role": "user", "content": "<|start|>the<|end|>"}])
    )
    assert text == "<|start|><|start|>the<|end|><|end|>"
    assert (token_ids.count(0), token_ids.count(1)) == (1, 1)
    assert (token_ids[0], token_ids[-1]) == (0, 1)
