"""How long the runs left of `bench throughput` will take, from those made: a decode step of R rows
as the nearest smaller number measured, plus a prompt's token for each further row, corrected by
what runs took in all."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cadenza.bench.workloads import WARM_TOKENS, Workload


@dataclass(slots=True, eq=False, kw_only=True)
class RemainingTime:
    """The time that is left; `add` each repeat when it has been made."""

    workload: Workload
    token_budget: int
    _step_s: dict[int, float] = field(default_factory=dict[int, float])
    _prompt_token_s: float = 0.0
    _num_done: int = 0
    _taken_s: float = 0.0
    _said_s: float = 0.0

    def add(self, rows: int, took_s: float, *, decode_tok_s: float, prefill_tok_s: float) -> None:
        self._step_s[rows] = rows / decode_tok_s
        self._prompt_token_s = 1 / prefill_tok_s
        self._num_done += 1
        self._taken_s += took_s
        self._said_s += self._repeat_s(rows, self.workload.output_len)

    @property
    def seconds(self) -> float | None:
        """None before the first repeat."""
        if not self._num_done:
            return None
        left = self._left(self.workload.concurrency)
        return left * self._taken_s / self._said_s

    def _left(self, concurrency: Sequence[int]) -> float:
        workload = self.workload
        num_done, left_s = self._num_done, 0.0
        for rows in concurrency:
            done = min(num_done, workload.repeats)
            num_done -= done
            left_s += (workload.repeats - done) * self._repeat_s(rows, workload.output_len)
            if not done:  # its warm-up is to come, too
                left_s += self._repeat_s(rows, min(WARM_TOKENS, workload.output_len))
        return left_s

    def _repeat_s(self, rows: int, output_len: int) -> float:
        """Prompts and answers of a decode run, and the prompts of a prefill run."""
        num_prompts = rows + self.workload.num_prefill_prompts(rows, self.token_budget)
        prompts_s = num_prompts * self.workload.input_len * self._prompt_token_s
        return prompts_s + output_len * self._decode_step_s(rows)

    def _decode_step_s(self, rows: int) -> float:
        near = max((each for each in self._step_s if each <= rows), default=min(self._step_s))
        return self._step_s[near] + max(0, rows - near) * self._prompt_token_s


def about(seconds: float) -> str:
    """Say 5 s, 40 s, 3 min."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{round(seconds / 60)} min"
