"""The size gate measures what is there, and fails where it should."""

from pathlib import Path

import pytest

from tools import size_gate

pytestmark = pytest.mark.gates


def python_function(num_lines: int, *, indent: str = "") -> str:
    return f"{indent}def f():\n" + f"{indent}    pass\n" * (num_lines - 1)


def cpp_block(head: str, num_lines: int, *, end: str = "}") -> str:
    """A block of `num_lines` lines, its head's first and its closing line included."""
    num_statements = num_lines - head.count("\n") - 2
    return f"{head} {{\n" + "  step();\n" * num_statements + f"{end}\n"


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


WITHIN = [
    ("src/a.py", python_function(70)),
    ("src/a.py", "x = 1\n" * 500),
    ("tests/src/a.py", "x = 1\n" * 600),
    ("csrc/a.cc", cpp_block("void f(int x)", 70)),
    ("csrc/a.h", "int x;\n" * 600),
    ("csrc/a.cc", "namespace a {\n" + cpp_block("void f()", 70) * 3 + "}\n"),
    ("csrc/a.cc", "class A {\n" + "  int x();\n" * 100 + "};\n"),
    ("csrc/a.cc", "const int table[] = {\n" + "  1,\n" * 100 + "};\n"),
    ("csrc/a.cc", "enum class Kind {\n" + "  a,\n" * 100 + "};\n"),
]


def test_the_gate_passes_at_the_limits(tmp_path: Path):
    for at, (name, text) in enumerate(WITHIN):
        write(tmp_path / str(at), name, text)
        assert size_gate.main([str(tmp_path / str(at))]) == 0, (name, text)


ABOVE = [
    ("src/a.py", python_function(71)),
    ("setup.py", python_function(71)),
    ("tools/a.py", "async " + python_function(71)),
    ("tests/a.py", "class A:\n" + python_function(71, indent="    ")),
    ("src/cadenza/a.py", "x = 1\n" * 501),
    ("training/a.py", "x = 1\n" * 601),
    ("csrc/a.h", "int x;\n" * 601),
    ("csrc/a.cc", cpp_block("void f(int x)", 71)),
    ("csrc/a.cc", cpp_block("void f(int x,\n       int y) noexcept", 71)),
    ("csrc/a.cc", 'namespace a {\nextern "C" {\n' + cpp_block("void f()", 71) + "}\n}\n"),
    ("csrc/a.cc", "struct A {\n  int x;\n" + cpp_block("  int f() const", 71) + "};\n"),
    ("csrc/a.cc", "template <int N>\nstruct A {\n" + cpp_block("  A()", 71) + "};\n"),
    ("csrc/a.cc", "struct alignas(64) A {\n" + cpp_block("  int f()", 71) + "};\n"),
    ("csrc/a.cc", cpp_block("A::A(int x) : x_{x}, y_{0}", 71)),
    ("csrc/a.cc", cpp_block("struct A make(int x)", 71)),
    ("csrc/a.cc", cpp_block("template <typename T>\nT f(T x)", 71)),
    ("csrc/a.cc", cpp_block("auto f = [](int x)", 71, end="};")),
    ("csrc/a.cc", cpp_block("bool operator==(A a, A b)", 71)),
    ("csrc/a.cc", "#define M(x) \\\n" + "  x; \\\n" * 69 + "  x\n"),
]


def test_the_gate_fails_above_the_limits(tmp_path: Path):
    for at, (name, text) in enumerate(ABOVE):
        write(tmp_path / str(at), name, text)
        assert size_gate.main([str(tmp_path / str(at))]) == 1, (name, text)


@pytest.mark.parametrize(
    "inside",
    [
        '  f("}");\n',
        "  f('}');\n",
        "  // }\n",
        "  /* } */\n",
        '  f(R"x(})"}}})x");\n',
        "  int x = 1'000'000; // it's }\n",
        "  f(u8'}');\n",
    ],
)
def test_braces_in_text_and_comments_do_not_end_a_function(tmp_path: Path, inside: str):
    path = write(tmp_path, "csrc/a.cc", cpp_block(f"void f() {{\n{inside}  if (x)", 40) + "}\n")
    (function,) = [thing for thing in size_gate.measure(path) if thing.is_function]
    assert (function.name, function.line, function.num_lines) == ("f", 1, 41)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("src/a.py", "def f(:\n", "does not parse"),
        (
            "csrc/a.cc",
            "void f() {\n#if X\n  if (a) {\n#else\n  if (b) {\n#endif\n  }\n}\n",
            "balance",
        ),
        ("csrc/a.cc", "}\n", "balance"),
    ],
)
def test_what_cannot_be_measured_is_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, reason: str
):
    write(tmp_path, name, text)
    assert size_gate.main([str(tmp_path)]) == 1
    assert reason in capsys.readouterr().err


def test_the_gate_names_the_worst_five(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for num_lines in range(2, 10):
        write(tmp_path, f"src/a{num_lines}.py", python_function(num_lines))
    assert size_gate.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    functions = [line.split()[0] for line in lines if " f" in line and " of 70 " in line]
    assert functions == ["9", "8", "7", "6", "5"]


def test_the_gate_looks_at_this_repository():
    names = {path.name for path in size_gate.source_files(Path())}
    assert {"__init__.py", "size_gate.py", "test_size_gate.py"} <= names
