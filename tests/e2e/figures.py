"""Seconds that a bar measures: median and worst, told beside the load they were measured under."""

import os
import statistics
from collections import defaultdict


def stretch() -> float:
    """How much longer things take here, because others compute too: who waits per core."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Figures:
    """Collects seconds by name. `slack` times what a bar allows is allowed here."""

    def __init__(self, slack: float = 1.0) -> None:
        self._slack = slack
        self._seconds: dict[str, list[float]] = defaultdict(list)

    @property
    def is_strict(self) -> bool:
        """Whether the bars themselves are asked for."""
        return self._slack == 1

    def note(self, name: str, seconds: float, bar_s: float) -> None:
        """Notes a time; it fails beyond the bar, stretched as the machine is loaded."""
        self._seconds[name].append(seconds)
        bound_s = bar_s * self._slack * stretch()
        assert seconds <= bound_s, (
            f"{name}: {seconds:.2f} s, over {bound_s:.2f} (bar {bar_s:g} s, load {stretch():.1f})"
        )

    def tell(self, what: str) -> None:
        """Prints them: `pytest -s` or a failure's report shows it."""
        load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
        print(f"\n{what} (load {load} on {os.cpu_count()} cores)")
        for name, seconds in self._seconds.items():
            middle = statistics.median(seconds)
            print(f"  {name}: median {middle:.3f} s, worst {max(seconds):.3f} s of {len(seconds)}")
