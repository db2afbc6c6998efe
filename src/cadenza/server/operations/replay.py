"""/v1/receipts/replay: computes an answer of this server again, and compares it bit for bit.
Invariants: only the same tenant's receipts from this server, one at a time, without the prefix
cache; `equal` only if every token, every log probability's bits and the finish reason are."""

import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import msgspec

from cadenza.engine.batch_engine import ServedEngine
from cadenza.errors import InvalidRequestError
from cadenza.fingerprint import RECEIPT_VERSION, Fingerprint, Receipt, sparse_prefill_of
from cadenza.frontend.prepared_request import AnyPrompt, PreparedRequest, Terms
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import RequestOutput
from cadenza.request import Request, SamplingParams
from cadenza.server.calls.endpoint import AnswerHead, CallContext, CallRequest, GeneratingEndpoint
from cadenza.server.errors import cancelled, invalid_value
from cadenza.server.fields.body import required
from cadenza.server.fields.types import AnyJson, or_null
from cadenza.server.limits import ServerLimits
from cadenza.server.openapi import COUNT, TEXT, AnswerSchema, list_of, object_of

MAX_TOKENS = 512
MAX_RECEIPT_CHARS = 4 << 20
HELD_BACK = 64  # further tokens that a replay may compute: a stop string's own are in no receipt
ELSEWHERE = "`cadenza replay` computes it again in a process of its own, on any machine"

_encode = msgspec.json.encode


class ReplayRequest(CallRequest):
    """A body of /v1/receipts/replay."""

    prompt_field = "receipt"

    receipt = required(
        AnyJson(MAX_RECEIPT_CHARS),
        f"A choice's receipt, of at most {MAX_TOKENS} tokens, as this server gave it.",
    )

    _context: CallContext
    _num_others: Callable[[], int]

    @cached_property
    def given(self) -> Receipt:
        """Raises ApiError (400)."""
        try:
            found = msgspec.convert(self.receipt, Receipt)
        except (msgspec.ValidationError, InvalidRequestError) as error:
            raise invalid_value(f"receipt is none: {error}", "receipt") from error
        if found.receipt != RECEIPT_VERSION:
            raise invalid_value(
                f"receipt has the version {found.receipt}; this server reads {RECEIPT_VERSION}",
                "receipt",
            )
        return found

    def check_together(self, limits: ServerLimits) -> None:
        del limits  # its own are smaller
        num_tokens = len(self.given.token_ids)
        if num_tokens > MAX_TOKENS:
            raise invalid_value(
                f"receipt has {num_tokens} tokens; at most {MAX_TOKENS} are computed again here; "
                f"{ELSEWHERE}",
                "receipt",
            )

    def enter(self, context: CallContext) -> None:
        self._context = context
        vars(self)["cache_salt"] = secrets.token_hex(16)  # nobody has computed anything under it

    @cached_property
    def _own(self) -> Receipt:
        """If it is the caller's and of the running engine. Raises InvalidRequestError."""
        check_fingerprint(self.given.fingerprint, self._context.model.fingerprint())
        own = self._context.seal.opened(self.given, self._context.tenant)
        if own is None:
            raise InvalidRequestError(
                f"the receipt is not one that this server gave you since it was started, or what "
                f"its answer follows from was changed; {ELSEWHERE}",
                param="receipt",
            )
        return own

    def sampling(self, text: TextFrontend) -> SamplingParams:
        del text  # a receipt has all parameters
        params, most = self._own.params, MAX_TOKENS + HELD_BACK
        # What a whole prompt's answer followed from is that, whatever the server's settings are.
        whole = replace(params, spec_prefill=False)
        return replace(whole, max_tokens=min(most, params.max_tokens or most))

    def prepare(self, text: TextFrontend, terms: Terms) -> list[PreparedRequest]:
        request = Request(
            prompt_token_ids=self._own.prompt_token_ids,
            params=self.sampling(text),
            sparse_prefill=sparse_prefill_of(self._own),
            cache_salt=terms.cache_salt,
            priority=terms.priority,
            tenant=terms.tenant,
        )
        prepared = [text.prepare_request(request, self.request_options(text), terms)]
        self._num_others = others_of(self._context.model.engine)
        return prepared

    def prompts(self, text: TextFrontend) -> list[AnyPrompt]:
        del text  # a receipt has token ids
        return [self._own.prompt_token_ids]

    def whole_answer(self, head: AnswerHead, outputs: Sequence[RequestOutput]) -> bytes:
        del head  # nothing of it is in the answer
        ((output,),) = (each.outputs for each in outputs)
        if output.receipt is None:
            raise cancelled()
        return _encode(compared(self.given, output.receipt, self._num_others()))


def check_fingerprint(theirs: Fingerprint, ours: Fingerprint | None) -> None:
    """Raises InvalidRequestError, which names the parts that do not fit."""
    here = {} if ours is None else ours.parts
    parts = [
        f"the {name} is {value or 'none'} in the receipt, {here.get(name) or 'none'} here"
        for name, value in theirs.parts.items()
        if value != here.get(name) and name != "sparse_prefill"  # what was kept is in the receipt
    ]
    if parts:
        raise InvalidRequestError(
            f"the receipt's fingerprint does not fit: {'; '.join(parts)}. {ELSEWHERE}",
            param="receipt",
        )


def others_of(engine: ServedEngine) -> Callable[[], int]:
    """Counts requests that the engine has besides one that is submitted next, until the call."""
    num_open = engine.load().num_open
    num_accepted = engine.request_stats().num_accepted
    return lambda: num_open + engine.request_stats().num_accepted - num_accepted - 1


def compared(given: Receipt, again: Receipt, num_others: int) -> dict[str, Any]:
    first = place_of_difference(given, again)
    return {
        "equal": first is None and given.logprob_digest == again.logprob_digest,
        "alone": num_others == 0,
        "beside": num_others,
        "tokens": again.token_ids,
        "logprobs": again.logprobs,
        "bits": [struct.pack(">f", each).hex() for each in again.logprobs],
        "digest": again.logprob_digest,
        "expected_digest": given.logprob_digest,
        "fingerprint": again.system_fingerprint,
        "first_difference": first,
    }


def place_of_difference(given: Receipt, again: Receipt) -> int | None:
    """The first index where a token or its log probability's bits differ, or where lengths or
    finish reasons do."""
    theirs, ours = _places(given), _places(again)
    for index, (old, new) in enumerate(zip(theirs, ours, strict=False)):
        if old != new:
            return index
    lengths = {len(given.token_ids), len(given.logprobs), len(again.token_ids)}
    is_same_end = len(lengths) == 1 and given.finish_reason == again.finish_reason
    return None if is_same_end else min(lengths)


def _places(receipt: Receipt) -> list[tuple[int, bytes]]:
    pairs = zip(receipt.token_ids, receipt.logprobs, strict=False)
    return [(token_id, struct.pack("<f", logprob)) for token_id, logprob in pairs]


_ANSWER = object_of(
    {
        "equal": {"type": "boolean"},
        "alone": {"type": "boolean"},
        "beside": COUNT,
        "tokens": list_of(COUNT),
        "logprobs": list_of({"type": "number"}),
        "bits": list_of(TEXT),
        "digest": TEXT,
        "expected_digest": TEXT,
        "fingerprint": TEXT,
        "first_difference": or_null(COUNT),
    }
)

REPLAY = GeneratingEndpoint(
    "replay",
    "/v1/receipts/replay",
    "Compute an own answer again and compare it bit for bit.",
    ReplayRequest,
    AnswerSchema(name="Replayed", schema=_ANSWER),
    can_stream=False,
)

BUSY = "another receipt is being replayed, and one at a time is; try again soon"
