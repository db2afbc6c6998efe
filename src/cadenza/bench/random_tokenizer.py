"""A tokenizer for random weights, so that what they generate can be streamed and timed as text.

Owns the names of its tokens. Invariant: every token of the vocabulary has a text of its own, and
any text can be encoded if there are at least 256 tokens: the first stand for single bytes, the rest
for made-up words that no text is ever encoded to.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_SPACE = "Ġ"
_LETTERS = "etaoinshrdlucmfwygpbvkxqjz"


def write_random_tokenizer(path: Path, vocab_size: int) -> None:
    """Writes a byte-level tokenizer.json of `vocab_size` tokens."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab_size]
    names += [_SPACE + _word(number) for number in range(vocab_size - len(names))]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def _word(number: int) -> str:
    """Two letters or more, another word for each number."""
    letters = ""
    number += len(_LETTERS)
    while number:
        number, letter = divmod(number, len(_LETTERS))
        letters += _LETTERS[letter]
    return letters
