"""What the answers of a planned engine depend on besides their requests: `make_fingerprint`, and
`identify` for its streams, which go on after a restart of the engine process only if it is equal.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from cadenza import __version__
from cadenza.backends import BACKENDS, Backends, find_backend
from cadenza.backends.base import RunnerSetup
from cadenza.checkpoint import Checkpoint
from cadenza.config import EngineConfig
from cadenza.engine.process.messages import EngineIdentity
from cadenza.fingerprint import ARITHMETIC_REVISION, Fingerprint
from cadenza.loading.content_digest import content_digest
from cadenza.loading.planned_engine import PlannedEngine, cache_folder

_DIGEST_CHARS = 16


def make_fingerprint(engine: PlannedEngine) -> Fingerprint:
    """The fingerprint of an engine.

    Reads all weights once, unless their digest is in the cache folder.
    """
    checkpoint, plan = engine.checkpoint, engine.plan
    return Fingerprint(
        checkpoint=content_digest(checkpoint, cache_folder())[: 2 * _DIGEST_CHARS],
        arithmetic=_name_arithmetic(engine, checkpoint, engine.setup()),
        activations=plan.dtype,
        weights=plan.weights_name,
        kv=plan.kv_name,
        max_model_len=plan.limits.max_model_len,
        tokenizer=_tokenizer_digest(checkpoint),
        template=_digest(*_flat(checkpoint.tokenizer.chat_templates)),
        defaults=_defaults_digest(checkpoint, engine.config),
        scorer=_scorer_digest(engine),
        engine_seed=engine.config.seed,
    )


def _scorer_digest(engine: PlannedEngine) -> str:
    """Of the model that scores prompts, with the types of its weights; empty without one."""
    scorer = engine.plan.scorer
    if scorer is None:
        return ""
    own = content_digest(scorer.checkpoint, cache_folder())
    arithmetic = _name_arithmetic(engine, scorer.checkpoint, engine.scorer_setup())
    return _digest(own, scorer.dtype, scorer.quantization, arithmetic)


def _name_arithmetic(engine: PlannedEngine, checkpoint: Checkpoint, setup: RunnerSetup) -> str:
    """The class of a model's arithmetic with its revision, or a digest of what decides its bits on
    this machine."""
    name = engine.backend.name_arithmetic(checkpoint, setup)
    if name is not None:
        return f"{name}-{ARITHMETIC_REVISION}"
    digest = _digest(*_described(engine, checkpoint), repr(setup.limits.of_steps))
    return f"{engine.plan.traits.name}-{digest}"


def identify(engine: PlannedEngine) -> EngineIdentity:
    """What the streams of an engine depend on, from one start of its process to the next."""
    checkpoint, plan, config = engine.checkpoint, engine.plan, engine.config
    arithmetic = (
        __version__,
        plan.dtype,
        config.quantization,
        config.kv_cache_dtype,
        config.arithmetic,
        repr(plan.limits.of_steps),
        repr(sorted(checkpoint.eos_token_ids)),
        str(config.seed),
        *_described(engine, checkpoint),
    )
    parts = ((checkpoint.digest, *checkpoint.file_stamps), arithmetic)
    digests = [hashlib.sha256("\0".join(each).encode()).hexdigest() for each in parts]
    return EngineIdentity(checkpoint=digests[0], arithmetic=digests[1])


def _described(engine: PlannedEngine, checkpoint: Checkpoint) -> Iterable[str]:
    config = engine.config
    return engine.backend.describe_arithmetic(config.device, config.ops, checkpoint)


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
