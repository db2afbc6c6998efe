"""/v1/completions: continues prompts. Invariant: each prompt has its own choices, and its fields
are in the first part of each."""

from collections.abc import Mapping, Sequence
from typing import Any

from cadenza.frontend.prepared_request import AnyPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.server.calls.endpoint import (
    AnswerHead,
    GeneratingEndpoint,
    LogprobEntry,
    PromptInfo,
    StreamEncoder,
    finite,
    shown_token,
    token_name,
)
from cadenza.server.fields.body import optional, required, unsupported
from cadenza.server.fields.sampling import LOGPROBS, plain_prompts
from cadenza.server.fields.types import Boolean
from cadenza.server.openai.choices import (
    PROMPT_SCHEMA,
    ChoiceObject,
    ChoicesRequest,
    ChunkEncoder,
    choices_answer,
    prompt_entries,
    shown_prompt,
)
from cadenza.server.openapi import TEXT


class CompletionRequest(ChoicesRequest):
    """A body of /v1/completions."""

    prompt_field = "prompt"
    default_max_tokens = 16

    prompt = required(plain_prompts, "A text, token ids, or a list of either.")
    logprobs = optional(LOGPROBS, "Log probabilities of each token and the likeliest.")
    echo = optional(Boolean(), "Begin the answer with the prompt.", default=False)
    add_special_tokens = optional(
        Boolean(), "Put around a text what the tokenizer puts around texts.", default=True
    )
    prompt_embeds = unsupported("a prompt of embeddings")
    suffix = unsupported("filling in a middle", "")
    thinking_token_budget = unsupported("a bound on reasoning in plain completions", -1)
    best_of = unsupported("choosing among several answers", 1)

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def own_sampling(self) -> Mapping[str, Any]:
        if not self.echo or self.logprobs is None:
            return {}
        return {"prompt_logprobs": max(self.logprobs, self.prompt_logprobs or 0)}

    def prompts(self, text: TextFrontend) -> Sequence[AnyPrompt]:
        del text  # they are as they are
        return self.prompt

    def encoder(self, head: AnswerHead) -> StreamEncoder:
        return CompletionEncoder(head, self)


class CompletionEncoder(ChunkEncoder):
    """Choices of a completion; there is no chunk before the first text."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, head: AnswerHead, request: CompletionRequest) -> None:
        super().__init__(head, request)
        self._request = request
        self._shows_prompt_logprobs = request.prompt_logprobs is not None
        self._text = head.text
        self._offsets: dict[int, int] = {}

    def part(
        self, index: int, output: CompletionOutput, request: PromptInfo
    ) -> ChoiceObject | None:
        is_first = index not in self._begun
        if not self.shows(index, output.text, output):
            return None
        is_echoed = is_first and self._request.echo
        choice: ChoiceObject = {
            "index": index,
            "text": self._prompt_text(request) + output.text if is_echoed else output.text,
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._num_top_logprobs is not None:
            ids, entries = output.token_ids, [*(output.logprobs or ())]
            if is_echoed:
                ids = request.prompt_token_ids + ids
                entries = [*prompt_entries(request), *entries]
            choice["logprobs"] = self._logprobs(index, ids, entries)
        if self._shows_ids:
            choice["token_ids"] = output.token_ids
            choice["prompt_token_ids"] = request.prompt_token_ids if is_first else None
        if self._shows_prompt_logprobs:
            choice["prompt_logprobs"] = shown_prompt(request) if is_first else None
        return choice

    def whole_choice(
        self, index: int, output: CompletionOutput, request: RequestOutput
    ) -> ChoiceObject:
        choice = self.part(index, output, request)
        assert choice is not None, "a choice's first part is always shown"
        return {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None} | choice

    def _prompt_text(self, request: PromptInfo) -> str:
        if request.prompt is not None:
            return request.prompt
        return self._text.decode(request.prompt_token_ids)

    def _logprobs(
        self, index: int, ids: Sequence[int], entries: Sequence[LogprobEntry | None]
    ) -> dict[str, Any]:
        offsets, tokens = [self._offsets.get(index, 0)], list[str]()
        for token_id, entry in zip(ids, entries, strict=True):
            text = self._text_of(token_id, entry)
            offsets.append(offsets[-1] + len(text))
            tokens.append(
                token_name(token_id) if self._request.return_tokens_as_token_ids else text
            )
        self._offsets[index] = offsets.pop()
        return {
            "text_offset": offsets,
            "token_logprobs": [
                None if entry is None else finite(entry[token_id])
                for token_id, entry in zip(ids, entries, strict=True)
            ],
            "tokens": tokens,
            "top_logprobs": [
                None if entry is None else _by_token(entry, self._request) for entry in entries
            ],
        }

    def _text_of(self, token_id: int, entry: LogprobEntry | None) -> str:
        if entry is None:
            return self._text.text_of(token_id) or ""
        return shown_token(token_id, entry[token_id])


def _by_token(entry: LogprobEntry, request: CompletionRequest) -> dict[str, float]:
    if request.return_tokens_as_token_ids:
        return {token_name(token_id): finite(found) for token_id, found in entry.items()}
    by_text: dict[str, float] = {}
    for token_id, found in entry.items():
        # The chosen token comes first: of equal texts its entry stays.
        by_text.setdefault(shown_token(token_id, found), finite(found))
    return by_text


COMPLETIONS = GeneratingEndpoint(
    "completions",
    "/v1/completions",
    "Continue prompts.",
    CompletionRequest,
    choices_answer("Completion", "text_completion", {"text": TEXT, **PROMPT_SCHEMA}, {}),
)
