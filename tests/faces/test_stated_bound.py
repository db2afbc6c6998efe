"""What a start says of `--max-itl-ms`."""

import logging
from pathlib import Path

import pytest

from cadenza import LLM
from cadenza.batch.step_cost import StepBound, StepCost
from cadenza.loading import build

COST = StepCost(fixed_ms=10.0, token_ms=1.0, logit_ms=0.0, key_ms=0.01)
"""Two rows and the 16 tokens of a prompt take 29 ms at its start, and 68 ms from position 240."""


@pytest.mark.parametrize(
    ("bound_ms", "expected"),
    [
        (100.0, None),
        (50.0, "--max-itl-ms 50 cannot be kept beside 2 decoding requests behind token 144 of"),
        (20.0, "--max-itl-ms 20 cannot be kept beside 2 decoding requests: a step with 16"),
    ],
)
def test_a_bound_that_is_not_kept_is_warned_of(
    bound_ms: float,
    expected: str | None,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def bound_of(*_: object) -> StepBound:
        return StepBound(max_ms=bound_ms, cost=COST)

    monkeypatch.setattr(build, "make_step_bound", bound_of)
    with caplog.at_level(logging.WARNING, logger=build.__name__):
        LLM(tiny_folder, max_itl_ms=bound_ms, max_num_seqs=2, max_model_len=256).close()
    warnings = [each.getMessage() for each in caplog.records if "--max-itl-ms" in each.getMessage()]
    if expected is None:
        assert not warnings
    else:
        assert len(warnings) == 1
        assert expected in warnings[0]
        assert "takes up to 68 ms; raise it or lower --max-num-seqs" in warnings[0]
