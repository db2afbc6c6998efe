"""Writes docs/flags.md, docs/metrics.md and docs/fields.md from what declares flags, metrics and
fields.

    python -m tools.reference_tables

Knows the form of the first two pages, `field_tables` that of the third. Invariant: a page has
nothing that is not derived, so that a change of a flag, a metric or a field is a run of this
script; a test compares the pages with what it would write.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.main import get_command

from cadenza.cli.app import build_app
from cadenza.cli.options import VARIABLES_WITHOUT_FLAG
from cadenza.config import EngineConfig
from cadenza.engine.stats import ENGINE_FIGURES
from cadenza.figures import Figure
from cadenza.server.metrics import SERVER_FIGURES
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
    engine_options = {each.name for each in fields(EngineConfig)}
    engine = [each for each in parser.commands["serve"].params if each.name in engine_options]
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
    figures = sorted(
        (*SERVER_FIGURES, *ENGINE_FIGURES), key=lambda each: (each.has_vllm_name, each.name)
    )
    rows = [
        (
            f"`{name_of(each)}`",
            each.type,
            ", ".join(f"`{label}`" for label in sorted(each.labels)),
            each.help,
        )
        for each in figures
    ]
    return f"{WRITTEN}\n{METRICS_HEAD}\n{table(('metric', 'type', 'labels', ''), rows)}"


def name_of(figure: Figure[Any]) -> str:
    """Without the prefix, where there are both."""
    name = figure.name if figure.has_vllm_name else f"cadenza:{figure.name}"
    return f"{name}_total" if figure.type == "counter" else name


if __name__ == "__main__":
    main()
