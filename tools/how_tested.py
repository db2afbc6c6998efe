"""Writes docs/how-tested.md: what Cadenza is tested by, in numbers that are counted here, and what
has never run.

    python -m tools.how_tested

Counts are of functions and files, by syntax trees; a parametrised function is one.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-tested.md"
TESTS = ROOT / "tests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Test functions of a directory: all, those that Hypothesis gives examples, those of `soak`."""

    functions: int
    drawn: int
    soak: int


def main() -> int:
    PAGE.write_text(write_page(), encoding="utf-8")
    return 0


TEMPLATE = """\
# How it is tested

Written by `python -m tools.how_tested`, at each release. `make test` runs before each landing;
`make soak`, `make oracle` and `make mutants` when what they guard is touched.

| directory of tests | question | functions | over drawn examples | in hours (`soak`) |
|---|---|---|---|---|
{kinds}

| beside them | how many |
|---|---|
| test functions in all; a parametrised one is counted once | {functions} |
| faults planted one by one, which the tests must catch (`make mutants`) | {mutants} |
| digests of streams in the golden corpus, by class of arithmetic | {digests} |
| runs of the corpus on record, each of one kind of machine | {runs} |
| files of tests of the C++ kernels (`csrc/tests`) | {kernels} |

## The promise itself

`cadenza verify` shows on your machine, with your model and flags, that each stream beside others
has the bits of that stream alone; `--self-test` plants faults and must find each of them.
[exactness.md](exactness.md) says what is compared, and what would break it.

## Against others

- Every family against transformers and torch, in float32 (`make oracle`).
- Tokenizers, templates and GGUF blocks against their own libraries.
- JSON Schemas by the JSON Schema Test Suite; the API by schemathesis, and by the clients of OpenAI,
  Anthropic, Ollama and others as their package indexes have them.

## What has never run

| machine | what computes |
|---|---|
{never}
"""


def write_page() -> str:
    rows = list(kinds())
    golden = json.loads((TESTS / "golden" / "bits.json").read_text(encoding="utf-8"))
    lines = [
        f"| {name} | {question} | {each.functions} | {each.drawn or ''} | {each.soak or ''} |"
        for name, question, each in rows
    ]
    return TEMPLATE.format(
        kinds="\n".join(lines),
        functions=f"{sum(each.functions for _, _, each in rows):,}",
        mutants=num_mutants(),
        digests=sum(len(each) for each in golden["classes"].values()),
        runs=num_runs(),
        kernels=len(kernel_tests()),
        never="\n".join(f"| {machine} | {what} |" for machine, what in never_ran()),
    )


def kinds() -> Iterator[tuple[str, str, Counted]]:
    """The rows of tests/README.md with what their directories hold."""
    for line in (TESTS / "README.md").read_text(encoding="utf-8").splitlines():
        found = re.match(r"\| (`.*?`) \| (.*) \|$", line)
        folders = re.findall(r"`([\w/]+)`", found[1]) if found else []
        folders = [each for each in folders if (TESTS / each).is_dir()]
        if found and folders:
            yield found[1], re.split(r"(?<=\?) ", found[2])[0], count(folders)


def count(folders: list[str]) -> Counted:
    functions = drawn = soak = 0
    for folder in folders:
        for path in sorted((TESTS / folder).rglob("test_*.py")):
            if folder == "engine" and "process" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    marks = " ".join(ast.unparse(each) for each in node.decorator_list)
                    functions += 1
                    drawn += "given(" in marks
                    soak += "soak" in marks
    return Counted(functions=functions, drawn=drawn, soak=soak)


def num_mutants() -> int:
    return len([*(TESTS / "mutants").glob("*.patch")])


def num_runs() -> int:
    runs = json.loads((TESTS / "golden" / "runs.json").read_text(encoding="utf-8"))
    return len(runs["runs"])


def kernel_tests() -> list[Path]:
    return sorted((ROOT / "csrc" / "tests").glob("*_test.cpp"))


def never_ran() -> Iterator[tuple[str, str]]:
    """The rows of docs/exactness.md, under "What ran where", of which nothing was run."""
    table = (
        (ROOT / "docs" / "exactness.md")
        .read_text(encoding="utf-8")
        .partition("## What ran where")[2]
    )
    for line in table.splitlines():
        cells = [each.strip() for each in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) >= 3 and re.search(r"\bnothing\b", cells[2]):
            yield cells[0], cells[1]


if __name__ == "__main__":
    sys.exit(main())
