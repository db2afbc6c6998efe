"""Words that must not be written become sequences of tokens: `bad_word_token_ids`.

Knows nothing of requests. Invariant: a word is banned where it begins a word and where it goes on
from one, as far as its plain spelling goes; other spellings of the same text are not looked for.
"""

from collections.abc import Iterable

from cadenza.errors import InvalidRequestError
from cadenza.text.tokenizer import Tokenizer


def bad_word_token_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences to ban: each word as it is encoded alone, and after a space.

    A sequence that ends with a shorter one needs no mention: it cannot be completed anyway.

    Raises:
        InvalidRequestError: a word has no tokens.
    """
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
