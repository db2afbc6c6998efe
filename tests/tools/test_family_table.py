"""README's table of families has all of them, and is what the script writes."""

from cadenza.checkpoint.gguf.config import architectures
from cadenza.models.families import FAMILIES
from tools import family_table


def test_every_family_and_every_architecture_is_in_a_row():
    rows = family_table.ROWS.values()
    assert {family for families, _ in rows for family in families} == FAMILIES.keys()
    assert {name for _, names in rows for name in names} == set(architectures())


def test_the_table_is_what_the_script_writes():
    page = family_table.README.read_text(encoding="utf-8")
    assert family_table.with_table(page, family_table.table()) == page
