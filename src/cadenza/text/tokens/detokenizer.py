"""`IncrementalDetokenizer`, over incremental stages of tokenizer.json's `decoder`. Invariant: for
any tokens, the joined output equals `Tokenizer.decode` of all of them, and output is final; the
work per token is independent of the stream's length.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from cadenza.errors import CheckpointError
from cadenza.text.tokens.decoder_stages import (
    CLEANUPS,
    BufferedText,
    ByteFallbackText,
    ByteFallbackTokens,
    ByteLevelText,
    Changes,
    CTCTokens,
    Decode,
    EditTokens,
    JoinBytes,
    ReplaceText,
    StripText,
    SuffixTokens,
    TextStage,
    TokenEdit,
    TokenStage,
    replace_all,
)
from cadenza.text.tokens.tokenizer import Tokenizer

Step = Mapping[str, Any]  # the JSON object of one decoder step in tokenizer.json


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderPlan:
    """A decoder's steps in order."""

    edits: tuple[TokenEdit, ...] = ()
    token_stages: tuple[Callable[[], TokenStage], ...] = ()
    text_stages: tuple[Callable[[], TextStage], ...] = ()


class IncrementalDetokenizer:
    """Decodes one stream of tokens. `plan`, of the tokenizer's decoder, may be shared between
    streams. Raises CheckpointError where the decoder has an unsupported step."""

    __slots__ = ("_edits", "_is_first", "_skipped", "_text_stages", "_token_stages", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        plan: DecoderPlan | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        plan = plan or plan_decoder(tokenizer.decoder_description())
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._edits = plan.edits
        self._token_stages = [make() for make in plan.token_stages]
        self._text_stages = [make() for make in plan.text_stages]
        self._is_first = True

    def push(self, token_id: int) -> str:
        """The text that this token makes final; "" while a character is incomplete."""
        token = None if token_id in self._skipped else self._tokenizer.token_of(token_id)
        if token is None:
            return ""
        for edit in self._edits:
            token = edit(token, self._is_first)
        self._is_first = False
        if not self._token_stages:
            for stage in self._text_stages:
                token = stage.push(token)
            return token
        tokens = [token]
        for stage in self._token_stages:
            tokens = _push_all(stage, tokens)
        return self._join(tokens[0]) if len(tokens) == 1 else "".join(map(self._join, tokens))

    def drop_incomplete(self) -> None:
        """For a stream that was cut: `flush` gives no replacement for an incomplete character."""
        for stage in (*self._token_stages, *self._text_stages):
            if isinstance(stage, JoinBytes | ByteFallbackTokens | ByteLevelText):
                stage.drop_incomplete()

    def flush(self) -> str:
        tokens: list[str] = []
        for stage in self._token_stages:
            tokens = [*_push_all(stage, tokens), *stage.flush()]
        parts = [self._join(token) for token in tokens]
        for index, stage in enumerate(self._text_stages):
            text = stage.flush()
            for following in self._text_stages[index + 1 :]:
                text = following.push(text)
            parts.append(text)
        return "".join(parts)

    def _join(self, text: str) -> str:
        for stage in self._text_stages:
            text = stage.push(text)
        return text


def _push_all(stage: TokenStage, tokens: list[str]) -> list[str]:
    if len(tokens) == 1:
        return stage.push(tokens[0])
    return [given for token in tokens for given in stage.push(token)]


def plan_decoder(description: Step | None) -> DecoderPlan:
    """tokenizer.json's `decoder` as stages; None joins tokens with spaces. Raises CheckpointError
    where a step's type is not supported."""
    if description is None:
        return DecoderPlan(edits=(_put_space_before,))
    edits: list[TokenEdit] = []
    token_stages: list[Callable[[], TokenStage]] = []
    text_stages: list[Callable[[], TextStage]] = []
    is_joined = False
    for step in _flatten(description):
        kind = step["type"]
        if kind not in _TEXT_STAGES:
            raise CheckpointError(
                f"the tokenizer's decoder has a step of type {str(kind)[:40]!r}, which is not "
                f"supported; supported are {', '.join(_TEXT_STAGES)}"
            )
        if is_joined:
            text_stages += _TEXT_STAGES[kind](step)
        elif kind in _JOINS:
            text_stages += _JOINS[kind]
            is_joined = True
        elif kind in _STAGES:
            token_stages.append(_STAGES[kind](step))
        elif token_stages:
            token_stages.append(partial(EditTokens, _EDITS[kind](step)))
        else:
            edits.append(_EDITS[kind](step))
    return DecoderPlan(
        edits=tuple(edits), token_stages=tuple(token_stages), text_stages=tuple(text_stages)
    )


def _flatten(description: Step) -> list[Step]:
    if description["type"] != "Sequence":
        return [description]
    inner = cast(list[Step], description["decoders"])
    return [step for part in inner for step in _flatten(part)]


def _put_space_before(token: str, is_first: bool) -> str:
    return token if is_first else " " + token


def _replace_edit(step: Step) -> TokenEdit:
    old, new = _literal(step), cast(str, step["content"])
    if old is None:
        decode = _library_replace(step)
        return lambda token, _: decode([token])
    return lambda token, _: token.replace(old, new)


def _replace_text(step: Step) -> list[Callable[[], TextStage]]:
    old = _literal(step)
    if old is None:
        return [partial(BufferedText, _library_replace(step))]
    return _replacing(((old, step["content"]),))


def _replacing(changes: Changes) -> list[Callable[[], TextStage]]:
    """One stage per replacement. An empty `old` inserts `new` around every character."""
    return [
        partial(ReplaceText, old, new)
        if old
        else partial(BufferedText, lambda tokens, new=new: tokens[0].replace("", new))
        for old, new in changes
    ]


def _literal(step: Step) -> str | None:
    return cast(dict[str, str], step["pattern"]).get("String") or None


def _library_replace(step: Step) -> Decode:
    from tokenizers import Regex
    from tokenizers.decoders import Replace

    # The syntax of its expressions is not Python's.
    pattern = cast(dict[str, str], step["pattern"])
    wanted = pattern["String"] if "String" in pattern else Regex(pattern["Regex"])
    return Replace(wanted, step["content"]).decode


def _metaspace_edit(step: Step) -> TokenEdit:
    mark, first = cast(str, step["replacement"]), _first_metaspace(step)
    return lambda token, is_first: token.replace(mark, first if is_first else " ")


def _first_metaspace(step: Step) -> str:
    return " " if step["prepend_scheme"] == "never" else ""


def _word_piece_edit(step: Step) -> TokenEdit:
    prefix, changes = cast(str, step["prefix"]), CLEANUPS if step["cleanup"] else ()

    def edit(token: str, is_first: bool) -> str:
        if not is_first:
            has_prefix = token.startswith(prefix)
            token = token.removeprefix(prefix) if has_prefix else " " + token
        return replace_all(token, changes)

    return edit


def _ctc_changes(step: Step) -> Changes:
    without_pads = ((step["pad_token"], ""),)
    if not step["cleanup"]:
        return without_pads
    return (*without_pads, *CLEANUPS, (step["word_delimiter_token"], " "))


def _strip_edit(step: Step) -> TokenEdit:
    def edit(token: str, _: bool) -> str:
        return StripText(step["content"], step["start"], step["stop"]).push(token)

    return edit


# Steps by their types: those that edit each token by itself,
_EDITS: dict[str, Callable[[Step], TokenEdit]] = {
    "Metaspace": _metaspace_edit,
    "Replace": _replace_edit,
    "Strip": _strip_edit,
    "WordPiece": _word_piece_edit,
}

# those that need neighbouring tokens,
_STAGES: dict[str, Callable[[Step], Callable[[], TokenStage]]] = {
    "BPEDecoder": lambda step: partial(SuffixTokens, step["suffix"]),
    "ByteFallback": lambda _: ByteFallbackTokens,
    "CTC": lambda step: partial(CTCTokens, _ctc_changes(step)),
}

# those that join the tokens into one text,
_JOINS: dict[str, list[Callable[[], TextStage]]] = {"ByteLevel": [JoinBytes], "Fuse": []}

# and every step's version after the join: the joined text counts as first and last token.
_TEXT_STAGES: dict[str, Callable[[Step], list[Callable[[], TextStage]]]] = {
    "BPEDecoder": lambda step: _replacing(((step["suffix"], ""),)),
    "ByteFallback": lambda _: [ByteFallbackText],
    "ByteLevel": lambda _: [ByteLevelText],
    "CTC": lambda step: _replacing(_ctc_changes(step)),
    "Fuse": lambda _: [],
    "Metaspace": lambda step: _replacing(((step["replacement"], _first_metaspace(step)),)),
    "Replace": _replace_text,
    "Strip": lambda step: [partial(StripText, step["content"], step["start"], step["stop"])],
    "WordPiece": lambda step: _replacing(CLEANUPS if step["cleanup"] else ()),
}
