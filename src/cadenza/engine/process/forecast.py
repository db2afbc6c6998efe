"""`StepForecast`: how long the next step may take, judged by the steps there were.

Pure arithmetic; knows no clock. Invariant: never below what a step of that size or a smaller one
took lately.
"""

UNMEASURED_STEP_S = 6.0
"""What a step is thought to take before the first one is done."""

FADING = 0.98
"""A slow step's share of the forecast after each faster one of its size."""


class StepForecast:
    """Keeps the slowest recent step for each power of two of tokens."""

    def __init__(self) -> None:
        self._slowest_s: dict[int, float] = {}

    def record(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` took so long."""
        size = num_tokens.bit_length()
        self._slowest_s[size] = max(seconds, FADING * self._slowest_s.get(size, 0.0))

    def predict_s(self, num_tokens: int) -> float:
        """Beyond the largest size known, time is taken to grow as the tokens do."""
        if not num_tokens:
            return 0.0
        if not self._slowest_s:
            return UNMEASURED_STEP_S
        size, largest = num_tokens.bit_length(), max(self._slowest_s)
        known = [seconds for each, seconds in self._slowest_s.items() if each <= size]
        slowest_s = max(known or self._slowest_s.values())
        return slowest_s * max(1, 1 << (size - largest)) if size > largest else slowest_s
