"""`Receipt`: what another machine needs to compute an answer again, and to tell that it is equal,
as JSON. Holds token ids and no text. `logprobs` are exact, since a float32 survives JSON."""

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from cadenza.events import FinishReason
from cadenza.fingerprint import Fingerprint
from cadenza.request import SamplingParams
from cadenza.sparse_prefill import SparsePrefill

RECEIPT_VERSION = 1


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sample of a request, as a request of its own.

    Args:
        system_fingerprint: the digest of `fingerprint`.
        params: all of them, with the seed that was used.
        logprobs: of the tokens, natural logarithms.
        logprob_digest: of their bits.
        kept: the chunks of a thinned prompt that were computed (`sparse_prefill.KeptTokens.mask`).
        seal: by which the server that made it knows it again.
    """

    receipt: int = RECEIPT_VERSION
    system_fingerprint: str
    fingerprint: Fingerprint
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    logprob_digest: str
    kept: bytes | msgspec.UnsetType = msgspec.UNSET
    seal: str | msgspec.UnsetType = msgspec.UNSET


def sparse_prefill_of(receipt: Receipt) -> SparsePrefill | None:
    """With which an answer is computed again; None of a whole prompt."""
    kept = receipt.kept
    return SparsePrefill(keep=1.0, kept=kept) if isinstance(kept, bytes) else None


def digest_of_logprobs(logprobs: Sequence[float]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(logprobs)}f", *logprobs)).hexdigest()
