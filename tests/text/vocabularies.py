"""Tiny tokenizers of the kinds that checkpoints have, trained or put together on the spot."""

from pathlib import Path

from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as NativeTokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the dog sleeps",
    "Größe, naïve, façade, 東京 and 🙂 are words too; 12345 + 678 = 13023",
    "  indented\n\ttext, with  double  spaces and the end. ",
] * 4

SPECIAL = ["<|start|>", "<|end|>"]
SPACE = "▁"


def byte_level(path: Path) -> Path:
    """GPT-2's kind, as Llama 3 and Qwen have it."""
    native = NativeTokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    native.train_from_iterator(CORPUS, trainer)
    native.add_tokens(["<tool>", "日本"])
    native.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 0)]
    )
    return save(native, path)


def stripping(path: Path) -> Path:
    """Added tokens that swallow the spaces around them, and one that holds some."""
    native = NativeTokenizer.from_file(str(byte_level(path)))
    native.add_tokens([AddedToken("<pad>", lstrip=True, rstrip=True), AddedToken(" é ")])
    return save(native, path)


def sentencepiece_bpe(path: Path) -> Path:
    """Llama 2's kind: spaces as marks, unknown characters as byte tokens, one space stripped."""
    learned = NativeTokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    learned.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    pieces = sorted(learned.get_vocab(), key=learned.get_vocab().__getitem__)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [piece for piece in pieces if piece not in "🙂東"]
    vocab = {piece: index for index, piece in enumerate(names)}
    merges = [
        (left, right)
        for left in pieces
        for right in pieces
        if left + right in vocab and left in vocab and right in vocab
    ]
    native = NativeTokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    native.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    native.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    native.add_special_tokens(["<s>", "</s>"])
    return save(native, path)


def unigram(path: Path) -> Path:
    """T5's kind: a unigram model with a Metaspace decoder."""
    native = NativeTokenizer(models.Unigram())
    native.pre_tokenizer = pre_tokenizers.Metaspace()
    native.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False
    )
    native.train_from_iterator(CORPUS, trainer)
    return save(native, path)


def unigram_without_prefix(path: Path) -> Path:
    """A Metaspace that puts no space before the first word, and so takes none away."""
    native = NativeTokenizer.from_file(str(unigram(path)))
    native.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    native.decoder = decoders.Metaspace(prepend_scheme="never")
    return save(native, path)


def first_metaspace(path: Path) -> Path:
    """Llama 2's kind in its newer form: a mark only before the first word of all."""
    native = NativeTokenizer.from_file(str(sentencepiece_bpe(path)))
    native.normalizer = None  # pyright: ignore[reportAttributeAccessIssue]
    native.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    native.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return save(native, path)


def gemma_like(path: Path) -> Path:
    """Byte fallback, but no space stripped."""
    native = NativeTokenizer.from_file(str(sentencepiece_bpe(path)))
    native.normalizer = normalizers.Replace(" ", SPACE)
    native.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return save(native, path)


def without_decoder(path: Path) -> Path:
    """Whole words; the library joins them with spaces."""
    words = {word: index for index, word in enumerate(sorted(set(" ".join(CORPUS).split())))}
    native = NativeTokenizer(models.WordLevel({**words, "[UNK]": len(words)}, unk_token="[UNK]"))
    native.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return save(native, path)


def save(native: NativeTokenizer, path: Path) -> Path:
    native.save(str(path))
    return path


KINDS = {
    "byte_level": byte_level,
    "stripping": stripping,
    "sentencepiece_bpe": sentencepiece_bpe,
    "unigram": unigram,
    "unigram_without_prefix": unigram_without_prefix,
    "first_metaspace": first_metaspace,
    "gemma_like": gemma_like,
    "without_decoder": without_decoder,
}
