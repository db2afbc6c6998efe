"""Which models can compute sparse prompts, and which can score prompts for another, by their layers
alone; what a backend can do is in its traits."""

from cadenza.models.model_config import ModelConfig


def sparse_refusal(model: ModelConfig) -> str | None:
    """Why a model computes no sparse prompts (`cadenza.sparse_prefill`); None if it does."""
    if model.recurrence is not None:
        return "it has layers with a recurrent state, which runs over every token"
    windows = sorted({kind.window for kind in model.layer_kinds if kind.window is not None})
    if len(windows) > 1:
        return (
            f"its layers have windows of {len(windows)} sizes, from {windows[0]} to {windows[-1]}"
        )
    return None


def window_of(model: ModelConfig) -> int | None:
    """The window of a model that computes sparse prompts; None if it has none."""
    return next((kind.window for kind in model.layer_kinds if kind.window is not None), None)


def scoring_refusal(model: ModelConfig) -> str | None:
    """Why a model scores no prompts (`backends.base.PromptScorer`); None if it does."""
    if model.recurrence is not None:
        return "it has layers with a recurrent state"
    if model.latent is not None:
        return "its keys are latents"
    if not scoring_layers(model):
        return "each of its layers has a window"
    return None


def scoring_layers(model: ModelConfig) -> tuple[int, ...]:
    """The layers whose attention scores prompts: those without a window, ascending."""
    kinds = enumerate(model.layer_kinds)
    return tuple(index for index, kind in kinds if kind.window is None and kind.recurrence is None)
