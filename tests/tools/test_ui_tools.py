"""The gates of the page's files: vendored libraries are the table's, its own modules are read."""

import shutil
from pathlib import Path

import pytest

from tools import ui_syntax, vendor_ui

pytestmark = pytest.mark.gates


def test_the_vendored_files_are_the_tables() -> None:
    assert vendor_ui.find_faults(vendor_ui.VENDOR) == []


def test_a_changed_a_missing_and_an_unknown_file_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "vendor"
    shutil.copytree(vendor_ui.VENDOR, folder)
    (folder / "htm.js").write_bytes(b"changed")
    (folder / "uplot.css").unlink()
    (folder / "more.js").touch()
    found = "\n".join(vendor_ui.find_faults(folder))
    assert "htm.js has the SHA-256" in found
    assert "uplot.css is missing" in found
    assert "more.js is not in the table" in found
    (folder / vendor_ui.LICENSES).write_text("none")
    assert "lacks 'marked" in "\n".join(vendor_ui.find_faults(folder))


def test_a_broken_module_and_a_missing_name_are_found(tmp_path: Path) -> None:
    (tmp_path / "good.js").write_text("export const one = 1;\nexport async function two() {}\n")
    (tmp_path / "bad.js").write_text("export const = 1;\n")
    (tmp_path / "user.js").write_text('import { one, three, two } from "./good.js";\n')
    assert ui_syntax.syntax_faults(tmp_path / "good.js") == []
    assert "SyntaxError" in ui_syntax.syntax_faults(tmp_path / "bad.js")[0]
    assert ui_syntax.import_faults(tmp_path / "user.js") == ["user.js: good.js has no three"]
