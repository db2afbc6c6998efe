"""The golden corpus: digests of streams that every machine must reproduce.

    python -m tools.golden_bits                   # compares; exit status 1 on any difference
    python -m tools.golden_bits --only gemma      # the cases whose name contains this
    python -m tools.golden_bits --missing         # the cases that each class lacks
    python -m tools.golden_bits --record          # records; refuses changed bits of a revision
    python -m tools.golden_bits --ran-on "Zen 5"  # the same, and writes down that all ran there
    python -m tools.golden_bits --table           # the tables of docs/exactness.md

Owns `tests/golden/bits.json`, and `runs.json` beside it: what was compared where. A digest is of
the tokens and of the bits of all log probabilities. Invariant: recorded digests change only with
`ARITHMETIC_REVISION`.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import msgspec

from cadenza.backends.xla.tables import PORTABLE
from cadenza.fingerprint import ARITHMETIC_REVISION
from tools.family_table import with_table
from tools.golden_cases import Case, Group, all_cases, play

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "golden" / "bits.json"
RUNS = FILE.with_name("runs.json")
PAGE = ROOT / "docs" / "exactness.md"
BEGIN = "<!-- golden corpus: written by tools/golden_bits.py -->"
END = "<!-- end of golden corpus -->"

EMULATED = "_emulated"  # ends the names of tables over a model of their instructions

# The classes of tables with instructions for bfloat16.
OWN_BITS = ("amx", "avx512_bf16", "neon_bf16")

GROUPS: tuple[Group, ...] = get_args(Group)


class Corpus(msgspec.Struct, frozen=True, kw_only=True):
    """Digests by class of arithmetic and case."""

    revision: int
    classes: dict[str, dict[str, str]]


class MachineRun(msgspec.Struct, frozen=True, kw_only=True):
    """A table whose kernels gave the recorded bits of all cases that there were: how many of each
    group. `machine` is what computed, `integers` the kernels of quantised products beside the
    table, `arithmetic` the class."""

    machine: str
    table: str
    integers: str
    arithmetic: str
    num_cases: dict[str, int]


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """Of one revision of the arithmetic."""

    revision: int
    runs: tuple[MachineRun, ...] = ()


def read_corpus() -> Corpus:
    return msgspec.json.decode(FILE.read_bytes(), type=Corpus)


def read_runs() -> Runs:
    """Those of this revision: bits of another one say nothing of its."""
    found = msgspec.json.decode(RUNS.read_bytes(), type=Runs) if RUNS.exists() else None
    if found is None or found.revision != ARITHMETIC_REVISION:
        return Runs(revision=ARITHMETIC_REVISION)
    return found


def cases_of_class(name: str) -> list[Case]:
    """Those that a table of the class computes in it; with bits of its own it computes the others
    as the portable ones do."""
    return [case for case in all_cases() if name == PORTABLE or case.has_bf16_products]


def missing(corpus: Corpus) -> dict[str, list[str]]:
    """The names of the cases that no machine or emulation has recorded yet, by class."""
    return {
        name: [
            case.name
            for case in cases_of_class(name)
            if case.name not in corpus.classes.get(name, {})
        ]
        for name in (PORTABLE, *OWN_BITS)
    }


def compare(corpus: Corpus, cases: list[Case], arithmetic: str = "portable") -> list[str]:
    """The names of the cases whose bits are not the recorded ones, with both digests; those that
    the corpus lacks are among them."""
    differences: list[str] = []
    for case in cases:
        name, digest = play(case, arithmetic)
        recorded = corpus.classes.get(name, {}).get(case.name)
        if recorded is None:
            differences.append(f"{name}: {case.name}: {digest} here, not recorded yet (--record)")
        elif digest != recorded:
            differences.append(f"{name}: {case.name}: {digest} here, {recorded} in the corpus")
    return differences


def record(corpus: Corpus, cases: list[Case], arithmetic: str = "portable") -> Corpus:
    """The corpus with these cases of this revision. Raises SystemExit where recorded bits of the
    same revision would change."""
    is_new = corpus.revision != ARITHMETIC_REVISION
    classes = {} if is_new else {name: dict(each) for name, each in corpus.classes.items()}
    for case in cases:
        name, digest = play(case, arithmetic)
        before = classes.setdefault(name, {}).setdefault(case.name, digest)
        if before != digest:
            raise SystemExit(
                f"{case.name}: the bits of {name} changed; raise ARITHMETIC_REVISION in "
                f"cadenza/fingerprint.py, and record all cases anew"
            )
    return Corpus(revision=ARITHMETIC_REVISION, classes=classes)


def missing_text(corpus: Corpus) -> str:
    """A line for each class."""
    lines: list[str] = []
    for name, lacking in missing(corpus).items():
        count = len(cases_of_class(name))
        names = f": {', '.join(lacking)}" if lacking else ""
        lines.append(f"{name} lacks {len(lacking)} of {count} cases{names}")
    return "\n".join(lines)


def with_run(runs: Runs, machine: str, arithmetic: str) -> Runs:
    """With this machine's run of all cases, in place of an earlier one of the same table."""
    from cadenza.backends.xla.ops.native_library import load_native_library

    library = load_native_library()
    table = library.cpu_isa if arithmetic == "fast" else library.portable_isa
    name = table.removesuffix(EMULATED)
    run = MachineRun(
        machine=f"{machine}, by a model of the instructions" if name != table else machine,
        table=name,
        integers=library.cpu_integer_isa.removesuffix(EMULATED),
        arithmetic=name if name in OWN_BITS else PORTABLE,
        num_cases=_counts(cases_of_class(name if name in OWN_BITS else PORTABLE)),
    )

    def place(each: MachineRun) -> tuple[str, ...]:
        return each.arithmetic, each.table, each.integers, each.machine

    others = [each for each in runs.runs if place(each) != place(run)]
    kept = sorted([*others, run], key=place)
    return Runs(revision=ARITHMETIC_REVISION, runs=tuple(kept))


def _counts(cases: Iterable[Case]) -> dict[str, int]:
    found = Counter(case.group for case in cases)
    return {group: found[group] for group in GROUPS}


def table(corpus: Corpus, runs: Runs) -> str:
    """In Markdown: what each class has, and which tables gave it."""
    lines = [
        f"| class, table | machine | {' | '.join(GROUPS)} |",
        f"|---|---|{'---|' * len(GROUPS)}",
    ]
    lacking = missing(corpus)
    for name in (PORTABLE, *OWN_BITS):
        every = cases_of_class(name)
        counts = _counts(every)
        recorded = _counts(case for case in every if case.name not in lacking[name])
        cells = [_of(recorded[group], counts[group]) for group in GROUPS]
        lines.append(f"| **`{name}`** | recorded | {' | '.join(cells)} |")
        for run in runs.runs:
            if run.arithmetic == name:
                cells = [_of(run.num_cases.get(group, 0), counts[group]) for group in GROUPS]
                used = f"`{run.table}`, integers `{run.integers}`"
                lines.append(f"| {used} | {run.machine} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(count: int, every: int) -> str:
    return f"all {every}" if count == every else f"{count} of {every}"


def _write_json(path: Path, value: object) -> None:
    text = json.dumps(msgspec.to_builtins(value), indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def _write_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = table(read_corpus(), read_runs())
    PAGE.write_text(with_table(page, rows, BEGIN, END), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="writes what the corpus lacks")
    parser.add_argument("--missing", action="store_true", help="lists what each class lacks")
    parser.add_argument(
        "--table", action="store_true", help="writes the table of docs/exactness.md"
    )
    parser.add_argument("--ran-on", metavar="MACHINE", help="writes down that all cases ran here")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--arithmetic", default="portable", choices=("portable", "fast"))
    options = parser.parse_args()
    if options.ran_on and options.only:
        parser.error("--ran-on is of all cases; leave out --only")
    return options


def main() -> int:
    """Returns the exit status: 1 if a comparison found a difference."""
    options = _arguments()
    cases = [case for case in all_cases() if options.only in case.name]
    corpus = read_corpus() if FILE.exists() else Corpus(revision=ARITHMETIC_REVISION, classes={})
    if options.missing:
        print(missing_text(corpus))
        return 0
    if options.table:
        _write_table()
        return 0
    if options.record:
        recorded = record(corpus, cases, options.arithmetic)
        _write_json(FILE, recorded)
        print(f"recorded {len(cases)} cases of revision {recorded.revision}")
        print(missing_text(recorded))
        return 0
    differences = compare(corpus, cases, options.arithmetic)
    print("\n".join([*differences, f"{len(cases)} cases compared, {len(differences)} differ"]))
    if options.ran_on and not differences:
        _write_json(RUNS, with_run(read_runs(), options.ran_on, options.arithmetic))
        _write_table()
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
