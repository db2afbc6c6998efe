"""How much sooner a pruned prompt's first token comes: `PrefillCost`, `sparse_gain`. The draft
computes all tokens, the model the kept ones: short prompts gain 1 / (draft's share of the products
+ keep), long ones 1 / (draft's share of attention + keep squared). Assumes one rate for both
models' products; ignores coarser weights and a prompt's cuts beside other requests."""

from collections.abc import Callable
from dataclasses import dataclass

from cadenza.batch.step_cost import StepCost, num_keys
from cadenza.errors import ConfigError
from cadenza.models.model_config import ModelConfig
from cadenza.models.operations import attended_operations, head_tensor, token_operations
from cadenza.sparse_prefill import LOOK_AHEAD, SpecPrefillConfig

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
