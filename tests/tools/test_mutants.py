"""`tools/mutants.py` on a toy tree: each verdict."""

import io
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tools import mutants
from tools.mutants import Mutant, MutantsError, Outcome, RunOptions, SuiteRun, Verdict, VerdictFile

pytestmark = pytest.mark.gates


SOURCE = "src/cadenza/__init__.py"
SOUND = 'def half(number: int) -> int:\n    """Rounded down."""\n    return number // 2\n'
TESTS = """import cadenza


def test_an_even_number():
    assert cadenza.half(4) == 2


def test_a_small_number():
    assert cadenza.half(1) == 0
"""


def patch_of(before: str, after: str) -> str:
    return (
        f"What this breaks.\n\n--- a/{SOURCE}\n+++ b/{SOURCE}\n@@ -2,2 +2,2 @@\n"
        f'     """Rounded down."""\n-    return {before}\n+    return {after}\n'
    )


def make_tree(root: Path) -> Path:
    """A package of one function with two tests, and no mutant yet."""
    for name, text in {
        SOURCE: SOUND,
        "tests/test_half.py": TESTS,
        "tests/mutants/mutants.toml": "",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="module", autouse=True)
def no_plugins() -> Iterator[None]:
    """Of pytest, in the toy trees: their import takes longer than everything else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        yield


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path)


def add(tree: Path, name: str, patch: str, **fields: object) -> None:
    """Commits a mutant to the toy tree."""
    entry = {"breaks": "halving", "suites": ["tests/test_half.py"]} | fields
    lines = [f"{key} = {value!r}".replace("True", "true") for key, value in entry.items()]
    with (tree / "tests/mutants/mutants.toml").open("a", encoding="utf-8") as table:
        table.write(f"[{name}]\n" + "\n".join(lines) + "\n")
    (tree / f"tests/mutants/{name}.patch").write_text(patch, encoding="utf-8")


def printed(tree: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = mutants.main(arguments, tree)
    return code, capsys.readouterr().out


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """One run of a mutant of each kind, but for those that hang."""
    tree = make_tree(tmp_path_factory.mktemp("tree"))
    add(tree, "caught", patch_of("number // 2", "-(-number // 2)"))
    add(tree, "survives", patch_of("number // 2", "min(number // 2, 1000)"))
    add(tree, "equivalent", patch_of("number // 2", "number >> 1"), equivalent="the same")
    add(tree, "no-python", patch_of("number // 2", "number //"))
    output = io.StringIO()
    ran = mutants.run_all(tree, mutants.load_mutants(tree), console=Console(file=output))
    assert (tree / SOURCE).read_text(encoding="utf-8") == SOUND
    assert "SURVIVED: survives" in output.getvalue()
    return {outcome.mutant.name: outcome for outcome in ran}


def test_a_fault_that_a_test_sees_is_caught_by_that_test(outcomes: dict[str, Outcome]):
    outcome = outcomes["caught"]
    assert outcome.verdict is Verdict.CAUGHT
    assert outcome.detail == "tests/test_half.py::test_a_small_number"


def test_a_fault_that_no_test_sees_survives(outcomes: dict[str, Outcome]):
    assert outcomes["survives"].verdict is Verdict.SURVIVED
    assert outcomes["survives"].verdict.is_fault


def test_an_equivalent_mutant_survives_and_one_that_is_caught_was_argued_wrongly(
    outcomes: dict[str, Outcome],
):
    assert outcomes["equivalent"].verdict is Verdict.EQUIVALENT
    assert not outcomes["equivalent"].verdict.is_fault
    failed = SuiteRun(returncode=1, output="FAILED tests/a.py::test_a - assert False\n")
    verdict, detail = mutants.judge(outcomes["equivalent"].mutant, failed)
    assert verdict is Verdict.BROKEN
    assert detail == "declared equivalent, but caught by tests/a.py::test_a"


def test_tests_that_do_not_start_are_no_catch(outcomes: dict[str, Outcome]):
    assert outcomes["no-python"].verdict is Verdict.BROKEN
    assert "SyntaxError" in outcomes["no-python"].detail


def test_the_report_names_what_caught_each_mutant_and_what_is_at_fault(
    outcomes: dict[str, Outcome],
):
    output = io.StringIO()
    by_path = replace(outcomes["caught"], detail="tests/test_http.py::test_a_path[/v1/x-0]")
    mutants.report([*outcomes.values(), by_path], Console(file=output, width=200))
    assert "tests/test_half.py::test_a_small_number" in output.getvalue()
    assert "test_a_path[/v1/x-0]" in output.getvalue(), "an id is no markup"
    assert "SURVIVED: survives\nevery named test passed" in output.getvalue()


def test_a_mutant_without_which_tests_fail_is_not_tried(
    tree: Path, capsys: pytest.CaptureFixture[str]
):
    (tree / SOURCE).write_text(SOUND.replace("// 2", "// 3"), encoding="utf-8")
    add(tree, "rounds-up", patch_of("number // 3", "-(-number // 3)"))
    code, output = printed(tree, capsys)
    assert code == 2
    assert "the tests fail without any mutant" in output


def test_a_run_that_was_interrupted_goes_on_at_the_same_commit(tree: Path):
    add(tree, "caught", patch_of("number // 2", "-(-number // 2)"))
    add(tree, "survives", patch_of("number // 2", "min(number // 2, 1000)"))
    both = mutants.load_mutants(tree)
    path = tree / "build" / "verdicts.jsonl"
    kept = VerdictFile(path=path, commit="a" * 40)
    first = Outcome(mutant=both[0], verdict=Verdict.CAUGHT, detail="by itself", seconds=1.0)
    kept.add_outcome(first)
    kept.add_outcome(
        Outcome(mutant=both[1], verdict=Verdict.TIMED_OUT, detail="tried again", seconds=1.0)
    )
    with path.open("a", encoding="utf-8") as file:
        file.write('{"commit": "a line that a kill has cut')
    ran = mutants.run_all(
        tree, both, console=Console(file=io.StringIO()), options=RunOptions(kept=kept)
    )
    assert ran[0] == first
    assert ran[1].verdict is Verdict.SURVIVED
    assert kept.sound_suites() == {"tests/test_half.py"}
    assert VerdictFile(path=path, commit="b" * 40).outcomes(both) == {}


def test_verdicts_are_kept_of_what_is_committed_only(tree: Path):
    with pytest.raises(MutantsError, match="needs a git checkout"):
        mutants.verdict_file(tree / "verdicts", tree)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tree, *name, *command], check=True)
    assert len(mutants.verdict_file(tree / "verdicts", tree).commit) == 40
    (tree / "new").write_text("")
    with pytest.raises(MutantsError, match=r"commit or stash these:\n.*new"):
        mutants.verdict_file(tree / "verdicts", tree)


def test_a_hang_is_a_catch_only_where_it_is_said_to_be(
    tree: Path, capsys: pytest.CaptureFixture[str]
):
    add(tree, "endless", patch_of("number // 2", "__import__('threading').Event().wait()"))
    code, output = printed(tree, capsys, "--timeout", "10")
    assert code == 1
    assert "TIMED OUT: endless" in output
    hang = SuiteRun(returncode=None, output="")
    mutant = Mutant(name="a", breaks="b", suites=("c",), edits=(), may_hang=True)
    assert mutants.judge(mutant, hang)[0] is Verdict.CAUGHT


@pytest.mark.parametrize(
    ("returncode", "output"),
    [(1, "1 error\n"), (2, "ERROR tests/a.py - SyntaxError\n"), (5, ""), (-11, "FAILED a::b\n")],
    ids=["nothing named", "not collected", "no tests", "killed"],
)
def test_a_run_that_names_no_failed_test_is_broken(returncode: int, output: str):
    mutant = Mutant(name="a", breaks="b", suites=("c",), edits=())
    verdict, _ = mutants.judge(mutant, SuiteRun(returncode=returncode, output=output))
    assert verdict is Verdict.BROKEN


@pytest.mark.parametrize(
    ("source", "times"), [("# nothing of it\n", 0), (SOUND + "\n\n" + SOUND, 2)]
)
def test_a_patch_whose_lines_are_not_there_once_does_not_apply(
    tree: Path, capsys: pytest.CaptureFixture[str], source: str, times: int
):
    add(tree, "rounds-up", patch_of("number // 2", "-(-number // 2)"))
    (tree / SOURCE).write_text(source, encoding="utf-8")
    code, output = printed(tree, capsys)
    assert code == 2
    assert "rounds-up: the patch does not apply" in output
    assert f"{times} times" in output


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"suite": "tests/test_half.py"}, "unknown field suite"),
        ({"suites": ["tests/test_third.py"]}, "tests/test_third.py: no such test file"),
        ({"suites": []}, "no such test file"),
    ],
)
def test_an_entry_with_a_mistake_is_refused(tree: Path, fields: dict[str, object], reason: str):
    add(tree, "rounds-up", patch_of("number // 2", "-(-number // 2)"), **fields)
    with pytest.raises(MutantsError, match=reason):
        mutants.load_mutants(tree)


def test_patches_and_entries_belong_together(tree: Path):
    patch = tree / "tests/mutants/stray.patch"
    patch.write_text(patch_of("1", "2"), encoding="utf-8")
    with pytest.raises(MutantsError, match="stray: a patch without an entry"):
        mutants.load_mutants(tree)
    patch.rename(tree / "tests/mutants/other.patch.old")
    add(tree, "rounds-up", patch_of("1", "2"))
    (tree / "tests/mutants/rounds-up.patch").unlink()
    with pytest.raises(MutantsError, match=r"rounds-up\.patch is missing"):
        mutants.load_mutants(tree)


@pytest.mark.parametrize("text", ["", "words\n", patch_of("1", "1"), "+++ b/a\n@@ @@\n*x\n"])
def test_a_patch_that_is_none_is_refused(text: str):
    with pytest.raises(MutantsError):
        mutants.parse_patch(text)
