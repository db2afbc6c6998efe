"""Receipts of finished samples, and `ReceiptSeal`, which marks one as this server's. Invariants: a
receipt does not change a request's tokens; a seal is opened only for the tenant that it was made
for."""

import hmac
import re
import secrets
from dataclasses import dataclass, replace
from hashlib import sha256

import msgspec
from msgspec import UNSET

from cadenza.engine.new_sequences import seed_of_sample
from cadenza.errors import InvalidRequestError
from cadenza.fingerprint import Fingerprint, Receipt, digest_of_logprobs
from cadenza.frontend.prepared_request import OWN_TERMS, PreparedRequest, Terms
from cadenza.outputs import CompletionOutput
from cadenza.request import Request


def with_receipt(prepared: PreparedRequest, terms: Terms = OWN_TERMS) -> PreparedRequest:
    """The request with log probabilities, which the receipts of its samples need."""
    request = prepared.request
    if request.constraint is not None and request.constraint.is_needed:
        raise InvalidRequestError(
            "a constrained answer (a structured output, a required or strict tool) has no receipt; "
            "leave receipt out",
            param="receipt",
        )
    if request.attachments or prepared.pending is not None:
        raise InvalidRequestError(
            "an answer to images has no receipt, which would have to hold their pixels; leave "
            "receipt out",
            param="receipt",
        )
    params = replace(request.params, logprobs=request.params.logprobs or 0)
    return replace(prepared, request=replace(request, params=params), seal=terms.seal)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequest:
    """`fingerprint`: of its answers; `kept`: the computed tokens of a pruned prompt."""

    request: Request
    request_id: int
    fingerprint: Fingerprint
    kept: bytes | None = None


def make_receipt(answered: AnsweredRequest, output: CompletionOutput) -> Receipt | None:
    """None if the sample was aborted, ended with an error, or has a call, which is constrained."""
    request, fingerprint = answered.request, answered.fingerprint
    if output.finish_reason not in ("stop", "length"):
        return None
    calls = None if request.constraint is None else request.constraint.calls
    if calls is not None and re.search(calls.begin, output.text) is not None:
        return None
    seed = seed_of_sample(
        request.params,
        output.index,
        request_id=answered.request_id,
        engine_seed=fingerprint.engine_seed,
    )
    params = replace(
        request.params,
        seed=seed,
        n=1,
        logprobs=0,
        prompt_logprobs=None,
        truncate_prompt_tokens=None,
        speculative=None,
        spec_prefill=None,
    )
    entries = zip(output.token_ids, output.logprobs or (), strict=True)
    logprobs = tuple(entry[token_id].logprob for token_id, entry in entries)
    return Receipt(
        system_fingerprint=fingerprint.digest,
        fingerprint=fingerprint,
        prompt_token_ids=request.prompt_token_ids,
        params=params,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        logprobs=logprobs,
        logprob_digest=digest_of_logprobs(logprobs),
        kept=UNSET if answered.kept is None else answered.kept,
    )


_SEED_HEX = 16


class ReceiptSeal:
    """With a secret of its own, which ends with the process."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or secrets.token_bytes(32)

    def sealed(self, receipt: Receipt, tenant: str) -> Receipt:
        """The receipt with its seal, which begins with the seed: JavaScript rounds large ones."""
        seal = f"{receipt.params.seed or 0:0{_SEED_HEX}x}{self._mac(receipt, tenant)}"
        return msgspec.structs.replace(receipt, seal=seal)

    def opened(self, receipt: Receipt, tenant: str) -> Receipt | None:
        """The receipt with its exact seed, if it is the tenant's own; otherwise None."""
        seal = receipt.seal if isinstance(receipt.seal, str) else ""
        try:
            seed = int(seal[:_SEED_HEX], 16)
        except ValueError:
            return None
        if float(seed) != float(receipt.params.seed or 0):
            return None
        exact = msgspec.structs.replace(receipt, params=replace(receipt.params, seed=seed))
        is_own = hmac.compare_digest(seal[_SEED_HEX:], self._mac(exact, tenant))
        return exact if is_own else None

    def _mac(self, receipt: Receipt, tenant: str) -> str:
        kept = receipt.kept if isinstance(receipt.kept, bytes) else None
        sealed = (tenant, receipt.fingerprint, receipt.prompt_token_ids, receipt.params, kept)
        return hmac.new(self._secret, msgspec.json.encode(sealed), sha256).hexdigest()
