"""`RemoteServer`: a client of one Cadenza server, which sends the verifier's requests. Invariant: a
request is sent with every option that it has; `SENT_OPTIONS` names those that can be sent.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from cadenza.errors import ConfigError
from cadenza.request import PARAMETERS, Request
from cadenza.server_link import ServerLink
from cadenza.verification.play import Stream, TokenRecord

TIMEOUT_S = 600.0
RETRY_S = 0.1
MAX_RETRIES = 1000
MAX_MESSAGE_CHARS = 300

# The parameters that a body holds as they are.
PLAIN_FIELDS = tuple(name for name in PARAMETERS if name not in ("logit_bias", "structured"))

SENT_OPTIONS = frozenset(PARAMETERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The response to one request, and when it started and ended. In the records of its streams a
    prompt's token has its position, and no token has a rank."""

    streams: tuple[Stream, ...]
    num_cached_tokens: int
    start_s: float
    end_s: float

    @property
    def num_tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self.streams)


class RefusedError(ConfigError):
    """The server refused a request as not valid (status 400)."""


class BusyError(ConfigError):
    """The server's queue is full (status 429)."""


_KINDS: Mapping[int, type[ConfigError]] = {400: RefusedError, 429: BusyError}


class RemoteApi:
    """A server's answers in JSON, on any thread; to be closed."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self._client = link.client(timeout=TIMEOUT_S)

    @property
    def url(self) -> str:
        return self._link.base_url

    def close(self) -> None:
        self._client.close()

    def fetch(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Raises ConfigError, of which RefusedError and BusyError are."""
        method = "GET" if body is None else "POST"
        try:
            answer = self._client.request(method, path, json=body)
            answer.raise_for_status()
            return answer.json()
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            kind = _KINDS.get(code, ConfigError)
            said = f"{_message_of(error.response)}{self._link.way}"
            raise kind(f"--url {self.url}: {path} returned status {code}{said}") from None
        except httpx.HTTPError as error:
            raise ConfigError(f"--url {self._link.explain(error)}") from error
        except ValueError:
            raise ConfigError(f"--url {self.url}: {path} returned no JSON") from None


class RemoteServer:
    """Thread-safe. Raises ConfigError unless it responds like a Cadenza server."""

    def __init__(self, api: RemoteApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        (card, *_) = self._api.fetch("/v1/models")["data"]
        self.model: str = card["id"]
        self.context: int = card.get("max_model_len") or 0
        self.vocab_size: int = card.get("vocab_size") or 0
        if not self.context or not self.vocab_size:
            raise ConfigError(
                f"--url {api.url}: /v1/models has no max_model_len or vocab_size; use the URL of a "
                f"Cadenza server"
            )

    def play(self, request: Request, salt: str = "") -> Answer:
        """Again while the queue is full; bad words are those of `params.bad_words`. Raises
        RefusedError, ConfigError if there is no answer."""
        body = {**body_of(request), "model": self.model}
        if salt:
            body["cache_salt"] = salt
        for _ in range(MAX_RETRIES):
            try:
                return self._play(body)
            except BusyError:
                time.sleep(RETRY_S)
        return self._play(body)

    def _play(self, body: dict[str, Any]) -> Answer:
        start_s = self._clock()
        answer = self._api.fetch("/v1/completions", body)
        details: dict[str, int] = answer["usage"].get("prompt_tokens_details") or {}
        choices: list[dict[str, Any]] = sorted(answer["choices"], key=lambda each: each["index"])
        return Answer(
            streams=tuple(map(_stream, choices)),
            num_cached_tokens=details.get("cached_tokens", 0),
            start_s=start_s,
            end_s=self._clock(),
        )

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self._api.fetch("/detokenize", {"tokens": list(token_ids)})["prompt"]

    def tokens_of(self, text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return self._api.fetch("/tokenize", body)["tokens"]


def body_of(request: Request) -> dict[str, Any]:
    params = request.params
    body: dict[str, Any] = {name: getattr(params, name) for name in PLAIN_FIELDS}
    if params.structured is not None:
        form = params.structured
        style = {} if form.whitespace is None else {"whitespace": form.whitespace}
        body["structured_outputs"] = {form.kind: getattr(form, form.kind), **style}
    return body | {
        "prompt": list(request.prompt_token_ids),
        "logit_bias": {str(token_id): bias for token_id, bias in params.biases},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def _stream(choice: dict[str, Any]) -> Stream:
    token_ids: list[int] = choice["token_ids"]
    found: dict[str, Any] = choice["logprobs"] or {}
    logprobs: list[float] = found.get("token_logprobs") or [math.nan] * len(token_ids)
    tops: list[dict[str, float]] = found.get("top_logprobs") or [{} for _ in token_ids]
    reasons = (choice["finish_reason"], choice.get("stop_reason"))
    prompt: list[dict[str, dict[str, Any]]] = choice.get("prompt_logprobs") or []
    return Stream(
        tokens=[*map(_record, token_ids, logprobs, tops)],
        finish=" ".join(str(reason) for reason in reasons if reason is not None),
        prompt=[
            _record(at, math.nan, {name: each["logprob"] for name, each in entry.items()})
            for at, entry in enumerate(prompt)
            if at  # the first token has no log probabilities
        ],
    )


def _record(token: int, logprob: float, tops: Mapping[str, float]) -> TokenRecord:
    """`tops` by names such as "token_id:5" or "5"."""
    ids = tuple(int(name.rpartition(":")[2]) for name in tops)
    return (token, logprob, 0, ids, tuple(tops.values()))


def _message_of(answer: httpx.Response) -> str:
    try:
        return f": {str(answer.json()['error']['message'])[:MAX_MESSAGE_CHARS]}"
    except (ValueError, KeyError, TypeError):
        return ""
