"""Runs a Jupyter notebook without Jupyter, and stores what its cells print and draw.

    python -m tools.run_notebook docs/notebooks/batching.ipynb

Owns the form of the outputs: printed text, and each figure as a PNG. Knows no expression at a
cell's end: cells print. Invariant: all cells run in one process, in their order, and a failure of
one fails the run.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 600.0
MARK = "--- end of cell ---"
END_OF_CELL = f"""
_keep_figures({{number}})
print({MARK!r})
"""
BEFORE = """
import warnings
warnings.simplefilter("error")
import matplotlib
matplotlib.use("Agg")
def _keep_figures(number):
    from matplotlib import pyplot
    for place in pyplot.get_fignums():
        pyplot.figure(place).savefig(f"{number}-{place}.png", dpi=80)
    pyplot.close("all")
"""

Cell = dict[str, Any]


def main(arguments: list[str]) -> int:
    for name in arguments:
        path = Path(name)
        notebook = json.loads(path.read_text(encoding="utf-8"))
        run(notebook)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(name)
    return 0


def run(notebook: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
    """Replaces the outputs of the code cells. Raises CalledProcessError, with what was printed."""
    cells: list[Cell] = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    parts = [BEFORE]
    for number, cell in enumerate(cells):
        parts += ["".join(cell["source"]), END_OF_CELL.format(number=number)]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "notebook.py"
        script.write_text("\n".join(parts), encoding="utf-8")
        ran = subprocess.run(
            [sys.executable, script.name],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        printed = ran.stdout.split(f"{MARK}\n")
        for number, cell in enumerate(cells):
            figures = sorted(Path(folder).glob(f"{number}-*.png"))
            cell["execution_count"] = number + 1
            cell["outputs"] = outputs_of(printed[number], figures)


def outputs_of(text: str, figures: list[Path]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if text:
        lines = text.splitlines(keepends=True)
        found.append({"output_type": "stream", "name": "stdout", "text": lines})
    for figure in figures:
        data = {"image/png": base64.b64encode(figure.read_bytes()).decode()}
        found.append({"output_type": "display_data", "data": data, "metadata": {}})
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
