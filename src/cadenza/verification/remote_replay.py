"""Replays receipts at the server that gave them (`POST /v1/receipts/replay`). Invariant: a receipt
is equal only if the server says so.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from cadenza.verification.remote_server import BusyError, RefusedError, RemoteApi
from cadenza.verification.replay import NamedReceipt, Replayed, receipt_difference

PATH = "/v1/receipts/replay"
RETRY_S, MAX_RETRIES = 0.2, 300
"""While the server replays another one's receipt."""


def replay_at(
    api: RemoteApi, receipts: Iterable[NamedReceipt], model: str | None = None
) -> Iterator[Replayed]:
    """The verdicts, in the receipts' order; `model`: one of several of the server's. Raises
    ConfigError if there is no answer."""
    for each in receipts:
        num_tokens = len(each.receipt.token_ids)
        differences = tuple(_differences(api, each, model))
        yield Replayed(source=each.source, num_tokens=num_tokens, differences=differences)


def _differences(api: RemoteApi, each: NamedReceipt, model: str | None) -> Iterator[str]:
    body: dict[str, Any] = {"receipt": msgspec.to_builtins(each.receipt)}
    if model is not None:
        body["model"] = model
    try:
        answer = _answer(api, body)
    except RefusedError as error:
        yield str(error)
        return
    if answer["equal"]:
        return
    again = msgspec.structs.replace(
        each.receipt, token_ids=tuple(answer["tokens"]), logprobs=tuple(answer["logprobs"])
    )
    found = [*receipt_difference(each.receipt, again)]
    yield from found or ["the finish reason or the digest of the log probabilities differs"]


def _answer(api: RemoteApi, body: dict[str, Any]) -> Any:
    for _ in range(MAX_RETRIES):
        try:
            return api.fetch(PATH, body)
        except BusyError:
            time.sleep(RETRY_S)
    return api.fetch(PATH, body)
