"""docs/python.md: its examples run in their order, and print what their comments say."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
TIMEOUT_S = 120.0
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)


def test_every_example_of_the_page_prints_what_it_says(tmp_path: Path):
    program = "\n".join(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    expected = PRINTED.findall(program)
    assert len(expected) == program.count("print("), "each print says what it prints"
    file = tmp_path / "examples.py"
    file.write_text(program, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(file)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert [line.strip() for line in ran.stdout.splitlines()] == expected
    assert ran.stderr == ""
