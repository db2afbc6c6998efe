"""`PromptScores`: which tokens of a prompt still have to be described, and by which step.

A request for `prompt_logprobs` wants, for every token of its prompt but the first, what the model
made of it: the logits of the position before. Knows positions only. Invariant: every position from
1 to the prompt's end is read once, in order, whatever was preempted or launched meanwhile.
"""

from dataclasses import dataclass


@dataclass(slots=True, eq=False, kw_only=True)
class PromptScores:
    """`num_read` positions have been given out, and launched steps will describe those before
    `num_launched`; the first position is never described.
    """

    num_prompt_tokens: int
    num_launched: int = 1
    num_read: int = 1

    @property
    def is_complete(self) -> bool:
        return self.num_read >= self.num_prompt_tokens

    def positions(self, start: int, end: int) -> range:
        """What computing the tokens from `start` to `end` can describe and nobody has."""
        return range(max(start + 1, self.num_launched), min(end + 1, self.num_prompt_tokens))

    def fit(self, start: int, count: int, room: int) -> int:
        """At most `count` tokens from `start` on that describe no more than `room` positions."""
        positions = self.positions(start, start + count)
        if len(positions) <= room:
            return count
        return positions.start + room - 1 - start

    def launch(self, start: int, end: int) -> range:
        """The positions that a step describes; they count as launched."""
        positions = self.positions(start, end)
        self.num_launched = max(self.num_launched, positions.stop)
        return positions

    def read(self, positions: range) -> range:
        """Those of a step's positions that had not been read; they count as read."""
        fresh = range(max(positions.start, self.num_read), positions.stop)
        self.num_read = max(self.num_read, fresh.stop)
        return fresh

    def rewind(self) -> None:
        """What was launched and not read is void, or at least not to be relied on."""
        self.num_launched = self.num_read


@dataclass(slots=True, eq=False)
class ScoreRoom:
    """How many more positions a step can describe."""

    left: int

    def fit(self, scores: PromptScores | None, start: int, count: int) -> int:
        """At most `count` tokens from `start` on, for whose descriptions it has the room."""
        if scores is None:
            return count
        count = scores.fit(start, count, self.left)
        self.left -= len(scores.positions(start, start + count))
        return count
