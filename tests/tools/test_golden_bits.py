"""The table of what ran where, in docs/exactness.md."""

import msgspec

from cadenza.fingerprint import ARITHMETIC_REVISION
from tools.family_table import with_table
from tools.golden_bits import (
    BEGIN,
    END,
    GROUPS,
    PAGE,
    MachineRun,
    Runs,
    cases_of_class,
    read_corpus,
    read_runs,
    table,
)


def test_the_table_is_what_the_script_writes():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, table(read_corpus(), read_runs()), BEGIN, END) == page


def test_a_run_of_fewer_cases_and_what_no_machine_recorded_are_told():
    counts = dict.fromkeys(GROUPS, 1)
    run = MachineRun(
        machine="Zen 9",
        table="avx512",
        integers="avx512_vnni",
        arithmetic="portable",
        num_cases={**counts, "images": 0},
    )
    lines = table(read_corpus(), Runs(revision=ARITHMETIC_REVISION, runs=(run,))).splitlines()
    images = sum(case.group == "images" for case in cases_of_class("portable"))
    (told,) = [line for line in lines if "Zen 9" in line]
    assert told.startswith("| `avx512`, integers `avx512_vnni` | Zen 9 | 1 of ")
    assert f" 0 of {images} |" in told
    (portable,) = [line for line in lines if "**`portable`**" in line]
    assert f" all {images} |" in portable
    none = msgspec.structs.replace(read_corpus(), classes={})
    assert "| **`neon_bf16`** | recorded | 0 of " in table(none, Runs(revision=1))
