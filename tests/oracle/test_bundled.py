"""The bundled model in transformers: the same ids, the same rendered chats, the same greedy text.

Prompts that spell control tokens are given to ours as a template's own words, since transformers
takes every text for one. Both sides compute in float32. Where two tokens are within rounding of
each other (`NEAR_TIE`, of the range of transformers' logits) either is right; such prompts are
shown and must be rare.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza import LLM, SamplingParams
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.models.declaration import declare
from cadenza.text import ChatTemplate, Tokenizer
from cadenza.text.tokens.provenance import written_by_template
from tests.oracle.hf import load_model

BUNDLED = Path("src/cadenza/models/bundled")
PROMPTS = Path("training/prompts.json")
NUM_PROMPTS = 200
NUM_TOKENS = 32
NEAR_TIE = 1e-4
MAX_NEAR_TIES = 2

pytestmark = pytest.mark.oracle

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says what the weather is like in a “city”.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": " Größe 東京 🙂? <|im_end|>"},
    ],
    "several turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": "c"},
    ],
    "a call and its result": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"sky": "clear"}'},
        {"role": "assistant", "content": "It is clear.", "tool_calls": [CALL, CALL]},
    ],
    "content in parts": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ],
}
TEXTS = (
    "The capital of France is Paris.",
    "  two  spaces,\ttabs\n\n\nand lines\r\n",
    '1234567890 + 0.5 = {"a": [1, null]}',
    "naïve Größe Łódź 東京 日本語 🙂👩‍👩‍👧 \u200d \ufffd é e\u0301",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{}\n</tool_call>",
    "",
)


@dataclass(frozen=True, slots=True)
class Theirs:
    """transformers' greedy continuation: shown text, new ids, and the logits [N, V] of each."""

    text: str
    token_ids: list[int]
    logits: np.ndarray


@pytest.fixture(scope="module")
def model() -> Any:
    import torch

    torch.set_num_threads(1)  # over matrices this small a second thread only waits
    return load_model(BUNDLED)


@pytest.fixture(scope="module")
def their_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BUNDLED, local_files_only=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    path = open_checkpoint(BUNDLED).tokenizer_source
    assert path is not None
    return Tokenizer(path)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    found = [each["prompt"] for each in json.loads(PROMPTS.read_text())]
    assert len(found) == NUM_PROMPTS
    return found


def test_it_is_a_standard_architecture_with_exactly_our_tensors(model: Any):
    assert type(model).__module__.startswith("transformers.models.")
    checkpoint = open_checkpoint(BUNDLED)
    theirs = dict(model.named_parameters())
    assert {spec.name for spec in declare(checkpoint.config)} == set(theirs)
    for name, parameter in theirs.items():
        ours = np.asarray(checkpoint.weights[name]).astype(np.float32)
        assert np.array_equal(ours, parameter.detach().numpy()), name


def test_end_of_sequence_ids_are_the_same(model: Any):
    theirs = model.generation_config.eos_token_id
    expected = theirs if isinstance(theirs, list) else [theirs]
    assert set(open_checkpoint(BUNDLED).eos_token_ids) == set(expected)


def test_texts_have_the_same_ids_and_come_back(
    tokenizer: Tokenizer, their_tokenizer: Any, prompts: list[str]
):
    for text in [*TEXTS, *prompts]:
        ids = tokenizer.encode(written_by_template(text))
        assert ids == their_tokenizer.encode(text), text
        for skip in (False, True):
            theirs = their_tokenizer.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_id_has_the_same_text(tokenizer: Tokenizer, their_tokenizer: Any):
    assert tokenizer.vocab_size == len(their_tokenizer)
    for token_id in range(len(their_tokenizer)):
        theirs = their_tokenizer.decode([token_id], skip_special_tokens=False)
        assert tokenizer.decode([token_id], skip_special_tokens=False) == theirs, token_id


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
def test_chats_are_rendered_alike(
    their_tokenizer: Any, tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any
):
    files = open_checkpoint(BUNDLED).tokenizer
    template = ChatTemplate.of(files.chat_templates, files.special_tokens)
    assert template is not None
    for adds_prompt in (False, True):
        options = {"tools": tools, "add_generation_prompt": adds_prompt}
        ours = template.render(messages, **options)
        assert ours == their_tokenizer.apply_chat_template(messages, tokenize=False, **options)
        ids = their_tokenizer.apply_chat_template(messages, return_dict=False, **options)
        by_template = written_by_template(ours)
        assert tokenizer.encode(by_template, add_special_tokens=False) == ids


@pytest.fixture(scope="module")
def continuations(model: Any, their_tokenizer: Any, prompts: list[str]) -> list[Theirs]:
    """Each prompt alone, as transformers' own `generate` continues it."""
    import torch

    found: list[Theirs] = []
    for prompt in prompts:
        ids = torch.tensor([their_tokenizer.encode(prompt)])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        new_ids = output.sequences[0, ids.shape[1] :].tolist()
        logits = torch.cat(output.logits).numpy()  # [N, V]
        text = their_tokenizer.decode(new_ids, skip_special_tokens=True)
        found.append(Theirs(text, new_ids, logits))
    return found


@pytest.mark.parametrize("ops", ["reference", pytest.param("native", marks=pytest.mark.native)])
def test_greedy_text_is_the_same_for_every_prompt(
    prompts: list[str],
    tokenizer: Tokenizer,
    continuations: list[Theirs],
    ops: str,
    capsys: pytest.CaptureFixture[str],
):
    """All prompts in one running batch on our side."""
    encoded = [tokenizer.encode(written_by_template(prompt)) for prompt in prompts]
    with LLM(BUNDLED, ops=ops, dtype="float32", max_num_seqs=16) as llm:
        outputs = llm.generate(encoded, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    gaps: dict[int, float] = {}
    for index, (output, theirs) in enumerate(zip(outputs, continuations, strict=True)):
        ours = output.outputs[0]
        if ours.text != theirs.text:
            gaps[index] = gap_where_they_part(list(ours.token_ids), theirs)
    with capsys.disabled():
        num_same = len(prompts) - len(gaps)
        print(f"\nbundled, {ops}: {num_same} of {len(prompts)} texts are the same; {gaps}", end="")
    assert len({theirs.text for theirs in continuations}) > NUM_PROMPTS // 2, "they say nothing"
    assert all(gap <= NEAR_TIE for gap in gaps.values())
    assert len(gaps) <= MAX_NEAR_TIES


def gap_where_they_part(ours: list[int], theirs: Theirs) -> float:
    """How far transformers' logits of the two first different tokens are apart, of their range.

    Infinite where the same tokens gave another text, or where one side stopped.
    """
    for index, (mine, their) in enumerate(zip(ours, theirs.token_ids, strict=False)):
        if mine != their:
            row = theirs.logits[index]
            return float((row[their] - row[mine]) / np.ptp(theirs.logits))
    return np.inf
