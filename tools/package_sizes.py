"""Fails if a package of src/cadenza, or cadenza_bench, has more lines than its bound, or src more
docstrings. Raise a bound in the commit that needs more, and say there what the lines buy. A package
without a bound is a fault, and so is a bound without a package.
"""

import ast
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path("src/cadenza")
LABORATORY = Path("benchmarks/cadenza_bench")
ROOT = "(modules)"  # the modules that are in no package

MAX_LINES: Mapping[str, int] = {
    ROOT: 3_590,  # engines on many machines; images; sparse prefill; sampling declared once
    "backends": 14_940,  # kernels for GPUs: their table, packing, proof, memory; image towers
    "batch": 2_260,
    "bench": 2_920,  # throughput, roofline, loads on servers
    LABORATORY.name: 4_920,  # modes of batching, two servers compared, the simulator, charts
    "checkpoint": 7_600,  # folders, GGUF, stored formats
    "cli": 6_490,  # images of prompts; arguments of an application on Ray; sparse prefill
    "cluster": 1_770,  # replicas on several machines, shared by front ends, and their number
    "drafting": 620,
    "engine": 7_080,  # checks and costs of images
    "frontend": 4_290,  # images of prompts
    "kv": 2_400,
    "loading": 3_450,  # memory of images; what doctor finds of a machine
    "media": 1_350,
    "models": 5_640,
    "scheduler": 4_210,
    "server": 14_950,  # the page at /, images
    "text": 9_190,  # notations of the families of 2026
    "verification": 3_900,
    "vision": 1_230,  # processors of images
    "weights": 1_540,
}

MOST_PERCENT_DOCSTRINGS = 7.5  # of the lines of src/cadenza; lower it with them


def main(arguments: list[str]) -> int:
    """Counts the tree at `arguments[0]`, or here; 0 when every package is within its bound."""
    root = Path(*arguments[:1])
    counted = lines_of(root / PACKAGE)
    counted[LABORATORY.name] = sum(lines_of(root / LABORATORY).values())
    faults = find_faults(counted, MAX_LINES)
    percent = percent_docstrings(root / PACKAGE)
    if percent > MOST_PERCENT_DOCSTRINGS:
        faults.append(
            f"{percent:.2f} % of the lines are docstrings, more than {MOST_PERCENT_DOCSTRINGS}; "
            f"leave out what a name says"
        )
    for name, count in sorted(counted.items(), key=lambda each: -each[1]):
        print(f"package sizes: {name:<13} {count:6,} of {MAX_LINES.get(name, 0):6,} lines")
    for fault in faults:
        print(f"package sizes: {fault}", file=sys.stderr)
    print(
        f"package sizes: {sum(counted.values()):,} lines, {percent:.1f} % docstrings, "
        f"{len(faults)} at fault"
    )
    return 1 if faults else 0


def lines_of(package: Path) -> dict[str, int]:
    """Lines of Python by the name of the package below."""
    counted: dict[str, int] = {}
    for path in package.rglob("*.py"):
        first, *rest = path.relative_to(package).parts
        name = first if rest else ROOT
        counted[name] = counted.get(name, 0) + len(path.read_bytes().splitlines())
    return counted


def percent_docstrings(package: Path) -> float:
    """Of all lines below `package`; also those behind a field or a constant."""
    lines = docstrings = 0
    for path in package.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        lines += len(source.splitlines())
        docstrings += sum(
            (text.end_lineno or text.lineno) - text.lineno + 1
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            for text in node.body
            if isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        )
    return 100 * docstrings / max(1, lines)


def find_faults(counted: Mapping[str, int], bounds: Mapping[str, int]) -> list[str]:
    """A line for each fault, in the order of the packages."""
    faults = [f"{name} has no bound; give it one" for name in sorted({*counted} - {*bounds})]
    faults += [f"{name} is bounded, but absent" for name in sorted({*bounds} - {*counted})]
    return faults + [
        f"{name} has {counted[name]} lines, more than {bounds[name]}; make it smaller, or raise "
        f"its bound and say why"
        for name in sorted({*counted} & {*bounds})
        if counted[name] > bounds[name]
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
