"""What the site shows beside the pages that everybody reads: all of it is there. `make docs`
builds it, and fails at a link that leads nowhere or a page that no list has."""

import re

import cadenza
from tests.docs.documents import PAGES, ROOT


def test_the_index_page_names_every_other_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^(?:.* <)?([\w/-]+)>?$", index, re.MULTILINE)
    pages = {each.relative_to(ROOT / "docs").with_suffix("").as_posix() for each in PAGES[1:]}
    assert pages - {"index"} <= set(listed), "add it to a list of docs/index.md"


def test_the_page_of_the_interface_has_every_public_name() -> None:
    page = (ROOT / "docs" / "site" / "interface.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\.\. autoclass:: (\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(set(cadenza.__all__) - {"__version__"})
