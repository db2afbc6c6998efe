"""Mutation testing: applies each committed fault to a copy of the tree and runs its tests.

Owns the table of `tests/mutants/mutants.toml`, the strict application of its patches, and the
verdicts. Invariants: the working tree is never changed; a mutant counts as caught only by a failing
test that passes without the mutant; patches that do not apply, failed builds and tests that do not
start are errors of the run and never count as caught.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from threading import Lock
from typing import Any, cast

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("tests") / "mutants"
TABLE_NAME = "mutants.toml"
OBJECTS = Path("csrc") / "build" / "native" / "csrc"
TIMEOUT_S = 600.0

NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", "*.egg-info", ".hypothesis", ".*_cache", "dist"
)
_BASES = {"isa/amx.o": ("isa/avx512.o",)}
FIELDS = frozenset({"breaks", "suites", "objects", "equivalent", "may_hang"})
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::\S.*?)(?: - .*)?$", re.MULTILINE)


class MutantsError(Exception):
    """The table, a patch or a build is invalid; the message names it and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One hunk: complete lines of a file and their replacement."""

    path: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A small fault and the tests that must catch it.

    `suites` are test files or node ids, the fastest first. `objects` are the object files below
    csrc/build/native/csrc to compile again; `{isa}`, `{portable_isa}` and `{integer_isa}` are
    replaced by the ISAs in use. `equivalent` explains why a mutant changes nothing that can be
    observed; it must survive. With `may_hang` a run that times out counts as caught.
    """

    name: str
    breaks: str
    suites: tuple[str, ...]
    edits: tuple[Edit, ...]
    objects: tuple[str, ...] = ()
    equivalent: str | None = None
    may_hang: bool = False


class Verdict(Enum):
    """The result of a mutant's tests; `is_fault` if it is not the expected one."""

    CAUGHT = "caught"
    EQUIVALENT = "equivalent"
    SURVIVED = "SURVIVED"
    TIMED_OUT = "TIMED OUT"
    BROKEN = "BROKEN"

    @property
    def is_fault(self) -> bool:
        return self not in {Verdict.CAUGHT, Verdict.EQUIVALENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A mutant's verdict; `detail` is the test that caught it, or the error."""

    mutant: Mutant
    verdict: Verdict
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRun:
    """The end of a subprocess; `returncode` is None if it timed out."""

    returncode: int | None
    output: str

    @property
    def tail(self) -> str:
        return "\n".join(self.output.strip().splitlines()[-15:])


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictFile:
    """What was found at one commit, as lines of JSON: an interrupted run goes on from there.

    Runs of other commits may stand in the same file. Errors of a run are not kept.
    """

    path: Path
    commit: str
    _adding: Lock = field(default_factory=Lock)

    def outcomes(self, mutants: Iterable[Mutant]) -> dict[str, Outcome]:
        by_name = {mutant.name: mutant for mutant in mutants}
        return {
            name: Outcome(
                mutant=by_name[name],
                verdict=Verdict[line["verdict"]],
                detail=line["detail"],
                seconds=line["seconds"],
            )
            for line in self._lines()
            if (name := line.get("mutant")) in by_name
        }

    def sound_suites(self) -> set[str]:
        """Those that passed without a mutant."""
        return {suite for line in self._lines() for suite in line.get("sound", ())}

    def add_outcome(self, outcome: Outcome) -> None:
        if outcome.verdict not in {Verdict.BROKEN, Verdict.TIMED_OUT}:
            self._add(
                mutant=outcome.mutant.name,
                verdict=outcome.verdict.name,
                detail=outcome.detail,
                seconds=round(outcome.seconds, 1),
            )

    def add_sound(self, suites: Iterable[str]) -> None:
        self._add(sound=list(suites))

    def _lines(self) -> list[dict[str, Any]]:
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        lines = [cast(dict[str, Any], json.loads(line)) for line in _whole_lines(text).splitlines()]
        return [line for line in lines if line["commit"] == self.commit]

    def _add(self, **found: object) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"commit": self.commit, **found})
        with self._adding:
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            self.path.write_text(f"{_whole_lines(text)}{line}\n", encoding="utf-8")


def _whole_lines(text: str) -> str:
    """Without a last line that was cut by a kill."""
    return text[: text.rfind("\n") + 1]


def verdict_file(path: Path, root: Path) -> VerdictFile:
    """The file for the commit of `root`. Raises MutantsError where `root` has other changes."""
    try:
        status = _git(root, "status", "--porcelain")
        commit = _git(root, "rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError) as error:
        raise MutantsError(f"--resume needs a git checkout: {error}") from None
    if status:
        raise MutantsError("--resume keeps verdicts by commit; commit or stash these:\n" + status)
    return VerdictFile(path=path, commit=commit)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# --- the table and its patches --------------------------------------------------------------------


def load_mutants(root: Path) -> list[Mutant]:
    """Every mutant of `root`, in the order of the table.

    Raises:
        MutantsError: an entry has an unknown field, a missing test file or no patch, or a patch has
            no entry.
    """
    folder = root / FOLDER
    table = cast(
        dict[str, dict[str, object]],
        tomllib.loads((folder / TABLE_NAME).read_text(encoding="utf-8")),
    )
    strays = sorted({path.stem for path in folder.glob("*.patch")} - set(table))
    if strays:
        raise MutantsError(f"{', '.join(strays)}: a patch without an entry in {TABLE_NAME}")
    return [_read_mutant(root, name, entry) for name, entry in table.items()]


def _read_mutant(root: Path, name: str, entry: dict[str, object]) -> Mutant:
    unknown = sorted(set(entry) - FIELDS)
    if unknown:
        raise MutantsError(f"{name}: unknown field {', '.join(unknown)}; allowed: {sorted(FIELDS)}")
    suites = tuple(cast(list[str], entry.get("suites", [])))
    missing = [suite for suite in suites if not (root / suite.partition("::")[0]).is_file()]
    if missing or not suites:
        raise MutantsError(f"{name}: {', '.join(missing) or 'suites'}: no such test file")
    patch = root / FOLDER / f"{name}.patch"
    if not patch.is_file():
        raise MutantsError(f"{name}: {patch.relative_to(root)} is missing")
    return Mutant(
        name=name,
        breaks=cast(str, entry["breaks"]),
        suites=suites,
        edits=parse_patch(patch.read_text(encoding="utf-8")),
        objects=tuple(cast(list[str], entry.get("objects", []))),
        equivalent=cast(str | None, entry.get("equivalent")),
        may_hang=bool(entry.get("may_hang", False)),
    )


def parse_patch(text: str) -> tuple[Edit, ...]:
    """The hunks of a unified diff. Raises MutantsError if it has none or is malformed."""
    edits: list[Edit] = []
    path, before, after = "", list[str](), list[str]()

    def end_hunk() -> None:
        if before != after:
            edits.append(Edit(path=path, before="".join(before), after="".join(after)))
        before.clear()
        after.clear()

    for line in text.splitlines(keepends=True):
        if line.startswith(("--- ", "diff --git", "index ")):
            end_hunk()
        elif line.startswith("+++ "):
            path = line[4:].strip().removeprefix("b/")
        elif line.startswith("@@"):
            end_hunk()
        elif path and line[:1] in {" ", "-", "+", "\n"}:
            content = line if line == "\n" else line[1:]
            before += [] if line[0] == "+" else [content]
            after += [] if line[0] == "-" else [content]
        elif path:
            raise MutantsError(f"{line.strip()!r} is not a line of a unified diff")
    end_hunk()
    if not edits:
        raise MutantsError("the patch changes nothing")
    return tuple(edits)


def apply_edits(tree: Path, edits: Iterable[Edit]) -> None:
    """Changes the files below `tree`, but not their modification times, so make rebuilds nothing.

    Raises:
        MutantsError: a file lacks the lines that a hunk replaces, or has them more than once.
    """
    for edit in edits:
        path = tree / edit.path
        if not path.is_file():
            raise MutantsError(f"{edit.path} does not exist")
        text = "\n" + path.read_text(encoding="utf-8")
        count = text.count("\n" + edit.before)
        if count != 1:
            first = next((line for line in edit.before.splitlines() if line.strip()), "")
            raise MutantsError(
                f"the patch does not apply: {edit.path} contains the lines from {first.strip()!r} "
                f"on {count} times; they must occur once"
            )
        changed = text.replace("\n" + edit.before, "\n" + edit.after)
        stat = path.stat()
        path.write_text(changed[1:], encoding="utf-8")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


# --- trees and runs -------------------------------------------------------------------------------


@contextmanager
def copy_of(root: Path) -> Generator[Path]:
    """A temporary copy of a tree, including build products and modification times."""
    with tempfile.TemporaryDirectory(prefix="cadenza-mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(root, tree, ignore=NOT_COPIED, symlinks=True)
        yield tree


def environment(tree: Path) -> dict[str, str]:
    """Environment variables with which `import cadenza` finds the package of `tree`."""
    paths = os.pathsep.join(str(tree / each) for each in ("src", "benchmarks"))
    return os.environ | {"PYTHONPATH": paths, "CADENZA_REQUIRE_NATIVE": "1"}


def run(tree: Path, command: Sequence[str], timeout_s: float) -> SuiteRun:
    """Runs a command in a tree; on a timeout kills its process group."""
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return SuiteRun(returncode=None, output=output)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return SuiteRun(returncode=process.returncode, output=output)


def run_tests(tree: Path, suites: Iterable[str], timeout_s: float) -> SuiteRun:
    """Runs test files and node ids in a tree, stopping at the first failure."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
    return run(tree, [*pytest, *suites], timeout_s)


def check_import(tree: Path) -> None:
    """Raises MutantsError unless tests in `tree` import the package from there."""
    where = run(tree, [sys.executable, "-c", "import cadenza; print(cadenza.__file__)"], 60.0)
    expected = tree / "src" / "cadenza" / "__init__.py"
    if where.output.strip() != str(expected):
        raise MutantsError(f"cadenza is imported from {where.output.strip()}, not {expected}")


def with_bases(objects: Iterable[str]) -> tuple[str, ...]:
    """The objects, and those from which one of them takes what it does not compute itself."""
    return tuple(dict.fromkeys(each for name in objects for each in (name, *_BASES.get(name, ()))))


def build_native(tree: Path, objects: Iterable[str]) -> None:
    """Recompiles the named objects and links the library. Raises MutantsError."""
    for name in with_bases(objects):
        path = tree / OBJECTS / name
        if not path.is_file():
            raise MutantsError(f"{path.relative_to(tree)} is not an object of the library")
        path.unlink()
    make = ["make", "-C", "csrc", "library", f"PYTHON={sys.executable}"]
    made = run(tree, make, timeout_s=3600.0)
    if made.returncode:
        raise MutantsError(f"the native library does not build:\n{made.tail}")


def isas_in_use(tree: Path) -> dict[str, str]:
    """The ISAs whose kernels this machine runs, by the names that `Mutant.objects` has for them."""
    code = (
        "from cadenza.backends.xla.ops.native_library import load_native_library as load\n"
        "print(load().cpu_isa, load().portable_isa, load().cpu_integer_isa)"
    )
    found = run(tree, [sys.executable, "-c", code], 120.0).output.split()
    return dict(zip(("isa", "portable_isa", "integer_isa"), found, strict=True))


# --- verdicts -------------------------------------------------------------------------------------


def judge(mutant: Mutant, tests: SuiteRun) -> tuple[Verdict, str]:
    """The verdict of a mutant from its test run, with the detail."""
    if tests.returncode is None:
        verdict = Verdict.CAUGHT if mutant.may_hang else Verdict.TIMED_OUT
        return verdict, "a hang, as expected" if mutant.may_hang else tests.tail
    if tests.returncode == 0:
        if mutant.equivalent is not None:
            return Verdict.EQUIVALENT, mutant.equivalent
        return Verdict.SURVIVED, "every named test passed"
    failed = _FAILED.search(tests.output)
    if tests.returncode != 1 or failed is None:
        return Verdict.BROKEN, f"pytest ended with {tests.returncode}:\n{tests.tail}"
    if mutant.equivalent is not None:
        return Verdict.BROKEN, f"declared equivalent, but caught by {failed[1]}"
    return Verdict.CAUGHT, failed[1]


def try_mutant(base: Path, mutant: Mutant, *, isas: Mapping[str, str], timeout_s: float) -> Outcome:
    """Applies a mutant to a copy of `base` and runs its tests there."""
    start_s = time.monotonic()
    try:
        with copy_of(base) as tree:
            apply_edits(tree, mutant.edits)
            check_import(tree)
            if mutant.objects:
                build_native(tree, [name.format(**isas) for name in mutant.objects])
            verdict, detail = judge(mutant, run_tests(tree, mutant.suites, timeout_s))
    except MutantsError as error:
        verdict, detail = Verdict.BROKEN, str(error)
    seconds = time.monotonic() - start_s
    return Outcome(mutant=mutant, verdict=verdict, detail=detail, seconds=seconds)


def prepare(
    base: Path, mutants: Sequence[Mutant], timeout_s: float, kept: VerdictFile | None = None
) -> dict[str, str]:
    """Checks that every patch applies and that the tests pass without mutants; returns the ISAs.

    Raises:
        MutantsError: a patch does not apply, or a test fails.
    """
    for mutant in mutants:
        with copy_of_sources(base, mutant) as sources:
            try:
                apply_edits(sources, mutant.edits)
            except MutantsError as error:
                raise MutantsError(f"{mutant.name}: {error}") from error
    check_import(base)
    needs_build = any(mutant.objects for mutant in mutants)
    if needs_build:
        build_native(base, [])
    suites = dict.fromkeys(suite for mutant in mutants for suite in mutant.suites)
    sound = kept.sound_suites() if kept is not None else set[str]()
    left = [suite for suite in suites if suite not in sound]
    if left:
        tests = run_tests(base, left, timeout_s * max(1, len(mutants)))
        if tests.returncode != 0:
            raise MutantsError(f"the tests fail without any mutant:\n{tests.tail}")
        if kept is not None:
            kept.add_sound(left)
    return isas_in_use(base) if needs_build else {}


@contextmanager
def copy_of_sources(root: Path, mutant: Mutant) -> Generator[Path]:
    """A temporary folder with only the files that a mutant changes."""
    with tempfile.TemporaryDirectory(prefix="cadenza-mutants-") as folder:
        for name in {edit.path for edit in mutant.edits}:
            target = Path(folder) / name
            if (root / name).is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, target)
        yield Path(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How mutants are run; `kept` has verdicts and gets new ones, None tries every mutant."""

    jobs: int = 1
    timeout_s: float = TIMEOUT_S
    kept: VerdictFile | None = None


def run_all(
    root: Path,
    mutants: Sequence[Mutant],
    *,
    console: Console,
    options: RunOptions | None = None,
) -> list[Outcome]:
    """Runs the tests without mutants, then with each mutant; prints each verdict at once.

    Raises:
        MutantsError: a patch does not apply, or a test fails without any mutant.
    """
    options = options or RunOptions()
    kept = options.kept

    def try_one(mutant: Mutant) -> Outcome:
        outcome = try_mutant(base, mutant, isas=isas, timeout_s=options.timeout_s)
        line = f"{outcome.verdict.value}: {mutant.name} ({outcome.seconds:.0f} s)"
        console.print(line, markup=False, highlight=False)
        if kept is not None:
            kept.add_outcome(outcome)
        return outcome

    found = kept.outcomes(mutants) if kept is not None else dict[str, Outcome]()
    left = [mutant for mutant in mutants if mutant.name not in found]
    if found:
        console.print(f"{len(found)} verdicts of this commit are known, {len(left)} are left")
    if left:
        with copy_of(root) as base, ThreadPoolExecutor(options.jobs) as pool:
            console.print(f"running the tests of {len(left)} mutants without any of them …")
            isas = prepare(base, left, options.timeout_s, kept)
            found |= {outcome.mutant.name: outcome for outcome in pool.map(try_one, left)}
    return [found[mutant.name] for mutant in mutants]


def report(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints a table of all outcomes, then the details of the unexpected ones."""
    by_column = Column("by", overflow="fold")
    table = Table("mutant", "breaks", "verdict", by_column, "s", title="mutation run")
    for outcome in outcomes:
        by = "" if outcome.verdict.is_fault else outcome.detail
        seconds = f"{outcome.seconds:.0f}"
        mutant = outcome.mutant
        cells = (mutant.name, mutant.breaks, outcome.verdict.value, by, seconds)
        table.add_row(*map(escape, cells))
    console.print(table)
    for outcome in outcomes:
        if outcome.verdict.is_fault:
            console.print(f"{outcome.verdict.value}: {outcome.mutant.name}", style="bold red")
            console.print(outcome.detail, markup=False, highlight=False)


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Runs the named mutants, or all; returns 0 if every verdict is the expected one."""
    parser = argparse.ArgumentParser(prog="mutants", description="Run the mutation tests.")
    parser.add_argument("names", nargs="*", help="mutants to run; all without any")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for one's tests")
    parser.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=root / "build" / "mutants.jsonl",
        metavar="FILE",
        help="keep verdicts in FILE (default: build/mutants.jsonl), and go on from those of this "
        "commit",
    )
    parser.add_argument("--list", action="store_true", help="list the mutants and run none")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        known = {mutant.name: mutant for mutant in load_mutants(root)}
        unknown = sorted(set(options.names) - set(known))
        if unknown:
            raise MutantsError(f"{', '.join(unknown)}: no such mutant; --list shows all")
        chosen = [known[name] for name in options.names or known]
        if options.list:
            for mutant in chosen:
                console.print(f"{mutant.name}: {mutant.breaks}", markup=False, highlight=False)
            return 0
        kept = None if options.resume is None else verdict_file(options.resume, root)
        how = RunOptions(jobs=options.jobs, timeout_s=options.timeout, kept=kept)
        outcomes = run_all(root, chosen, console=console, options=how)
    except MutantsError as error:
        console.print(f"mutants: {error}", style="red", markup=False, highlight=False)
        return 2
    report(outcomes, console)
    return 1 if any(outcome.verdict.is_fault for outcome in outcomes) else 0


def _terminated(_number: int, _frame: object) -> None:
    sys.exit(128 + signal.SIGTERM)  # unwinds: removes the copies and kills running tests


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(main(sys.argv[1:]))
