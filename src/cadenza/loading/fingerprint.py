"""`make_fingerprint`: what the answers of a planned engine depend on besides their requests.

Knows no backend in particular. Invariant: see `Fingerprint`.
"""

import hashlib
from pathlib import Path

from cadenza.backends import BACKENDS, Backends, find_backend
from cadenza.checkpoint import Checkpoint
from cadenza.config import EngineConfig
from cadenza.fingerprint import ARITHMETIC_REVISION, Fingerprint
from cadenza.loading.build import cache_folder, make_setup
from cadenza.loading.content_digest import content_digest
from cadenza.loading.plan import EnginePlan

_DIGEST_CHARS = 16


def make_fingerprint(
    checkpoint: Checkpoint,
    plan: EnginePlan,
    config: EngineConfig,
    backends: Backends = BACKENDS,
) -> Fingerprint:
    """The fingerprint of the engine that `build_core` makes of the same arguments.

    Reads all weights once, unless their digest is in the cache folder.
    """
    return Fingerprint(
        checkpoint=content_digest(checkpoint, cache_folder())[: 2 * _DIGEST_CHARS],
        arithmetic=name_arithmetic(checkpoint, plan, config, backends),
        activations=plan.dtype,
        weights=plan.weights_name,
        kv=plan.kv_name,
        max_model_len=plan.limits.max_model_len,
        tokenizer=_tokenizer_digest(checkpoint),
        template=_digest(*_flat(checkpoint.tokenizer.chat_templates)),
        defaults=_defaults_digest(checkpoint, config),
        engine_seed=config.seed,
    )


def name_arithmetic(
    checkpoint: Checkpoint,
    plan: EnginePlan,
    config: EngineConfig,
    backends: Backends = BACKENDS,
) -> str:
    """The class with its revision, or a digest of what decides the bits on this machine."""
    backend = find_backend(config.backend, backends)
    name = backend.name_arithmetic(checkpoint, make_setup(plan, config))
    if name is not None:
        return f"{name}-{ARITHMETIC_REVISION}"
    described = backend.describe_arithmetic(config.device, config.ops, checkpoint)
    return f"{plan.traits.name}-{_digest(*described, repr(plan.limits))}"


def find_setting(theirs: str, ours: str, backend: str, backends: Backends = BACKENDS) -> str | None:
    """What to set in the environment so that this machine computes in the arithmetic `theirs` of a
    fingerprint in place of `ours`; None if nothing does, or it does so already."""
    (name, _, revision), (_, _, our_revision) = theirs.rpartition("-"), ours.rpartition("-")
    if theirs == ours or revision != our_revision:
        return None
    return find_backend(backend, backends).find_setting(name)


def _tokenizer_digest(checkpoint: Checkpoint) -> str:
    source = checkpoint.tokenizer_source
    if source is None:
        return ""
    content = source.read_bytes() if isinstance(source, Path) else source.content
    special = _flat(checkpoint.tokenizer.special_tokens)
    return _digest(hashlib.sha256(content).hexdigest(), *special)


def _defaults_digest(checkpoint: Checkpoint, config: EngineConfig) -> str:
    is_followed = config.generation_config == "auto"
    recommended = repr(checkpoint.generation_defaults) if is_followed else ""
    return _digest(recommended, repr(sorted(checkpoint.eos_token_ids)))


def _flat(texts: dict[str, str]) -> list[str]:
    return [part for entry in sorted(texts.items()) for part in entry]


def _digest(*parts: str) -> str:
    """Of texts in order; empty for none."""
    if not parts:
        return ""
    framed = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(framed.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_CHARS]
