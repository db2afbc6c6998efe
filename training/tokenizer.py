"""The tokenizer: byte-level BPE over generated text, digits one by one.

Owns `tokenizer.json` and `tokenizer_config.json` of the bundled checkpoint.  Any text
encodes, because all 256 bytes are in the vocabulary.

Run as `python -m training.tokenizer` from the root of the repository.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.corpus.chat import TEMPLATE_PATH
from training.corpus.example import END_OF_TEXT, TURN_END, TURN_START
from training.corpus.mixture import SHARES, Split, make_example, open_source

BUNDLED = TEMPLATE_PATH.parent
VOCAB_SIZE = 2560
NUM_ROUNDS = 6000
MAX_TOKENS = 200

SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
VISIBLE = ("<tool_call>", "</tool_call>")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer() -> Tokenizer:
    tokenizer = train_bpe(_texts(), VOCAB_SIZE - len(VISIBLE), SPECIAL)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in VISIBLE])
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int, special: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer; the ids of `special` are the first ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes it with the chat template that lies in the folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": (folder / TEMPLATE_PATH.name).read_text(encoding="utf-8"),
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _texts() -> Iterator[str]:
    """Text of every task, without special tokens."""
    source = open_source(Split.TRAIN, "tokenizer")
    for _ in range(NUM_ROUNDS):
        for task in SHARES:
            text = make_example(task, source, max_tokens=MAX_TOKENS).text
            for token in SPECIAL + VISIBLE:
                text = text.replace(token, "\n")
            yield text


if __name__ == "__main__":
    save_tokenizer(train_tokenizer(), BUNDLED)
