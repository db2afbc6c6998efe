"""The plan of the second model of an engine, which drafts or scores prompts (`--spec-prefill`):
which models can draft or score for which, and how much sooner a pruned prompt's first token comes.
The draft computes all tokens, the model the kept ones: short prompts gain 1 / (draft's share of
products + keep), long ones 1 / (draft's share of attention + keep squared)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cadenza.backends.base import BackendTraits
from cadenza.batch.step_cost import StepCost, num_keys
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.mtp_head import mtp_head_of
from cadenza.checkpoint.tensor_formats import stored_bytes
from cadenza.config import EngineConfig, Quantization
from cadenza.errors import CheckpointError, ConfigError
from cadenza.loading.engine_plan import DraftPlan
from cadenza.loading.plan import choose_dtype, choose_quantization, memory_of
from cadenza.models.declaration import EMBEDDING, HEAD, declare
from cadenza.models.model_config import ModelConfig, scoring_refusal, sparse_refusal
from cadenza.models.operations import attended_operations, head_tensor, token_operations
from cadenza.sparse_prefill import LOOK_AHEAD, SpecPrefillConfig
from cadenza.text.tokens.tokenizer import Tokenizer, TokenizerSource
from cadenza.weights.weight_format import item_bytes

# Operations a second of attention, as a share of those of products, on CPUs with bf16
ATTENTION_RATE = 0.4

SHOWN_LENGTHS = (4096, 8192, 32_768, 131_072)
SHOWN_KEEPS = (0.3, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """What prompts cost a model."""

    prompt: Callable[[int], float]  # of a prompt of so many tokens, without its head
    decode: Callable[[int], float]  # of one more token after so many, with its head


def cost_of_shape(config: ModelConfig, attention_rate: float = ATTENTION_RATE) -> PrefillCost:
    """In operations of products."""
    token, head = token_operations(config), 2 * head_tensor(config).num_elements

    def attended(count: int) -> float:
        return attended_operations(config, count) / attention_rate

    return PrefillCost(
        prompt=lambda count: count * token + attended(count),
        decode=lambda count: token + head + attended(count + 1) - attended(count),
    )


def cost_of_steps(steps: StepCost, num_tokens: int) -> PrefillCost:
    """In milliseconds, from measured steps of at most `num_tokens` tokens."""
    return PrefillCost(
        prompt=lambda count: (
            -(-count // num_tokens) * steps.fixed_ms
            + count * steps.token_ms
            + num_keys(0, count) * steps.key_ms
        ),
        decode=lambda count: steps.fixed_ms + steps.row_ms(count),
    )


def sparse_gain(target: PrefillCost, draft: PrefillCost, num_tokens: int, keep: float) -> float:
    """The time to the first token of a whole prompt, over that of a pruned one."""
    whole = target.prompt(num_tokens)
    scored = draft.prompt(num_tokens) + (LOOK_AHEAD - 1) * draft.decode(num_tokens)
    return whole / (scored + target.prompt(round(keep * num_tokens)))


def refuse_loss(target: ModelConfig, draft: ModelConfig, config: SpecPrefillConfig) -> None:
    """Raises ConfigError for a pair that would take longer than the whole prompt at the threshold,
    unless it is forced."""
    least = max(config.threshold, 1)
    gain = sparse_gain(cost_of_shape(target), cost_of_shape(draft), least, config.keep)
    if gain < 1.0 and not config.force:
        raise ConfigError(
            f"--spec-prefill: a prompt of {least} tokens is predicted to take {1 / gain:.2f} times "
            f"as long with this draft model and keep {config.keep:g} as without; name a smaller "
            f"draft model, lower keep, raise the threshold, or set force to true"
        )


def gains_table(
    target: PrefillCost, draft: PrefillCost, keeps: tuple[float, ...], longest: int
) -> dict[str, float]:
    """The gain by length and keep, up to the longest prompt."""
    lengths = sorted({longest, *(each for each in SHOWN_LENGTHS if each < longest)})
    return {
        f"gain_{length}_keep_{keep:g}": round(sparse_gain(target, draft, length, keep), 2)
        for length in lengths
        for keep in keeps
    }


_FLAG = "--speculative-config"
_COARSENESS = ("none", "int8", "int4")


def plan_copy(checkpoint: Checkpoint, config: EngineConfig, traits: BackendTraits) -> DraftPlan:
    """The plan of a copy of the model with coarser weights, on the model's own KV. Raises
    ConfigError if its weights would be no coarser."""
    speculation = config.speculation
    assert speculation is not None
    chosen = speculation.quantization
    if checkpoint.scheme is not None:
        raise ConfigError(
            f"{_FLAG}: the method quantised needs a checkpoint whose weights are not quantised; "
            f"these are, as {checkpoint.scheme.name}"
        )
    if _COARSENESS.index(chosen or "none") <= _COARSENESS.index(config.quantization):
        raise ConfigError(
            f"{_FLAG}: a draft in {chosen} is no coarser than the model in {config.quantization} "
            f"(--quantization); choose a coarser one, or another method"
        )
    text = _without_images(checkpoint)  # the target has the tower
    return replace(
        _plan(text, config, traits, name=f"its copy in {chosen}", shares_kv=True),
        checkpoint=checkpoint,
    )


def plan_draft_model(
    target: Checkpoint, draft: Checkpoint, config: EngineConfig, traits: BackendTraits
) -> DraftPlan:
    """The plan of another model that drafts for `target`; `traits` are the backend's for it. Raises
    ConfigError for another vocabulary, or weights that cannot be quantised as asked."""
    speculation = config.speculation
    assert speculation is not None
    name = speculation.model or draft.folder.name
    check_vocabulary(_FLAG, name, target, draft)
    return _plan(draft, config, traits, name=f"the model {name}", shares_kv=False)


def plan_mtp_head(checkpoint: Checkpoint, config: EngineConfig, traits: BackendTraits) -> DraftPlan:
    """The plan of the model's own MTP layer. Raises CheckpointError if it has none, ConfigError if
    the backend keeps no hidden states."""
    if "hidden_states" not in traits.capabilities:
        raise ConfigError(
            f"{_FLAG}: the method mtp needs hidden states, which {traits.name} with {traits.ops} "
            f"ops does not keep; choose another method"
        )
    try:
        head = mtp_head_of(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"the method mtp of {_FLAG}: {error}") from error
    own = [spec for spec in declare(head.config) if spec.name not in (EMBEDDING, HEAD)]
    dtype = choose_dtype(config, head, traits)
    model = head.config
    return DraftPlan(
        name="its MTP layer",
        checkpoint=head,
        dtype=dtype,
        quantization=config.quantization,
        context=head.outline.max_position_embeddings,
        shares_kv=False,
        reads_hidden=True,
        weight_bytes=stored_bytes(own, dtype, config.quantization),
        kv_bytes_per_token=model.kv_bytes_per_token(dtype, config.kv_cache_dtype)
        + model.hidden_size * item_bytes(dtype),
    )


def _plan(
    checkpoint: Checkpoint,
    config: EngineConfig,
    traits: BackendTraits,
    *,
    name: str,
    shares_kv: bool,
) -> DraftPlan:
    speculation = config.speculation
    assert speculation is not None
    quantization = speculation.quantization or "none"
    plan = plan_second(checkpoint, config, traits, quantization, name)
    if checkpoint.is_known and checkpoint.config.recurrence is not None:
        raise ConfigError(
            f"{_FLAG}: {name} has recurrent layers, and drafts of such a model are not supported; "
            f"choose the method ngram, or mtp where the model has an MTP layer"
        )
    return replace(plan, shares_kv=True, kv_bytes_per_token=0) if shares_kv else plan


def plan_second(
    checkpoint: Checkpoint,
    config: EngineConfig,
    traits: BackendTraits,
    quantization: Quantization,
    name: str,
) -> DraftPlan:
    """The plan of a second model for the engine of `config`, with its types except the weights'.
    Raises ConfigError where it cannot be quantised as asked."""
    own = replace(config, quantization=quantization, speculative_config=None, spec_prefill=None)
    quantization = choose_quantization(own, checkpoint, traits)
    dtype = choose_dtype(own, checkpoint, traits)
    memory = memory_of(checkpoint, traits, dtype, own)
    return DraftPlan(
        name=name,
        checkpoint=checkpoint,
        dtype=dtype,
        quantization=quantization,
        context=checkpoint.outline.max_position_embeddings,
        shares_kv=False,
        weight_bytes=memory.weight_bytes,
        kv_bytes_per_token=memory.kv_bytes_per_token,
    )


def _without_images(checkpoint: Checkpoint) -> Checkpoint:
    config = replace(checkpoint.config, vision=None)
    return replace(checkpoint, known=(config, checkpoint.weights))


def check_vocabulary(flag: str, name: str, target: Checkpoint, draft: Checkpoint) -> None:
    """Raises ConfigError, which names the flag, unless equal ids are equal tokens."""
    sizes = draft.outline.vocab_size, target.outline.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{flag}: the model {name} has a vocabulary of {sizes[0]} tokens, and the model that "
            f"it is for one of {sizes[1]}; they must be equal"
        )
    sources = draft.tokenizer_source, target.tokenizer_source
    if sources[0] is None or sources[1] is None or _bytes_of(sources[0]) == _bytes_of(sources[1]):
        return
    own, other = (Tokenizer(source).vocabulary() for source in sources if source is not None)
    odd = next((token for token, index in other.items() if own.get(token) != index), None)
    if odd is not None:
        raise ConfigError(
            f"{flag}: the model {name} has another vocabulary than the model that it is for: "
            f"the token {odd!r} is {own.get(odd)} in the one and {other[odd]} in the other; they "
            f"must be equal"
        )


def _bytes_of(source: Path | TokenizerSource) -> bytes:
    return source.read_bytes() if isinstance(source, Path) else source.content


_SPARSE = "--spec-prefill"


def check_target(checkpoint: Checkpoint, traits: BackendTraits) -> None:
    """Raises ConfigError where the model, or the backend, computes no prompts with gaps."""
    if "sparse_prompts" not in traits.capabilities or not checkpoint.is_known:
        raise ConfigError(
            f"{_SPARSE} needs prompts with gaps, which {traits.name} with {traits.ops} ops does "
            f"not compute; leave it out"
        )
    reason = sparse_refusal(checkpoint.config)
    if reason is not None:
        raise ConfigError(
            f"{_SPARSE}: the model computes no prompts with gaps: {reason}; leave it out"
        )


def plan_scorer(
    target: Checkpoint, scorer: Checkpoint, config: EngineConfig, traits: BackendTraits
) -> DraftPlan:
    """The plan of a model that scores the prompts of `target`; `traits` are the backend's for it.
    Raises ConfigError if it cannot score prompts, has another vocabulary, cannot be quantised as
    asked, or is predicted to cost more time than it saves."""
    chosen = config.sparse_prompts
    assert chosen is not None, "the options name no model"
    name = chosen.model or scorer.folder.name
    if "scores" not in traits.capabilities or not scorer.is_known:
        raise ConfigError(
            f"{_SPARSE}: {traits.name} with {traits.ops} ops scores no prompts; leave it out"
        )
    reason = scoring_refusal(scorer.config)
    if reason is not None:
        raise ConfigError(f"{_SPARSE}: the model {name} scores no prompts: {reason}; name another")
    check_vocabulary(_SPARSE, name, target, scorer)
    refuse_loss(target.config, scorer.config, chosen)
    quantization = chosen.quantization or "none"
    plan = plan_second(scorer, config, traits, quantization, f"the model {name}")
    least = max(chosen.threshold, 1) + LOOK_AHEAD
    if plan.context < least:
        raise ConfigError(
            f"{_SPARSE}: the model {name} reads at most {plan.context} tokens, so that no prompt "
            f"of the threshold of {chosen.threshold} or more could be scored; lower the threshold "
            f"below {plan.context - LOOK_AHEAD}, or name a model with a longer context"
        )
    return plan
