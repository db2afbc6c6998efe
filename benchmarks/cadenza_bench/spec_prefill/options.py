"""What `cadenza bench spec-prefill` plays: its flags.

Imports nothing heavy, because the command line's flags follow from this class.
"""

from dataclasses import dataclass

from cadenza.bench.workloads import MAX_CONCURRENCIES, MAX_LEN, check_repeats, check_whole
from cadenza.errors import ConfigError
from cadenza.option import flag
from cadenza.sparse_prefill import LEAST_KEEP, MOST_KEEP

MAX_SAMPLES = 10_000
SHORTEST = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecPrefillOptions:
    """What is measured. Raises ConfigError where a number is out of bounds."""

    input_len: tuple[int, ...] = flag(
        (), "Tokens of the prompts, one row for each (default: a half and all of the context)."
    )
    keep: tuple[float, ...] = flag((0.3, 0.1), "Fractions of the prompt that are kept.")
    samples: int = flag(
        10, "Prompts of each task and length, and texts that are gone on with; 0: times alone."
    )
    repeats: int = flag(3, "Prompts that are timed; the medians are shown.")
    processor_time: bool = flag(
        False,
        "Count the processor's seconds of this process in place of the clock's: for a machine with "
        "other load, with CADENZA_NUM_THREADS=1.",
    )
    draft_shape: str | None = flag(
        None,
        "Random weights of this shape as the draft model; with random weights only times say "
        "anything: add --samples 0.",
        metavar="NAME|FILE",
    )

    def __post_init__(self) -> None:
        check_whole("samples", self.samples, 0, MAX_SAMPLES)
        check_repeats(self.repeats)
        check_whole("input-len (how many values)", len(self.input_len), 0, MAX_CONCURRENCIES)
        for length in self.input_len:
            check_whole("input-len", length, SHORTEST, MAX_LEN)
        check_whole("keep (how many values)", len(self.keep), 1, MAX_CONCURRENCIES)
        for keep in self.keep:
            if not LEAST_KEEP <= keep <= MOST_KEEP:
                raise ConfigError(f"--keep {keep:g} must be from {LEAST_KEEP} to {MOST_KEEP:g}")

    def lengths(self, context: int) -> tuple[int, ...]:
        """Of prompts whose answers fit a context. Raises ConfigError if a given one is longer."""
        most = context - ROOM
        for length in self.input_len:
            if length > most:
                raise ConfigError(
                    f"--input-len {length} is longer than the {most} tokens that fit the context "
                    f"of {context} beside an answer; lower it"
                )
        return self.input_len or tuple(length for length in (most // 2, most) if length >= SHORTEST)


ROOM = 48  # tokens that are left for an answer and for look-ahead
