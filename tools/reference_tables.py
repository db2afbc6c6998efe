"""Writes docs/flags.md, docs/metrics.md and docs/fields.md from what declares flags, metrics and
fields.

    python -m tools.reference_tables

Knows the form of the first two pages, `field_tables` that of the third. Invariant: a page has
nothing that is not derived, so that a change of a flag, a metric or a field is a run of this
script; a test compares the pages with what it would write.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from cadenza.cli.app import build_app
from cadenza.cli.options import ENGINE_FLAGS, VARIABLES_WITHOUT_FLAG
from cadenza.core.draft_ledger import DraftState
from cadenza.engine.open_requests import RequestStats
from cadenza.engine.stats import (
    Distribution,
    EngineStats,
    ImageStats,
    ScoringStats,
    StateStats,
    StepBoundStats,
)
from cadenza.engine.status import EngineStatus
from cadenza.engine.stored_pages import StoredPageCounts
from cadenza.server.metrics import Metrics, ServedCounts
from cadenza.server.model_turns import ModelTurn
from tools.field_tables import fields_page, table

DOCS = Path(__file__).parents[1] / "docs"
WRITTEN = "<!-- Written by tools/reference_tables.py. -->"
DEFAULT = re.compile(r"\s*\(default: (.*)\)(?=\.?$)|; the default is .*(?=\.$)")
FLAGS_HEAD = """# Flags

Every flag of every command, in tables that a script writes. A flag that is given overrides its
variable. [serving.md](serving.md) says what the important ones are for.
"""
METRICS_HEAD = """# Metrics

Every metric of `/metrics`, in a table that a script writes. A name without a prefix is there
twice, as `vllm:…` and as `cadenza:…`. All have the label `model_name`, too. A histogram has series
that end in `_bucket`, `_sum` and `_count`. What to watch is in
[serving.md](serving.md#prometheus-and-what-to-watch).
"""


def main() -> None:
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"docs/{name}")


def pages() -> dict[str, str]:
    fields = f"{WRITTEN}\n{fields_page()}"
    return {"flags.md": flags_page(), "metrics.md": metrics_page(), "fields.md": fields}


def flags_page() -> str:
    parser: Any = get_command(build_app())
    engine = [each for each in parser.commands["serve"].params if each.name in ENGINE_FLAGS]
    shared = [(each.opts, each.help) for each in engine]
    several = "`serve`, `generate`, `run`, `chat`, `info`, `verify`, `replay` and parts of `bench`"
    parts = [
        FLAGS_HEAD,
        section("The engine", engine, f"Of {several}, for the model that they load."),
    ]
    for name, command in commands_of("cadenza", parser):
        own = [each for each in command.params if (each.opts, each.help) not in shared]
        parts.append(section(name, own))
    rows = [(f"`{name}`", text) for name, text in VARIABLES_WITHOUT_FLAG.items()]
    parts.append(f"## Variables without a flag\n\n{table(('variable', ''), rows)}")
    return "\n".join((WRITTEN, *filter(None, parts)))


def commands_of(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The command's subcommands with their full names, those of groups among them."""
    for child_name, child in command.commands.items():
        full = f"{name} {child_name}"
        yield from commands_of(full, child) if hasattr(child, "commands") else [(full, child)]


def section(title: str, parameters: Iterable[Any], text: str = "") -> str:
    """ "" where there are no flags."""
    flags = [each for each in parameters if each.param_type_name == "option" and not each.hidden]
    if not flags:
        return ""
    head = ("flag", "value", "default", "variable", "")
    body = table(head, [row(each) for each in flags])
    return "\n".join((f"## {title}\n", *([f"{text}\n"] if text else []), body))


def row(flag: Any) -> tuple[str, ...]:
    names = sorted((*flag.opts, *flag.secondary_opts), key=lambda name: not name.startswith("--"))
    help = flag.help or ""
    found = DEFAULT.search(help)
    default = (found[1] or "") if found else ""
    if not default and flag.default not in (None, False) and not callable(flag.default):
        default = str(flag.default)
    return (
        ", ".join(f"`{name}`" for name in names),
        "" if flag.is_flag else f"`{value_of(flag)}`",
        default,
        f"`{flag.envvar}`" if flag.envvar else "",
        DEFAULT.sub("", help),
    )


def value_of(flag: Any) -> str:
    if flag.metavar:
        return flag.metavar
    kind = flag.type_descriptor.annotation
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    kinds = (kind, *get_args(kind))
    return "N" if int in kinds else "NUMBER" if float in kinds else "TEXT"


def metrics_page() -> str:
    families = sorted(served_families(), key=lambda each: each.name)
    both = {each.name.partition(":")[2] for each in families if each.name.startswith("vllm:")}
    rows = [
        (f"`{name_of(each)}`", each.type, labels_of(each), each.documentation)
        for each in families
        if each.name.startswith(("vllm:", "cadenza:"))
        and not (each.name.startswith("cadenza:") and each.name.partition(":")[2] in both)
    ]
    return f"{WRITTEN}\n{METRICS_HEAD}\n{table(('metric', 'type', 'labels', ''), rows)}"


def served_families() -> Iterable[Metric]:
    """Those of a server with everything that adds metrics."""
    model = CountedIdly()
    metrics = Metrics([model], model.counts, lambda: 0, has_loads=True)
    text, _ = metrics.render()
    return text_string_to_metric_families(text.decode())


class CountedIdly:
    """A model and its engine, which have done nothing."""

    name = "model"
    none = Distribution.empty((1.0,))

    def __init__(self) -> None:
        self.counts = ServedCounts()
        self.turn, self.num_loads = ModelTurn(), 1
        self.engine: Any = self

    def status(self) -> EngineStatus:
        return EngineStatus(state="ready", startup_s={"load": 0.0}, replicas=("ready",))

    def request_stats(self) -> RequestStats:
        values = ("queue_seconds", "prefill_seconds", "decode_seconds", "resume_seconds")
        counted: dict[str, Any] = dict.fromkeys(values, self.none)
        return RequestStats(num_accepted=0, ends={}, rejections={}, num_resumed=0, **counted)

    def stats(self) -> EngineStats:
        given = {"num_accepted_per_pos": (0,), "step_seconds": self.none, "step_tokens": self.none}
        needed = [each.name for each in fields(EngineStats) if each.default is MISSING]
        counted: dict[str, Any] = {**dict.fromkeys(needed, 1), **given}
        for by_reason in ("num_prefix_misses", "num_missed_prompts"):
            counted.pop(by_reason, None)
        bound = StepBoundStats(max_s=1.0, prefill_share=1.0, num_granted=0, num_exceeded=0)
        return EngineStats(
            **counted,
            draft_states=(DraftState("ngram", "1", is_on=True, gain=0.0),),
            step_bound=bound,
            queued_s=0.0,
            stored_pages=StoredPageCounts(),
            states=StateStats(),
            images=ImageStats(),
            scoring=ScoringStats(),
        )


def name_of(metric: Metric) -> str:
    """Without the prefix, where there are both."""
    name = metric.name.removeprefix("vllm:")
    return f"{name}_total" if metric.type == "counter" else name


def labels_of(metric: Metric) -> str:
    labels = {label for sample in metric.samples for label in sample.labels}
    return ", ".join(f"`{label}`" for label in sorted(labels - {"model_name", "le"}))


if __name__ == "__main__":
    main()
