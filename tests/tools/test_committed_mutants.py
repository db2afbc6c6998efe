"""Every committed patch of a mutant still applies to the tree."""

from tools import mutants
from tools.mutants import ROOT, Mutant, MutantsError

COMMITTED = mutants.load_mutants(ROOT)


def fault_of(mutant: Mutant) -> str:
    """Why a patch cannot be tried; "" if nothing is amiss."""
    try:
        with mutants.copy_of_sources(ROOT, mutant) as sources:
            mutants.apply_edits(sources, mutant.edits)
            for name in {edit.path for edit in mutant.edits}:
                changed = (sources / name).read_text(encoding="utf-8")
                if changed == (ROOT / name).read_text(encoding="utf-8"):
                    return f"{name} is as before"
                if name.endswith(".py"):
                    compile(changed, name, "exec")
    except (MutantsError, SyntaxError) as error:
        return str(error)
    return ""


def test_every_committed_patch_applies_to_the_tree():
    found = {mutant.name: fault for mutant in COMMITTED if (fault := fault_of(mutant))}
    assert found == {}


def test_there_are_mutants_of_every_part():
    parts = {edit.path.split("/")[2] for mutant in COMMITTED for edit in mutant.edits}
    assert {"scheduler", "kv", "backends", "engine", "text"} <= parts
    assert len(COMMITTED) >= 30
