"""`Fingerprint`: what an answer's tokens depend on besides its request; `Receipt`: what another
machine needs to compute an answer again, as JSON, without text. Invariant: answers to equal
requests whose fingerprints are equal have equal tokens and log probabilities, on any machine and in
any batch. `loading.identity` finds the parts."""

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from cadenza.events import FinishReason
from cadenza.request import SamplingParams
from cadenza.sparse_prefill import SparsePrefill

# Of the named classes of arithmetic. To be raised when any bit of a step changes: `python -m
# tools.golden_bits --record` then records the corpus anew, and refuses to without it.
ARITHMETIC_REVISION = 4

# Of the method of sparse prefill; to be raised when other chunks would be kept, or its settings be
# written in another way.
SPARSE_REVISION = 2

PREFIX = "cdz-"
_OF_PRUNED = ("sparse_prefill",)
_DIGEST_CHARS = 24


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Digests and names, of an engine with the text of its model."""

    checkpoint: str  # digest of the model's settings and weights
    # Class and revision of a step's arithmetic; a digest of this machine's versions and
    # instructions where nothing is promised beyond them.
    arithmetic: str
    activations: str  # activations, weights, kv: the types of each; that of most weights
    weights: str
    kv: str
    # Longest sequence; a request without a length may reach it, and LongRoPE's factors follow
    # it.
    max_model_len: int
    tokenizer: str  # digest of the tokenizer; empty without one
    template: str  # digest of the chat templates; empty without one
    defaults: str  # digest of the recommended sampling, as far as it is followed
    # What decides the grammar of a constrained answer besides its request: the revision of the
    # forms, the grammar library's version, and a digest of the parsers and the soft limits;
    # empty where the text is made elsewhere.
    forms: str = ""
    # Of answers to pruned prompts: how these were pruned; empty for all others, in whose
    # digest it is not.
    sparse_prefill: str = ""
    # Digest of the draft model that scores prompts, with its arithmetic; empty without one. Not
    # in the digest of answers to whole prompts.
    scorer: str = ""
    engine_seed: int = 0  # determines the seeds of requests without one. Not in the digest.

    @property
    def parts(self) -> dict[str, str | int]:
        found = msgspec.structs.asdict(self)
        for name in ("engine_seed", "scorer", *(() if self.sparse_prefill else _OF_PRUNED)):
            del found[name]
        return found

    def pruned(self, settings: str) -> "Fingerprint":
        """Of answers to prompts that were pruned by these settings."""
        how = f"{SPARSE_REVISION}-{settings}-{self.scorer or 'none'}"
        return msgspec.structs.replace(self, sparse_prefill=how)

    @property
    def digest(self) -> str:
        text = "\0".join(f"{name}={value}" for name, value in self.parts.items())
        return PREFIX + hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]


RECEIPT_VERSION = 1


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sample of a request, as a request of its own."""

    receipt: int = RECEIPT_VERSION
    system_fingerprint: str  # the digest of `fingerprint`
    fingerprint: Fingerprint
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # all of them, with the seed that was used
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...]  # of the tokens, natural logarithms
    logprob_digest: str  # of their bits
    # The chunks of a pruned prompt that were computed (`sparse_prefill.KeptTokens.mask`).
    kept: bytes | msgspec.UnsetType = msgspec.UNSET
    seal: str | msgspec.UnsetType = msgspec.UNSET  # by which the server that made it knows it again


def sparse_prefill_of(receipt: Receipt) -> SparsePrefill | None:
    """With which an answer is computed again; None of a whole prompt."""
    kept = receipt.kept
    return SparsePrefill(keep=1.0, kept=kept) if isinstance(kept, bytes) else None


def digest_of_logprobs(logprobs: Sequence[float]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(logprobs)}f", *logprobs)).hexdigest()
