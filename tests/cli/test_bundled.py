"""The bundled model on the command line."""

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from tests.cli.harness import Cadenza

CAPITAL = "The capital of France is"


def test_json_shows_the_continuation_with_its_blank(cadenza: Cadenza):
    ran = cadenza("generate", CAPITAL, "--max-tokens", 8, "--temperature", 0, "-np", 2, "--json")
    assert ran.objects[0]["text"].startswith(" Paris")
    assert ran.objects[-1]["model"] == "bundled"


def test_info_describes_the_bundled_model(cadenza: Cadenza):
    (facts,) = cadenza("info", "--json").objects
    checkpoint = open_checkpoint(None)
    assert facts["model"]["name"] == "bundled"
    assert facts["model"]["family"] == checkpoint.config.family
    assert facts["text"]["has_chat_template"]


@pytest.mark.soak
def test_the_bundled_model_chats(cadenza: Cadenza):
    ran = cadenza("chat", "-np", 1, "--temperature", 0, stdin="What is the capital of France?\n")
    assert ran.code == 0
    assert "Paris" in ran.out
