"""Token sequences of banned words: `bad_word_token_ids`. Invariant: a word is banned both after a
space and within a word, in its usual tokenization; other tokenizations of the same text are not
banned.
"""

from collections.abc import Iterable

from cadenza.errors import InvalidRequestError
from cadenza.text.tokens.tokenizer import Tokenizer


def bad_word_token_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences to ban: each word encoded alone and after a space. Sequences that end
    with another banned sequence are left out: they can never be completed. Raises
    InvalidRequestError where a word encodes to no tokens."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        spellings = [
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}")
        ]
        if not spellings[0]:
            raise InvalidRequestError(
                f"the bad word {word!r} has no tokens in this model's vocabulary; leave it out",
                param="bad_words",
            )
        found.update(dict.fromkeys(spellings))
    shortest_first = sorted(found, key=len)
    return tuple(
        ids
        for index, ids in enumerate(shortest_first)
        if not any(ids[-len(short) :] == short for short in shortest_first[:index])
    )
