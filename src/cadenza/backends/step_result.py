"""The result of a step as one int32 array [L, C], and what is read of it. Legend: L logit rows · C
columns."""

import numpy as np
import numpy.typing as npt

from cadenza.batch.step_schema import Int32Array, StepOutput
from cadenza.config import MAX_LOGPROBS_BOUND

NUM_TOP = MAX_LOGPROBS_BOUND  # most top log probabilities that a step can report (`--max-logprobs`)

COLUMN_TOKEN, COLUMN_STATE, COLUMN_LOGPROB, COLUMN_RANK, COLUMN_TOP = range(5)
# Columns of a step's result: token, row state, logprob bits, rank, top ids, top logprob bits.
NUM_COLUMNS = COLUMN_TOP + 2 * NUM_TOP

# Row states: a logit is NaN or infinite · a token was chosen · the rules allow no token.
STATE_NOT_FINITE, STATE_CHOSEN, STATE_NONE_ALLOWED = range(3)


def read_result(rows: Int32Array, hidden: npt.NDArray[np.float32]) -> StepOutput:
    top_ids, top_logprobs = np.split(rows[:, COLUMN_TOP:NUM_COLUMNS], 2, axis=1)
    return StepOutput(
        token_ids=rows[:, COLUMN_TOKEN],
        is_finite=rows[:, COLUMN_STATE] != STATE_NOT_FINITE,
        has_choice=rows[:, COLUMN_STATE] != STATE_NONE_ALLOWED,
        logprobs=rows[:, COLUMN_LOGPROB].view(np.float32),
        ranks=rows[:, COLUMN_RANK],
        top_ids=top_ids,
        top_logprobs=top_logprobs.view(np.float32),
        hidden=hidden,
    )
