"""Costs of steps that an earlier start measured."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.backends.base import Runner
from cadenza.backends.fake import FakeRunner
from cadenza.batch.step_cost import StepCost
from cadenza.config import EngineLimits
from cadenza.loading.step_costs import MAX_AGE_S, StepCosts

LIMITS = EngineLimits(
    max_num_seqs=2,
    max_num_batched_tokens=8,
    max_model_len=32,
    page_size=16,
    num_pages=4,
    max_num_queued_reqs=8,
    max_num_queued_tokens=64,
)
FIRST = StepCost(fixed_ms=3.0, token_ms=0.5, logit_ms=0.1, key_ms=0.001)
RUNNER = FakeRunner(
    max_num_seqs=2, max_num_batched_tokens=8, max_pages_per_seq=2, num_pages=4, page_size=16
)


class Measured:
    """Gives another cost at each call, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self, runner: Runner, limits: EngineLimits, clock: Callable[[], float]
    ) -> StepCost:
        self.count += 1
        return replace(FIRST, fixed_ms=FIRST.fixed_ms * self.count)


def costs_in(folder: Path | None, measure: Measured, key: str = "key") -> StepCosts:
    return StepCosts(folder, key, measure=measure)


def test_a_second_start_takes_the_costs_of_the_first(tmp_path: Path) -> None:
    measure, folder = Measured(), tmp_path / "new" / "steps"
    assert costs_in(folder, measure).of("target", RUNNER, LIMITS) == FIRST
    assert costs_in(folder, measure).of("target", RUNNER, LIMITS) == FIRST
    assert measure.count == 1


def test_another_engine_runner_or_size_has_costs_of_its_own(tmp_path: Path) -> None:
    measure = Measured()
    costs_in(tmp_path, measure).of("target", RUNNER, LIMITS)
    costs_in(tmp_path, measure, "other").of("target", RUNNER, LIMITS)
    costs_in(tmp_path, measure).of("draft", RUNNER, LIMITS)
    costs_in(tmp_path, measure).of("target", RUNNER, replace(LIMITS, max_num_seqs=1))
    assert measure.count == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-2],
        lambda content: content.replace(b"3.0", b"4.0"),
        lambda content: b"\xff" * 9000,
    ],
    ids=["empty", "cut", "changed", "foreign"],
)
def test_a_damaged_file_is_measured_again_and_replaced(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    measure = Measured()
    costs_in(tmp_path, measure).of("target", RUNNER, LIMITS)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    again = costs_in(tmp_path, measure).of("target", RUNNER, LIMITS)
    assert (measure.count, again.fixed_ms) == (2, 6.0)
    assert costs_in(tmp_path, measure).of("target", RUNNER, LIMITS) == again
    assert measure.count == 2


def test_old_costs_are_measured_again(tmp_path: Path) -> None:
    measure = Measured()
    costs_in(tmp_path, measure).of("target", RUNNER, LIMITS)
    (file,) = tmp_path.iterdir()
    written_s = file.stat().st_mtime
    for age_s, count in ((MAX_AGE_S - 60, 1), (MAX_AGE_S + 60, 2)):
        os.utime(file, (written_s - age_s, written_s - age_s))
        costs_in(tmp_path, measure).of("target", RUNNER, LIMITS)
        assert measure.count == count


def test_without_a_folder_or_where_none_can_be_made_costs_are_measured(tmp_path: Path) -> None:
    measure, blocked = Measured(), tmp_path / "file"
    blocked.write_text("")
    for folder in (None, None, blocked / "steps", blocked / "steps"):
        costs_in(folder, measure).of("target", RUNNER, LIMITS)
    assert measure.count == 4


def test_no_file_is_left_of_costs_that_cannot_be_kept(tmp_path: Path) -> None:
    measure = Measured()
    costs_in(tmp_path, measure).of("target", RUNNER, LIMITS)
    (kept,) = tmp_path.iterdir()
    kept.unlink()
    kept.mkdir()
    assert costs_in(tmp_path, measure).of("target", RUNNER, LIMITS).fixed_ms == 6.0
    assert list(tmp_path.iterdir()) == [kept]
