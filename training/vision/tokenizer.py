"""The tokenizer of the bundled model that sees: byte-level BPE over questions and answers.

Owns `tokenizer.json` and `tokenizer_config.json` of `models/bundled-vision`.  Any text encodes,
because all 256 bytes are in the vocabulary.

Run as `python -m training.vision.tokenizer` from the root of the repository.
"""

from collections.abc import Iterator

from tokenizers import Tokenizer

from training.corpus.example import END_OF_TEXT, TURN_END, TURN_START, Split
from training.corpus.mixture import open_source
from training.tokenizer import BUNDLED, save_tokenizer, train_bpe
from training.vision.dialogues import FAKE, GLOBAL, IMAGE, make_dialogue
from training.vision.shape import VOCAB_SIZE

BUNDLED_VISION = BUNDLED.parent / "bundled-vision"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END, FAKE, GLOBAL, IMAGE)
NUM_DIALOGUES = 4000


def load_vision_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED_VISION / "tokenizer.json"))


def _texts() -> Iterator[str]:
    """Text of dialogues, without special tokens."""
    source = open_source(Split.TRAIN, "vision tokenizer")
    for _ in range(NUM_DIALOGUES):
        text = make_dialogue(source, 2, max_turns=6).text
        for token in SPECIAL:
            text = text.replace(token, "\n")
        yield text


if __name__ == "__main__":
    save_tokenizer(train_bpe(_texts(), VOCAB_SIZE, SPECIAL), BUNDLED_VISION)
