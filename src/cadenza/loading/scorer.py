"""The plan of the model that scores prompts for a sparse prefill (`--spec-prefill`): which models
can compute prompts with gaps, and which score prompts for which."""

from cadenza.backends.base import BackendTraits
from cadenza.checkpoint import Checkpoint
from cadenza.checkpoint.sparse_support import scoring_refusal, sparse_refusal
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError
from cadenza.loading.draft import check_vocabulary, plan_second
from cadenza.loading.engine_plan import DraftPlan
from cadenza.loading.sparse_gain import refuse_loss
from cadenza.sparse_prefill import LOOK_AHEAD

_FLAG = "--spec-prefill"


def check_target(checkpoint: Checkpoint, traits: BackendTraits) -> None:
    """Raises ConfigError where the model, or the backend, computes no prompts with gaps."""
    if "sparse_prompts" not in traits.capabilities or not checkpoint.is_known:
        raise ConfigError(
            f"{_FLAG} needs prompts with gaps, which {traits.name} with {traits.ops} ops does not "
            f"compute; leave it out"
        )
    reason = sparse_refusal(checkpoint.config)
    if reason is not None:
        raise ConfigError(
            f"{_FLAG}: the model computes no prompts with gaps: {reason}; leave it out"
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
            f"{_FLAG}: {traits.name} with {traits.ops} ops scores no prompts; leave it out"
        )
    reason = scoring_refusal(scorer.config)
    if reason is not None:
        raise ConfigError(f"{_FLAG}: the model {name} scores no prompts: {reason}; name another")
    check_vocabulary(_FLAG, name, target, scorer)
    refuse_loss(target.config, scorer.config, chosen)
    quantization = chosen.quantization or "none"
    plan = plan_second(scorer, config, traits, quantization, f"the model {name}")
    least = max(chosen.threshold, 1) + LOOK_AHEAD
    if plan.context < least:
        raise ConfigError(
            f"{_FLAG}: the model {name} reads at most {plan.context} tokens, so that no prompt of "
            f"the threshold of {chosen.threshold} or more could be scored; lower the threshold "
            f"below {plan.context - LOOK_AHEAD}, or name a model with a longer context"
        )
    return plan
