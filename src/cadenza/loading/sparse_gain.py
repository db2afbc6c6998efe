"""How much sooner the first token of a thinned prompt comes: `PrefillCost`, `sparse_gain`.

A prompt costs products with the weights for each of its tokens, and attention of each to those
before it. With sparse prefill the draft model computes all of them and a few more, and the model
the kept ones. Short prompts gain 1 / (draft's share of the products + keep), long ones 1 / (draft's
share of the attention + keep squared): there the draft's attention decides, not its size. Pure
arithmetic; knows no engine, and no load. Costs are in any unit of time.

Assumed: both models' products have one rate, and attention has one, `ATTENTION_RATE` of it. Weights
that are quantised more coarsely, and a prompt's cuts beside other requests, are not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.operations import attended_operations, head_tensor, token_operations
from cadenza.core.step_cost import StepCost, num_keys
from cadenza.errors import ConfigError
from cadenza.sparse_prefill import LOOK_AHEAD
from cadenza.spec_prefill_config import SpecPrefillConfig

ATTENTION_RATE = 0.4
"""Operations a second of attention, as a share of those of products, on CPUs with bf16
instructions."""

SHOWN_LENGTHS = (4096, 8192, 32_768, 131_072)
SHOWN_KEEPS = (0.3, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """What prompts cost a model.

    Args:
        prompt: of a prompt of so many tokens, without its head.
        decode: of one more token behind so many, with its head.
    """

    prompt: Callable[[int], float]
    decode: Callable[[int], float]


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
    """In milliseconds, of measured steps with at most `num_tokens` tokens."""
    return PrefillCost(
        prompt=lambda count: (
            -(-count // num_tokens) * steps.fixed_ms
            + count * steps.token_ms
            + num_keys(0, count) * steps.key_ms
        ),
        decode=lambda count: steps.fixed_ms + steps.row_ms(count),
    )


def sparse_gain(target: PrefillCost, draft: PrefillCost, num_tokens: int, keep: float) -> float:
    """The time to the first token of a whole prompt, over that of a thinned one."""
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
    """The gain by length and keep, up to the longest prompt and for that."""
    lengths = sorted({longest, *(each for each in SHOWN_LENGTHS if each < longest)})
    return {
        f"gain_{length}_keep_{keep:g}": round(sparse_gain(target, draft, length, keep), 2)
        for length in lengths
        for keep in keeps
    }
