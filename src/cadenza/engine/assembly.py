"""`OutputAssembler`: one request's events become its `RequestOutput`, token by token.

Knows no engine and no scheduler. Invariant: the text only ever grows, and at the end it is what
decoding all tokens at once would give.
"""

from cadenza.engine.text_face import TextFace
from cadenza.outputs import CompletionOutput, Logprob, RequestOutput
from cadenza.request import Event, Finished, Token, TokenLogprobs


class OutputAssembler:
    """Collects the events of `request_id`."""

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        text_face: TextFace,
    ) -> None:
        self.request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._face = text_face
        self._detokenizer = text_face.detokenizer()
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0
        self._finished: Finished | None = None

    @property
    def is_finished(self) -> bool:
        return self._finished is not None

    def push(self, event: Event) -> None:
        """Takes the next event of the request."""
        if isinstance(event, Finished):
            self._finished = event
            if self._detokenizer is not None:
                self._text.append(self._detokenizer.flush())
            return
        self._push_token(event)

    def abort(self) -> None:
        """The caller gave up: the output ends where it is."""
        self.push(
            Finished(
                request_id=self.request_id,
                finish_reason="abort",
                stop_token_id=None,
                num_prompt_tokens=len(self._prompt_token_ids),
                num_generated_tokens=len(self._token_ids),
                num_cached_tokens=0,
            )
        )

    def output(self) -> RequestOutput:
        """The request so far."""
        end = self._finished
        completion = CompletionOutput(
            index=0,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs) if self._logprobs else None,
            cumulative_logprob=self._cumulative if self._logprobs else None,
            finish_reason=None if end is None else end.finish_reason,
            stop_reason=None if end is None else end.stop_token_id,
            error=None if end is None else end.error,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=None,
            num_cached_tokens=0 if end is None else end.num_cached_tokens,
            outputs=(completion,),
        )

    def _push_token(self, token: Token) -> None:
        self._token_ids.append(token.token_id)
        if self._detokenizer is not None:
            self._text.append(self._detokenizer.push(token.token_id))
        if token.logprobs is not None:
            self._logprobs.append(self._describe(token.token_id, token.logprobs))
            self._cumulative += token.logprobs.logprob

    def _describe(self, token_id: int, found: TokenLogprobs) -> dict[int, Logprob]:
        described = {token_id: self._logprob(token_id, found.logprob, found.rank)}
        for rank, (top_id, logprob) in enumerate(
            zip(found.top_ids, found.top_logprobs, strict=True), start=1
        ):
            described.setdefault(top_id, self._logprob(top_id, logprob, rank))
        return described

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob=logprob, rank=rank, decoded_token=self._face.text_of(token_id))
