"""Random prompts hold no placeholders of images."""

from types import SimpleNamespace
from typing import Any

from cadenza.bench.runs import text_ids
from cadenza.config import ImageLimits


def core_with(images: ImageLimits | None) -> Any:
    return SimpleNamespace(
        runner=SimpleNamespace(vocab_size=5), limits=SimpleNamespace(images=images)
    )


def test_random_prompts_of_a_model_that_sees_have_no_placeholder():
    assert list(text_ids(core_with(ImageLimits(token_id=3, num_slots=8)))) == [0, 1, 2, 4]


def test_random_prompts_of_a_model_of_text_have_any_token():
    assert list(text_ids(core_with(None))) == [0, 1, 2, 3, 4]
