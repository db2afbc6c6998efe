"""examples/monitoring: each expression of the dashboard and of the alerts names series and labels
that a server exports."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cadenza.engine.stats import ENGINE_FIGURES
from cadenza.server.metrics import SERVER_FIGURES
from tests.docs.documents import ROOT

FOLDER = ROOT / "examples" / "monitoring"
OF_PROMETHEUS = {"up": {"job", "instance"}}
TARGET_LABELS = {"instance", "job"}  # which Prometheus adds to each series

ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
LABELS = {"_bucket": {"le"}}

SERIES = re.compile(r"\b(?:vllm|cadenza):\w+|\bup\b")
SELECTOR = re.compile(r"((?:vllm|cadenza):\w+|\bup)\{([^}]*)\}")
GROUPED = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def exported() -> dict[str, set[str]]:
    """The labels of each series that a server with everything exports."""
    found: dict[str, set[str]] = {}
    for figure in (*SERVER_FIGURES, *ENGINE_FIGURES):
        for prefix in ("vllm:", "cadenza:") if figure.has_vllm_name else ("cadenza:",):
            for ending in ENDINGS[figure.type]:
                labels = {"model_name", *figure.labels}
                found[f"{prefix}{figure.name}{ending}"] = labels | LABELS.get(ending, set())
    return found


def expressions() -> Iterator[str]:
    board: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    for group in rules["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def faults_of(expression: str, series: dict[str, set[str]]) -> list[str]:
    names = SERIES.findall(expression)
    faults = [f"{name} is not exported" for name in names if name not in series]
    known = TARGET_LABELS.union(*(series.get(name, set()) for name in names))
    for name, labels in SELECTOR.findall(expression):
        own = series.get(name, set()) | TARGET_LABELS
        faults += [f"{name} has no {label}" for label in LABEL.findall(labels) if label not in own]
    for labels in GROUPED.findall(expression):
        wanted = {label.strip() for label in labels.split(",")}
        faults += [f"nothing has the label {label}" for label in sorted(wanted - known)]
    return faults if names else [*faults, "it has no series"]


def test_every_expression_has_series_and_labels_that_are_exported() -> None:
    series = {**exported(), **OF_PROMETHEUS}
    found = list(expressions())
    assert len(found) > 30
    assert {each: faults_of(each, series) for each in found if faults_of(each, series)} == {}


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(cadenza:generation_tokens[5m])", "cadenza:generation_tokens is not exported"),
        ('sum(cadenza:pages{status="live"})', "cadenza:pages has no status"),
        ("sum by (state) (cadenza:num_requests_running)", "nothing has the label state"),
        ("1 > 0", "it has no series"),
    ],
)
def test_an_expression_that_would_show_nothing_is_found(expression: str, fault: str) -> None:
    assert faults_of(expression, exported()) == [fault]


def test_panels_have_places_and_ids_of_their_own() -> None:
    board: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)


@pytest.mark.soak
def test_promtool_takes_the_alerts() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    file: Path = FOLDER / "alerts.yaml"
    command = [promtool, "check", "rules", str(file)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
