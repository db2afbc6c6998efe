"""Tokenisation by Cadenza and by transformers, id for id."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cadenza.text import Tokenizer
from cadenza.text.tokens.provenance import written_by_template
from tests.text.vocabularies import KINDS, SPECIAL

pytestmark = pytest.mark.oracle

BUNDLED = Path("src/cadenza/models/bundled/tokenizer.json")
TEXT = st.lists(
    st.sampled_from([*SPECIAL, "<s>", "the dog", " ", "\n\n", "東京", "🙂", "日本", "<tool>", "7"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    max_size=6,
).map("".join)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Tokenizer, Any]]:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizers")
    paths = [make(folder / f"{kind}.json") for kind, make in KINDS.items()]
    paths += [BUNDLED] if BUNDLED.exists() else []
    return [(Tokenizer(path), PreTrainedTokenizerFast(tokenizer_file=str(path))) for path in paths]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, add_special_tokens=st.booleans())
def test_text_has_transformers_ids(
    pairs: list[tuple[Tokenizer, Any]], text: str, add_special_tokens: bool
):
    for ours, theirs in pairs:
        expected = theirs.encode(text, add_special_tokens=add_special_tokens)
        by_template = written_by_template(text)
        assert ours.encode(by_template, add_special_tokens=add_special_tokens) == expected


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(token_ids=st.lists(st.integers(0, 119), max_size=20), skip=st.booleans())
def test_ids_have_transformers_text(
    pairs: list[tuple[Tokenizer, Any]], token_ids: list[int], skip: bool
):
    for ours, theirs in pairs:
        known = [token_id for token_id in token_ids if ours.token_of(token_id) is not None]
        expected = theirs.decode(
            known, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        assert ours.decode(known, skip_special_tokens=skip) == expected
