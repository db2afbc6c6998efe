"""The training text: what is to be copied is in the prompt, and batches depend on the step only."""

import re

import numpy as np
import pytest

from training.batches import COPY_LENGTHS, LONG, training_batch
from training.corpus.copying import copying
from training.corpus.dialogues import dialogue_of_turns
from training.corpus.mixture import Split, open_source
from training.tokenizer import load_tokenizer

ANSWER_END = re.compile(r"<\|im_end\|>|<\|endoftext\|>")


@pytest.mark.parametrize("tokens", [100, 500, 2000])
def test_each_learned_span_of_a_copy_occurs_before_it(tokens: int) -> None:
    source = open_source(Split.TRAIN, "test", tokens)
    for _ in range(50):
        example = copying(source, tokens)
        for start, end in example.learned:
            copied = ANSWER_END.sub("", example.text[start:end]).strip()
            assert copied
            assert copied in example.text[:start]


@pytest.mark.parametrize("turns", [2, 5, 10])
def test_a_dialogue_has_its_turns_and_asks_for_what_was_told(turns: int) -> None:
    source = open_source(Split.TRAIN, "test", turns)
    for _ in range(20):
        example = dialogue_of_turns(source, turns)
        assert example.text.count("<|im_start|>user") == turns
        told = example.text.split("<|im_end|>")[0]
        asked = ANSWER_END.sub("", example.expected).removesuffix(".").split(" is ")[1]
        assert asked in told


def test_a_batch_depends_on_its_step_only() -> None:
    tokenizer = load_tokenizer()

    def batch(step: int) -> np.ndarray:
        return training_batch(tokenizer, (1, step), step, copy_steps=4, long_from=8).token_ids

    for step in (2, 7, 15):
        np.testing.assert_array_equal(batch(step), batch(step))
    assert [batch(step).shape[1] for step in range(4)] == list(COPY_LENGTHS)
    assert batch(7).shape[1] < LONG
    assert batch(15).shape[1] == LONG
