"""How tests/gpu/run.sh comes to a library, with a scripted nvidia-smi and nvcc: compiled for the
card at hand alone, from where a build was left, or the one that is there."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gpu.kernels import CSRC, ROOT, find_cards, progress, provide, provide_faults
from tests.tools.test_cuda_library import group

SOURCES = sorted(each.name for each in CSRC.glob("cuda/*.cu"))

NVCC = """#!/bin/sh
# Compiles what FAILS does not name, and links by copying a library.
for word in "$@"; do case $word in *.cu) source=${word##*/} ;; esac; done
while [ "$1" != -o ]; do flags="$flags $1"; shift; done
case " $flags $* " in *" -shared "*) source=link ;; esac
[ "$source" = "$(cat FOLDER/fails)" ] && { echo "$source: out of memory"; exit 1; }
echo "$source$flags" >>FOLDER/compiled
while [ "$1" != -o ]; do shift; done
cp FOLDER/made "$2"
"""


@dataclass(frozen=True, slots=True)
class Machine:
    folder: Path

    @property
    def library(self) -> Path:
        return self.folder / "_cuda.so"

    def script(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)

    def has_cards(self, *capabilities: str) -> None:
        self.script(
            "nvidia-smi",
            "#!/bin/sh\n" + "".join(f"echo NVIDIA L{i}, {c}\n" for i, c in enumerate(capabilities)),
        )

    def cannot_compile(self, source: str) -> None:
        (self.folder / "fails").write_text(source)

    def compiled(self) -> list[str]:
        path = self.folder / "compiled"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def faulty(self) -> Path:
        return self.folder / "faults" / "_cuda.so"

    def provide(self, **environment: str) -> dict[str, object]:
        return provide(self.folder / "out", self.library, environment)

    def provide_faults(self, limit_s: float = 60, **environment: str) -> str:
        out = self.folder / "out"
        return provide_faults(out, self.faulty, ("sm_90",), environment, limit_s)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    machine.script("nvcc", NVCC.replace("FOLDER", str(tmp_path)))
    machine.has_cards("9.0")
    machine.cannot_compile("")
    (tmp_path / "made").write_bytes(group((2, 90)))
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CADENZA_BUILD_ISAS", "scalar")
    monkeypatch.delenv("NVCC", raising=False)
    return machine


def test_a_build_is_for_the_card_at_hand_and_goes_on_where_it_was_left(machine: Machine) -> None:
    machine.cannot_compile("sampling.cu")
    with pytest.raises(SystemExit, match=r"were not built; \d+ of \d+ files compiled") as stopped:
        machine.provide()
    assert "sampling.cu: out of memory" in str(stopped.value)
    first = machine.compiled()
    assert not machine.library.exists()
    assert progress(machine.folder / "out") == f"{len(first)} of {len(SOURCES)} files compiled"
    machine.cannot_compile("")
    assert machine.provide() == {
        "device": "NVIDIA L0",
        "targets": ("sm_90",),
        "library": "compiled",
    }
    every = machine.compiled()
    assert sorted(line.split()[0] for line in every) == sorted([*SOURCES, "link"])
    for line in every:
        assert [each for each in line.split() if "gencode" in each] == [
            "-gencode=arch=compute_90,code=sm_90"
        ]
    assert machine.library.read_bytes() == group((2, 90))
    assert machine.provide()["library"] == "was there"
    assert machine.compiled() == every


def test_a_library_for_other_cards_or_older_than_its_sources_is_compiled_anew(
    machine: Machine,
) -> None:
    machine.library.write_bytes(group((2, 80), (2, 90)))
    assert machine.provide()["library"] == "was there"
    machine.has_cards("8.9")
    assert machine.provide()["library"] == "was there"
    os.utime(machine.library, (1, 1))
    assert machine.provide()["library"] == "compiled"
    assert "code=sm_89" in machine.compiled()[-1]
    machine.has_cards("8.0")
    (machine.folder / "made").write_bytes(group((2, 80)))
    machine.library.write_bytes(group((2, 89), (1, 80)))
    assert machine.provide()["library"] == "compiled"


def test_a_library_that_is_named_is_taken_if_it_has_code_for_the_card(machine: Machine) -> None:
    named = machine.folder / "elsewhere.so"
    with pytest.raises(SystemExit, match=r"there is no such file; `make -C csrc cuda`"):
        machine.provide(CADENZA_GPU_LIBRARY=str(named))
    named.write_bytes(group((2, 80), (1, 90)))
    with pytest.raises(SystemExit, match=r"no code for sm_90; make one by .* CUDA_ARCHS=90"):
        machine.provide(CADENZA_GPU_LIBRARY=str(named))
    named.write_bytes(group((2, 80), (2, 90)))
    os.utime(named, (1, 1))
    assert machine.provide(CADENZA_GPU_LIBRARY=str(named))["targets"] == ("sm_90",)
    assert machine.library.read_bytes() == named.read_bytes()
    assert machine.compiled() == []


def test_the_library_with_faults_is_compiled_or_taken_and_nothing_ends_without_it(
    machine: Machine,
) -> None:
    found = machine.provide_faults(CADENZA_GPU_FAULTS_LIBRARY="absent.so")
    assert found.startswith("not there: CADENZA_GPU_FAULTS_LIBRARY=absent.so: there is no such")
    machine.cannot_compile("sampling.cu")
    assert "not there: the kernels were not built" in machine.provide_faults()
    assert not machine.faulty.exists()
    machine.cannot_compile("")
    assert machine.provide_faults() == "compiled"
    assert all("-DCADENZA_FAULTS" in line for line in machine.compiled() if ".cu" in line)
    assert machine.provide_faults() == "was there"
    named = machine.folder / "elsewhere.so"
    named.write_bytes(group((2, 80), (2, 90)))
    told = machine.provide_faults(CADENZA_GPU_FAULTS_LIBRARY=str(named))
    assert told == f"CADENZA_GPU_FAULTS_LIBRARY={named}"
    assert machine.faulty.read_bytes() == named.read_bytes()


def test_a_compiler_of_faults_that_takes_too_long_is_ended(machine: Machine) -> None:
    machine.script("nvcc", "#!/bin/sh\nsleep 60\n")
    began = time.monotonic()
    told = machine.provide_faults(1)
    assert told == "not there: not compiled within 1 s; another run goes on"
    assert time.monotonic() < began + 30


def test_a_machine_without_a_fit_card_is_told_so(machine: Machine) -> None:
    machine.has_cards("7.5", "12.0", "12.0", "8.6")
    cards = find_cards()
    assert (cards.name, cards.targets) == ("NVIDIA L1", ("sm_86", "sm_120"))
    machine.has_cards("7.5")
    with pytest.raises(
        SystemExit, match=r"NVIDIA L0 has compute capability 7\.5; the kernels need 8\.0"
    ):
        machine.provide()
    machine.has_cards("[N/A]")
    with pytest.raises(
        SystemExit, match=r"names no compute capability; it says: NVIDIA L0, \[N/A\]"
    ):
        machine.provide()


def test_the_script_leaves_its_report_where_there_is_no_card(machine: Machine) -> None:
    machine.script("nvidia-smi", "#!/bin/sh\necho no devices were found\nexit 6\n")
    out = machine.folder / "found"
    ran = subprocess.run(
        (ROOT / "tests" / "gpu" / "run.sh", out),
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    report = (out / "report.md").read_text()
    assert (ran.returncode, ran.stderr) == (1, "")
    assert report in ran.stdout
    assert report.startswith("# 0 of 18 steps passed\n")
    assert "| kernels | failed, exit 1 | 0 of " in report
    assert "| proof | skipped: the kernels are not there |" in report
    assert "no devices were found" in (out / "report.json").read_text()


def test_the_script_keeps_the_folders_of_packages(machine: Machine) -> None:
    machine.script("python", '#!/bin/sh\necho "$PYTHONPATH"\n')
    environment = {**os.environ, "PYTHON": "python", "PYTHONPATH": "/packages"}
    ran = subprocess.run(
        (ROOT / "tests" / "gpu" / "run.sh", machine.folder),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == f"{ROOT}/src:{ROOT}/benchmarks:{ROOT}:/packages\n"


def test_the_step_at_hand_ends_with_the_script(machine: Machine) -> None:
    held = machine.folder / "held"
    os.mkfifo(held)
    machine.script("nvidia-smi", f"#!/bin/sh\nexec 3>{held}\necho asked >&3\nsleep 60\n")
    began = time.monotonic()
    script = (ROOT / "tests" / "gpu" / "run.sh", machine.folder / "found")
    with subprocess.Popen(script, env={**os.environ, "PYTHON": sys.executable}) as running:
        with held.open() as lines:  # open for as long as a process of the step lives
            assert lines.readline() == "asked\n"
            running.terminate()
            assert lines.read() == ""
        assert running.wait(timeout=30) == 143
    assert time.monotonic() < began + 50
