r"""How byte-level vocabularies split a text before BPE, by `tokenizer.ggml.pre`: the table
`PRE_TOKENIZERS`. An entry gives what the tokenizer.json of the models of that name gives; a name
without one is refused."""

from collections.abc import Mapping
from dataclasses import dataclass

Step = Mapping[str, object]  # of the `pre_tokenizer` of a tokenizer.json


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """The steps before BPE, after which bytes become characters."""

    steps: tuple[Step, ...] = ()
    splits_words: bool = False  # GPT-2's pattern splits what the steps leave
    has_nfc: bool = False  # texts are brought into the normal form C first
    ignores_merges: bool = False  # a word that is in the vocabulary is taken whole


def _split(pattern: str) -> Step:
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


_DIGITS: Step = {"type": "Digits", "individual_digits": True}
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _by_kind(digits: str) -> str:
    """GPT-4's pattern, which differs between models in how it groups digits."""
    return (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _by_case(endings: str, digits: str) -> str:
    """GPT-4o's pattern, which splits words where the case changes."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = (rf"[\p{{L{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}]" for case in ("u}\\p{Lt", "l"))
    return (
        rf"{lead}{upper}*{lower}+{endings}|{lead}{upper}+{lower}*{endings}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = PreTokenizer(splits_words=True)
_SINGLE_DIGITS = PreTokenizer(steps=(_DIGITS,), splits_words=True)
_LLAMA3 = PreTokenizer(steps=(_split(_by_kind(r"\p{N}{1,3}")),), ignores_merges=True)
_GPT4 = PreTokenizer(steps=(_split(_by_kind(r"\p{N}{1,3}")),))
_QWEN2 = PreTokenizer(steps=(_split(_by_kind(r"\p{N}")),), has_nfc=True)
_GPT4O = PreTokenizer(steps=(_split(_by_case(f"{_ENDINGS}?", r"\p{N}{1,3}")),))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer(splits_words=True, has_nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _SINGLE_DIGITS),
    "command-r": PreTokenizer(steps=(_DIGITS,), splits_words=True, has_nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _GPT4),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": PreTokenizer(steps=(_split(_by_case("", r"\p{N}")),), ignores_merges=True),
    "deepseek-coder": PreTokenizer(
        steps=(
            _split(r"[\r\n]"),
            _split(r"\s?\p{L}+"),
            _split(r"\s?\p{P}+"),
            _split("[一-龥ࠀ-一가-퟿]+"),
            _DIGITS,
        ),
    ),
}
