"""Costs of steps, and prompts that share one, as Hypothesis draws them."""

from hypothesis import strategies as st

from cadenza.batch.step_cost import StepCost, StepLoad
from cadenza.scheduler.step_budget import PromptPart

COST = StepCost(fixed_ms=5.0, token_ms=0.25, logit_ms=0.2, key_ms=0.0001)

costs = st.builds(
    StepCost,
    fixed_ms=st.floats(0.01, 100),
    token_ms=st.floats(0.001, 5),
    logit_ms=st.floats(1e-9, 5),
    key_ms=st.floats(1e-9, 0.01),
)
prompt_parts = st.builds(
    PromptPart,
    start=st.integers(0, 10_000),
    num_left=st.integers(1, 10_000),
    has_logits=st.booleans(),
    is_first=st.booleans(),
)


def load_of(part: PromptPart, count: int) -> StepLoad:
    return StepLoad().plus(part.start, count, count if part.has_logits else 0)
