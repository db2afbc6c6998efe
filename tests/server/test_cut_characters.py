"""`max_tokens` in the middle of a character: no text, but logprobs with bytes."""

from typing import Any

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.text.tokens.decoder_stages import BYTE_OF_CHARACTER
from tests.server.harness import running_server
from tests.server.scripted_engine import ScriptedEngine

CHARACTERS = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


@pytest.mark.parametrize(("max_tokens", "shown"), [(6, "é🙂"), (5, "é"), (3, "é"), (1, "")])
def test_a_character_that_is_cut_is_left_out_and_its_bytes_are_told(
    max_tokens: int, shown: str
) -> None:
    text = TextFrontend(open_checkpoint(None))
    assert text.tokenizer is not None
    data = "é🙂".encode()
    script = [text.tokenizer.id_of(CHARACTERS[byte]) for byte in data]
    engine = ScriptedEngine(
        [each for each in script if each is not None], vocab_size=text.tokenizer.vocab_size
    )
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    with running_server(engine, text) as server:
        answer = server.post("/v1/chat/completions", {**body, "max_tokens": max_tokens}).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (shown, "length")
    entries = choice["logprobs"]["content"]
    assert [byte for entry in entries for byte in entry["bytes"]] == [*data[:max_tokens]]
