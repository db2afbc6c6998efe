"""Requests that failed against servers of this kind are answered as they should be."""

from pathlib import Path

import pytest

from tests.server.harness import MODEL, RunningServer
from tests.server.reported import Reported, read_reported

REPORTED = read_reported()
TABLE = Path(__file__).parents[2] / "docs" / "compatibility.md"


@pytest.mark.parametrize("reported", REPORTED, ids=lambda each: each.shown)
def test_a_reported_request_is_answered_as_it_should_be(
    bundled: RunningServer, reported: Reported
) -> None:
    with bundled.client() as client:
        assert reported.faults(reported.send(client, MODEL)) == []


def test_the_table_of_the_documentation_has_every_request_and_its_verdict() -> None:
    assert [line for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:] == [
        table_row(each) for each in REPORTED
    ]


def table_row(reported: Reported) -> str:
    verdict = f"{reported.verdict}: {reported.why}" if reported.why else reported.verdict
    return f"| {reported.tried} | {reported.dialect} | {verdict} |"
