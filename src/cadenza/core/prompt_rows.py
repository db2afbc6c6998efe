"""`PromptRowsProgress`: which positions of a prompt still need a logit row.

A request with `prompt_logprobs` gets a log probability for every prompt token but the first, from
the logits at the previous position; one whose hidden states are averaged needs those of the same
rows. Invariant: every position from 1 to the prompt's end is reported once and in order, regardless
of preemptions and steps in flight.
"""

from dataclasses import dataclass


@dataclass(slots=True, eq=False, kw_only=True)
class PromptRowsProgress:
    """Positions below `num_read` have been reported; those below `num_launched` are computed by
    launched steps. Both start at 1: no row comes before the first token.
    """

    num_prompt_tokens: int
    num_launched: int = 1
    num_read: int = 1

    @property
    def is_complete(self) -> bool:
        return self.num_read >= self.num_prompt_tokens

    def positions(self, start: int, end: int) -> range:
        """Positions not yet launched whose logits result from computing tokens [start, end)."""
        return range(max(start + 1, self.num_launched), min(end + 1, self.num_prompt_tokens))

    def fit(self, start: int, count: int, num_rows: int) -> int:
        """The most tokens from `start`, up to `count`, that need `num_rows` rows or fewer."""
        positions = self.positions(start, start + count)
        if len(positions) <= num_rows:
            return count
        return positions.start + num_rows - 1 - start

    def launch(self, start: int, end: int) -> range:
        """Marks the positions covered by tokens [start, end) as launched; returns them."""
        positions = self.positions(start, end)
        self.num_launched = max(self.num_launched, positions.stop)
        return positions

    def read(self, positions: range) -> range:
        """Marks a step's positions as read; returns those that had not been read before."""
        fresh = range(max(positions.start, self.num_read), positions.stop)
        self.num_read = max(self.num_read, fresh.stop)
        return fresh

    def skip(self, count: int) -> None:
        """The first `count` positions have been reported elsewhere."""
        self.num_launched = self.num_read = 1 + count

    def rewind(self) -> None:
        """After a preemption: positions launched but not read must be launched again."""
        self.num_launched = self.num_read
