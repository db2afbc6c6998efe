"""What a step gave (`StepChoices`), and the events that tell what came of a sequence.

Pure functions of a sequence and a step's output.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cadenza.core.sequence import Sequence
from cadenza.core.step_schema import StepOutput
from cadenza.core.token_rules import ruling_fields
from cadenza.events import ErrorKind, Finished, FinishReason, TokenLogprobs


class StepChoices(NamedTuple):
    """A step's output, and of its logit rows what every row reads, as lists.

    `hidden_places` are the places in `StepOutput.hidden` by logit row.
    """

    output: StepOutput
    token_ids: list[int]
    is_finite: list[bool]
    has_choice: list[bool]
    hidden_places: Mapping[int, int]

    @classmethod
    def of(cls, output: StepOutput, hidden_rows: SequenceOf[int] = ()) -> "StepChoices":
        return cls(
            output,
            output.token_ids.tolist(),
            output.is_finite.tolist(),
            output.has_choice.tolist(),
            {row: place for place, row in enumerate(hidden_rows)},
        )

    def hidden(self, indices: range) -> npt.NDArray[np.float32]:
        """The hidden states [N, E] of consecutive logit rows of one pooled sequence."""
        first = self.hidden_places[indices.start]
        return self.output.hidden[first : first + len(indices)]

    def logprobs(self, index: int, count: int | None) -> TokenLogprobs | None:
        """Those of a logit row with its `count` most likely tokens; None if `count` is."""
        return None if count is None else logprobs_of(self.output, index, count)


def logprobs_of(output: StepOutput, index: int, count: int) -> TokenLogprobs:
    """Log probabilities of an output's logit row, with those of the `count` likeliest tokens."""
    return TokenLogprobs(
        logprob=float(output.logprobs[index]),
        rank=int(output.ranks[index]),
        top_ids=tuple(output.top_ids[index, :count].tolist()),
        top_logprobs=tuple(output.top_logprobs[index, :count].tolist()),
    )


def finished_event(
    sequence: Sequence,
    reason: FinishReason,
    *,
    stop_token_id: int | None = None,
    error: str | None = None,
    kind: ErrorKind | None = None,
) -> Finished:
    """The end of a sequence; `stop_token_id` is a token that its request named."""
    return Finished(
        request_id=sequence.request_id,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_generated_tokens=sequence.num_generated_tokens,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        sample=sequence.sample,
        error=error,
        error_kind=kind,
        error_fields=ruling_fields(sequence) if kind == "none_allowed" else (),
        cache_miss=sequence.cache_miss,
        embedding=None if sequence.pool is None else sequence.pool.embedding,
    )
