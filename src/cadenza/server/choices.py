"""Choices of an answer in the two endpoints' shapes, whole or as parts of a stream.

Owns the shapes of texts and log probabilities. Knows no HTTP. Invariant: a whole choice is made by
the same code as a stream's parts, so that the parts put together are the whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cadenza.engine.text_face import TextFace
from cadenza.outputs import CompletionOutput, Logprob, RequestOutput
from cadenza.server.call import Call

LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""

Choice = dict[str, Any]
Entry = Mapping[int, Logprob]


class Choices(Protocol):
    """Makes choices; one object for one answer, told of each choice's parts in order."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def opening(self, index: int) -> Choice | None:
        """A stream's first part of a choice, before there is any token."""
        ...

    def part(self, index: int, output: CompletionOutput, request: RequestOutput) -> Choice | None:
        """A stream's next part; None when there is nothing to show."""
        ...

    def whole(self, index: int, output: CompletionOutput, request: RequestOutput) -> Choice: ...

    def about_prompt(self, request: RequestOutput | None) -> dict[str, Any] | None:
        """What an answer or a frame holds beside its choices; None where it is not all there yet.

        Without a request it is what frames hold that tell nothing of the prompt.
        """
        ...


class CompletionChoices:
    """Of /v1/completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, call: Call, text: TextFace) -> None:
        self._call = call
        self._text = text
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> Choice | None:
        del index  # a completion begins with its first text
        return None

    def part(self, index: int, output: CompletionOutput, request: RequestOutput) -> Choice | None:
        is_first = index not in self._offsets
        if not is_first and not _has_something(output, self._call):
            return None
        self._offsets.setdefault(index, 0)
        ids, entries = list(output.token_ids), list[Entry | None](output.logprobs or ())
        shown = output.text
        if is_first and self._call.echo:
            prompt_ids = request.prompt_token_ids
            shown = self._prompt_text(request) + shown
            ids = [*prompt_ids, *ids]
            if self._call.logprobs is not None:
                entries = [*_prompt_entries(request), *entries]
        choice: Choice = {"index": index, "text": shown, "logprobs": None}
        if self._call.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, ids, entries)
        choice["finish_reason"] = output.finish_reason
        choice["stop_reason"] = output.stop_reason
        if self._call.return_token_ids:
            choice["token_ids"] = output.token_ids
            choice["prompt_token_ids"] = request.prompt_token_ids if is_first else None
        if self._call.has_prompt_logprobs:
            choice["prompt_logprobs"] = _shown_prompt(request) if is_first else None
        return choice

    def whole(self, index: int, output: CompletionOutput, request: RequestOutput) -> Choice:
        choice = self.part(index, output, request)
        assert choice is not None, "a choice's first part is always shown"
        return {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None} | choice

    def about_prompt(self, request: RequestOutput | None) -> dict[str, Any] | None:
        del request  # it is in the choices: each prompt has its own
        return {}

    def _prompt_text(self, request: RequestOutput) -> str:
        if request.prompt is not None:
            return request.prompt
        return self._text.decode(request.prompt_token_ids)

    def _logprobs(
        self, index: int, ids: Sequence[int], entries: Sequence[Entry | None]
    ) -> dict[str, Any]:
        offsets, tokens = [self._offsets[index]], list[str]()
        for token_id, entry in zip(ids, entries, strict=True):
            text = self._text_of(token_id, entry)
            offsets.append(offsets[-1] + len(text))
            tokens.append(_named(token_id) if self._call.return_tokens_as_token_ids else text)
        self._offsets[index] = offsets.pop()
        return {
            "text_offset": offsets,
            "token_logprobs": [
                None if entry is None else _finite(entry[token_id])
                for token_id, entry in zip(ids, entries, strict=True)
            ],
            "tokens": tokens,
            "top_logprobs": [
                None if entry is None else _by_token(entry, self._call) for entry in entries
            ],
        }

    def _text_of(self, token_id: int, entry: Entry | None) -> str:
        if entry is None:
            return self._text.text_of(token_id) or ""
        return _shown(token_id, entry[token_id])


class ChatChoices:
    """Of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, call: Call) -> None:
        self._call = call
        self._begun: set[int] = set()

    def opening(self, index: int) -> Choice | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, output: CompletionOutput, request: RequestOutput) -> Choice | None:
        del request  # `about_prompt` tells of it
        is_first = index not in self._begun
        if not is_first and not _has_something(output, self._call):
            return None
        self._begun.add(index)
        choice: Choice = {
            "index": index,
            "delta": {"content": output.text} if output.text else {},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return choice | ({"token_ids": output.token_ids} if self._call.return_token_ids else {})

    def whole(self, index: int, output: CompletionOutput, request: RequestOutput) -> Choice:
        del request  # as in `part`
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if self._call.return_token_ids else None,
        }

    def about_prompt(self, request: RequestOutput | None) -> dict[str, Any] | None:
        found: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": None}
        if request is None:
            return found
        if self._call.has_prompt_logprobs:
            if len(request.prompt_logprobs or ()) < len(request.prompt_token_ids):
                return None
            found["prompt_logprobs"] = _shown_prompt(request)
        if self._call.return_token_ids:
            found["prompt_token_ids"] = request.prompt_token_ids
        return found

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if self._call.logprobs is None:
            return None
        entries = zip(output.token_ids, output.logprobs or (), strict=True)
        content = [_chat_logprob(token_id, entry, self._call) for token_id, entry in entries]
        return {"content": content, "refusal": None}


def make_choices(call: Call, text: TextFace) -> Choices:
    return CompletionChoices(call, text) if call.endpoint == "completions" else ChatChoices(call)


def _has_something(output: CompletionOutput, call: Call) -> bool:
    if output.text or output.finish_reason is not None:
        return True
    return bool(output.token_ids) and (call.logprobs is not None or call.return_token_ids)


def _shown_prompt(request: RequestOutput) -> list[dict[str, Any] | None]:
    return [None if entry is None else _by_id(entry) for entry in _prompt_entries(request)]


def _prompt_entries(request: RequestOutput) -> list[Entry | None]:
    """One for each of the prompt's tokens; the first has none."""
    found: Sequence[Entry | None] = request.prompt_logprobs or ()
    missing = len(request.prompt_token_ids) - len(found)
    return [*[None] * missing, *found]


def _chat_logprob(token_id: int, entry: Entry, call: Call) -> dict[str, Any]:
    top = sorted(
        (found for found in entry.items() if found[1].rank is not None),
        key=lambda f: f[1].rank or 0,
    )
    return {
        **_described(token_id, entry[token_id], call),
        "top_logprobs": [_described(*found, call) for found in top[: call.logprobs or 0]],
    }


def _described(token_id: int, found: Logprob, call: Call) -> dict[str, Any]:
    text = _shown(token_id, found)
    # A token that is part of a character has no text of its own, and so no bytes of it.
    raw = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    token = _named(token_id) if call.return_tokens_as_token_ids else text
    return {"token": token, "logprob": _finite(found), "bytes": raw}


def _by_token(entry: Entry, call: Call) -> dict[str, float]:
    if call.return_tokens_as_token_ids:
        return {_named(token_id): _finite(found) for token_id, found in entry.items()}
    by_text: dict[str, float] = {}
    for token_id, found in entry.items():  # the chosen one comes first, and keeps its text
        by_text.setdefault(_shown(token_id, found), _finite(found))
    return by_text


def _by_id(entry: Entry) -> dict[str, Any]:
    return {
        str(token_id): {
            "logprob": _finite(found),
            "rank": found.rank,
            "decoded_token": found.decoded_token,
        }
        for token_id, found in entry.items()
    }


def _shown(token_id: int, found: Logprob) -> str:
    return _named(token_id) if found.decoded_token is None else found.decoded_token


def _named(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(found: Logprob) -> float:
    return max(found.logprob, LEAST_LOGPROB)
