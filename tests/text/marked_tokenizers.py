"""The bundled tokenizer with further marks that are special tokens, as families have them."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.text import Tokenizer
from cadenza.text.tokens.tokenizer import TokenizerSource


def marked_source(marks: Sequence[str]) -> TokenizerSource:
    """Behind the tokens that it has."""
    source = open_checkpoint(None).tokenizer_source
    assert source is not None
    content = source.content if isinstance(source, TokenizerSource) else source.read_bytes()
    described = json.loads(content)
    known = {each["content"] for each in described["added_tokens"]}
    first = 1 + max(
        *described["model"]["vocab"].values(), *(each["id"] for each in described["added_tokens"])
    )
    new = [mark for mark in marks if mark not in known]
    like = described["added_tokens"][0]
    described["added_tokens"] += [
        {**like, "id": first + place, "content": mark, "special": True}
        for place, mark in enumerate(new)
    ]
    written = json.dumps(described).encode()
    return TokenizerSource(name="marked", read=lambda: written)


def marked_checkpoint(marks: Sequence[str], template: str) -> Checkpoint:
    """The bundled model with the marks and a chat template."""
    checkpoint = open_checkpoint(None)
    templates = {"default": template}
    files = replace(checkpoint.tokenizer, source=marked_source(marks), chat_templates=templates)
    return replace(checkpoint, tokenizer=files)


def with_marks(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, in which marks that are tokens are these."""
    added = tokenizer.added_tokens
    pattern = "|".join(map(re.escape, added)) or "(?!)"
    ids: list[int] = []
    for part in re.split(f"({pattern})", text):
        ids += [added[part]] if part in added else tokenizer.encode(part, add_special_tokens=False)
    return ids
