"""What batching allows; pure arithmetic. By lengths: a step gives each row one token, prompts cost
nothing, static batches are those of the order of arrival. By measured rates: prompts are computed
one after the other, and a decode step takes what it took with so many rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cadenza.bench.workloads import PlannedRequest
from cadenza_bench.batching.plan import BatchingMode


def groups(requests: Sequence[PlannedRequest], rows: int) -> list[Sequence[PlannedRequest]]:
    """The static batches, where enough requests wait."""
    return [requests[at : at + rows] for at in range(0, len(requests), rows)]


def waiting(
    mode: BatchingMode, requests: Sequence[PlannedRequest], rows: int
) -> Sequence[PlannedRequest]:
    """Those that `mode` has answered while others wait for a row: all but its last batch."""
    batches = groups(requests, 1 if mode == "sequential" else rows)
    return [each for batch in batches[:-1] for each in batch]


def static_steps(lens: Sequence[int], rows: int) -> int:
    """Steps of all batches, each as long as its longest answer."""
    return sum(max(lens[at : at + rows]) for at in range(0, len(lens), rows))


def ideal_gain(mode: BatchingMode, lens: Sequence[int], rows: int) -> float:
    """By how much rows that are always full have more tokens a second than `mode`, by the lengths
    alone: its steps over the tokens of all answers divided by the rows."""
    if mode == "continuous":
        return 1.0
    return static_steps(lens, 1 if mode == "sequential" else rows) * rows / sum(lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """Measured rates; `decode_step_s` by the number of rows, with that of one row among them."""

    prefill_tok_s: float
    decode_step_s: Mapping[int, float]

    def step_s(self, rows: int) -> float:
        """Of a decode step, between the numbers of rows that were measured by interpolation."""
        known = sorted(self.decode_step_s)
        return float(np.interp(rows, known, [self.decode_step_s[each] for each in known]))

    def prefill_s(self, requests: Sequence[PlannedRequest]) -> float:
        return sum(len(each.prompt_token_ids) for each in requests) / self.prefill_tok_s

    def batch_s(self, batch: Sequence[PlannedRequest], *, is_padded: bool) -> float:
        """A batch from its start to the end of its longest answer. Rows leave when they have
        finished, unless the batch is padded; a prompt's last step gives the first token."""
        lens = sorted(each.max_tokens - 1 for each in batch)
        if is_padded:
            return self.prefill_s(batch) + lens[-1] * self.step_s(len(lens))
        decode_s, done = 0.0, 0
        for left, length in zip(range(len(lens), 0, -1), lens, strict=True):
            decode_s += (length - done) * self.step_s(left)
            done = length
        return self.prefill_s(batch) + decode_s

    def run_s(self, mode: BatchingMode, requests: Sequence[PlannedRequest], rows: int) -> float:
        """All requests, that are there from the start; with rows that are always full where
        requests start at any time."""
        if mode == "continuous":
            steps = sum(each.max_tokens - 1 for each in requests) / rows
            return self.prefill_s(requests) + steps * self.step_s(rows)
        batches = groups(requests, 1 if mode == "sequential" else rows)
        return sum(self.batch_s(each, is_padded=mode == "padded") for each in batches)

    def allowed_gain(
        self, mode: BatchingMode, requests: Sequence[PlannedRequest], rows: int
    ) -> float:
        """As `ideal_gain`, with the time of prompts, and of steps with fewer rows."""
        return self.run_s(mode, requests, rows) / self.run_s("continuous", requests, rows)

    def burst_ttft_s(self, requests: Sequence[PlannedRequest], clients: int) -> float:
        """Mean time to the first token where `clients` requests come at the same time and their
        prompts are computed in order."""
        total_s = 0.0
        for burst in groups(requests, clients):
            total_s += sum(self.prefill_s(burst[: at + 1]) for at in range(len(burst)))
        return total_s / len(requests)

    def whole_ttft_s(self, requests: Sequence[PlannedRequest], clients: int) -> float:
        """The same where the answers to `clients` requests are handed over when all have ended."""
        batches = groups(requests, clients)
        total_s = sum(len(each) * self.batch_s(each, is_padded=False) for each in batches)
        return total_s / len(requests)
