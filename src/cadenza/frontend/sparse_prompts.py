"""`SparsePrompts`: which prompts of a server are pruned, which tokens are kept whatever they score,
and why a prompt is computed whole. Invariant: this depends on the request and the server's settings
alone; the engine may still decide otherwise (`events.WholePromptReason`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, get_args

from cadenza.errors import InvalidRequestError
from cadenza.events import Started
from cadenza.fingerprint import Fingerprint
from cadenza.outputs import PromptUse
from cadenza.request import Request
from cadenza.sparse_prefill import (
    CHUNK,
    LAST_TOKENS,
    LOOK_AHEAD,
    POOL,
    PromptSpan,
    SparsePrefill,
    SpecPrefillChoice,
    SpecPrefillConfig,
    kept_of_mask,
)
from cadenza.text.tokens.provenance import MarkedText

WholeReason = Literal[
    "declined",  # the request asked for all of it
    "off",  # the server prunes none
    "pooling",  # an embedding needs all of it
    "prompt_logprobs",
    "images",
    "repetition_penalty",  # tokens that were left out would not be penalised
    "short",  # below the threshold
    "draft_context",  # longer than the draft model's context
]

WHOLE_REASONS: tuple[str, ...] = get_args(WholeReason)

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
Encode = Callable[[str], Sequence[int]]

_FROM_SYSTEM = ("system", "developer")
_OTHER_CONTENT = "\ue000"  # with which no message begins


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePrompts:
    """Of one server."""

    config: SpecPrefillConfig | None = None  # None: it prunes none
    scored_tokens: int | None = None  # of the longest prompt that the draft model scores

    def scored_by(self, scored_tokens: int | None) -> "SparsePrompts":
        if scored_tokens == self.scored_tokens:
            return self
        return replace(self, scored_tokens=scored_tokens)

    def pruned(self, request: Request) -> Request:
        """With `sparse_prefill` set if its prompt is pruned. Raises InvalidRequestError where it
        may not choose."""
        config, choice = self.config, request.params.spec_prefill
        own = choice if isinstance(choice, SpecPrefillChoice) else SpecPrefillChoice()
        if config is not None and not config.allow_request and own != SpecPrefillChoice():
            raise InvalidRequestError(
                "spec_prefill is this server's own choice (--spec-prefill, allow_request); leave "
                "it out, or send false for the whole prompt",
                param="spec_prefill",
            )
        if config is None or request.sparse_prefill is not None or self.whole_because(request):
            return request
        sparse = SparsePrefill(
            keep=config.keep if own.keep is None else own.keep,
            forced=tuple(own.spans),
            when=own.when or config.when,
        )
        return replace(request, sparse_prefill=sparse)

    def planned_use(self, request: Request) -> PromptUse | None:
        """Of a resolved request; None where nobody asked for less than all."""
        num_tokens, sparse = len(request.prompt_token_ids), request.sparse_prefill
        if sparse is None and self.config is None and not request.params.spec_prefill:
            return None
        if sparse is None:
            return whole_use(num_tokens, self.whole_because(request))
        num_kept = sparse.num_kept_tokens(num_tokens)
        return PromptUse(num_kept_tokens=num_kept, num_skipped_tokens=num_tokens - num_kept)

    def whole_because(self, request: Request) -> WholeReason | None:
        config, params = self.config, request.params
        if params.spec_prefill is False:
            return "declined"
        if config is None:
            return "off"
        if request.pooling is not None:
            return "pooling"
        if params.prompt_logprobs is not None:
            return "prompt_logprobs"
        if request.attachments:
            return "images"
        if params.repetition_penalty != 1.0:
            return "repetition_penalty"
        return self._too_short_or_long(config, request)

    def _too_short_or_long(self, config: SpecPrefillConfig, request: Request) -> WholeReason | None:
        choice, num_tokens = request.params.spec_prefill, len(request.prompt_token_ids)
        own = choice.threshold if isinstance(choice, SpecPrefillChoice) else None
        if num_tokens < (config.threshold if own is None else own):
            return "short"
        if self.scored_tokens is not None and num_tokens > self.scored_tokens:
            return "draft_context"
        return None

    def fingerprint_of(self, request: Request, whole: Fingerprint) -> Fingerprint:
        """Equal requests with equal fingerprints keep the same chunks; `whole`: the fingerprint of
        whole prompts."""
        sparse, config = request.sparse_prefill, self.config
        if sparse is None:
            return whole
        head = 0 if config is None else config.head
        numbers = "-".join(map(str, (CHUNK, LOOK_AHEAD, POOL, LAST_TOKENS)))
        return whole.pruned(f"{numbers}-keep{float(sparse.keep)!r}-{sparse.when}-head{head}")

    def with_places(self, request: Request, places: Sequence[PromptSpan], num_cut: int) -> Request:
        """With further kept spans, of the prompt before `num_cut` leading tokens were cut; the
        first is the head, at most as long as configured."""
        sparse, config = request.sparse_prefill, self.config
        if sparse is None or config is None or sparse.kept is not None:
            return request
        moved = [PromptSpan(max(0, a - num_cut), b - num_cut) for a, b in places if b > num_cut]
        head = [span for span in moved if span.start == 0]
        most = max((min(span.stop, config.head) for span in head), default=0)
        kept = [PromptSpan(0, most)] if most else []
        kept += [span for span in moved if span.start > 0]
        forced = (*sparse.forced, *kept)
        return replace(request, sparse_prefill=replace(sparse, forced=forced, cold_from=most))


def whole_use(num_tokens: int, because: str | None) -> PromptUse:
    return PromptUse(num_kept_tokens=num_tokens, num_skipped_tokens=0, whole_because=because)


def started_use(request: Request, event: Started) -> PromptUse:
    num_tokens = len(request.prompt_token_ids)
    if event.kept is None:
        return whole_use(num_tokens, event.whole_because)
    kept = kept_of_mask(event.kept, num_tokens)
    return PromptUse(num_kept_tokens=kept.num_tokens, num_skipped_tokens=kept.num_skipped)


def places_in(
    messages: Sequence[Message], text: str, ids: Sequence[int], render: Render, encode: Encode
) -> list[PromptSpan]:
    """Where the tokens of a conversation are that are kept: its head, up to the first message that
    is no system text, and the beginning of the user's last message. `render` makes the text of
    other messages, `encode` the ids of a part of it."""
    users = [index for index, each in enumerate(messages) if each.get("role") == "user"]
    others = [n for n, each in enumerate(messages) if each.get("role") not in _FROM_SYSTEM]
    if not others:
        return []
    head = len(encode(_cut(text, 0, _begin(messages, others[0], text, render))))
    found = [PromptSpan(0, head)] if head else []
    if users and users[-1] != others[0]:
        begin = _begin(messages, users[-1], text, render)
        start = max(head, len(ids) - len(encode(_cut(text, begin, len(text)))))
        found.append(PromptSpan(start, start + CHUNK))
    elif users:
        found.append(PromptSpan(head, head + CHUNK))
    return found


def _begin(messages: Sequence[Message], index: int, text: str, render: Render) -> int:
    """Where the rendered text differs if the message's content does; 0 if the template refuses that
    content."""
    other = {**messages[index], "content": _OTHER_CONTENT}
    try:
        changed = render([*messages[:index], other, *messages[index + 1 :]])
    except InvalidRequestError:
        return 0
    pairs = enumerate(zip_longest(str.__str__(text), str.__str__(changed)))
    return next((at for at, (one, another) in pairs if one != another), 0)


def _cut(text: str, start: int, stop: int) -> str:
    return text.cut(start, stop) if isinstance(text, MarkedText) else text[start:stop]
