"""Features that meet in one engine change no stream: images, drafts, constraints, recurrent states,
thinned prompts, samples and tenants' quotas, while engines are killed and steps lost."""

from collections import Counter

import pytest
from hypothesis import given, note, settings

from tests.engine.interplay import KINDS, Case, Prompts, Sight, cases, play

NUM_BY_DAY = 25
NUM_SOAK = 2000


def serve(sight: Sight, prompts: Prompts, num_cases: int) -> Counter[str]:
    """Serves so many cases; returns what they met."""
    modes: Counter[str] = Counter()

    @given(cases(sight, prompts))
    @settings(max_examples=num_cases)
    def each(case: Case) -> None:
        note(f"{case}")
        modes.update(play(case))

    each()
    return modes


@pytest.mark.parametrize(("sight", "prompts"), KINDS)
def test_streams_are_those_alone_whatever_features_meet(sight: Sight, prompts: Prompts) -> None:
    modes = serve(sight, prompts, NUM_BY_DAY)
    wanted = ["accepted", "cancelled", "constrained", "killed", "lost", "preempted", "prefix hits"]
    wanted += ["quotas", "rejected", "samples", *["thinned"] * (prompts == "thinned")]
    wanted += [] if sight == "none" else ["images"]
    wanted += ["spans"] if (sight, prompts) == ("whole", "any") else []
    wanted += ["state hits"] if prompts == "recurrent" else []
    missing = [each for each in wanted if not modes[each]]
    assert not missing, f"{missing} never occurred: {modes}"


@pytest.mark.soak
@pytest.mark.parametrize(("sight", "prompts"), KINDS)
def test_streams_of_thousands_of_cases_are_those_alone(sight: Sight, prompts: Prompts) -> None:
    serve(sight, prompts, NUM_SOAK)
