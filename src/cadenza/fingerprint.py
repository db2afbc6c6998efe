"""`Fingerprint`: what an answer's tokens depend on besides its request, in named parts. Invariant:
answers to equal requests whose fingerprints are equal have equal tokens and log probabilities, on
any machine and in any batch. `loading.identity` finds the parts."""

import hashlib

import msgspec

ARITHMETIC_REVISION = 4
"""Of the named classes of arithmetic. To be raised when any bit of a step changes:
`python -m tools.golden_bits --record` then records the corpus anew, and refuses to without it."""

SPARSE_REVISION = 2
"""Of the method of sparse prefill; to be raised when other chunks would be kept, or its settings be
written in another way."""

PREFIX = "cdz-"
_OF_THINNED = ("sparse_prefill",)
_DIGEST_CHARS = 24


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Digests and names, of an engine with the text of its model.

    Args:
        checkpoint: digest of the model's settings and weights.
        arithmetic: class and revision of a step's arithmetic; a digest of this machine's versions
            and instructions where nothing is promised beyond them.
        activations, weights, kv: the types of each; that of most weights.
        max_model_len: longest sequence; a request without a length may reach it, and LongRoPE's
            factors follow it.
        tokenizer: digest of the tokenizer; empty without one.
        template: digest of the chat templates; empty without one.
        defaults: digest of the recommended sampling, as far as it is followed.
        forms: what decides the grammar of a constrained answer besides its request: the revision
            of the forms, the grammar library's version, and a digest of the parsers and the soft
            limits; empty where the text is made elsewhere.
        sparse_prefill: of answers to thinned prompts: how these were thinned out; empty for all
            others, in whose digest it is not.
        scorer: digest of the draft model that scores prompts, with its arithmetic; empty without
            one. Not in the digest of answers to whole prompts.
        engine_seed: determines the seeds of requests without one. Not in the digest.
    """

    checkpoint: str
    arithmetic: str
    activations: str
    weights: str
    kv: str
    max_model_len: int
    tokenizer: str
    template: str
    defaults: str
    forms: str = ""
    sparse_prefill: str = ""
    scorer: str = ""
    engine_seed: int = 0

    @property
    def parts(self) -> dict[str, str | int]:
        found = msgspec.structs.asdict(self)
        for name in ("engine_seed", "scorer", *(() if self.sparse_prefill else _OF_THINNED)):
            del found[name]
        return found

    def thinned(self, settings: str) -> "Fingerprint":
        """That of answers to prompts that were thinned out by these settings."""
        how = f"{SPARSE_REVISION}-{settings}-{self.scorer or 'none'}"
        return msgspec.structs.replace(self, sparse_prefill=how)

    @property
    def digest(self) -> str:
        text = "\0".join(f"{name}={value}" for name, value in self.parts.items())
        return PREFIX + hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]
