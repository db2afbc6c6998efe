"""How Sphinx makes a site of these pages: `make docs`.

Owns what a site needs that pages of a repository do not: README.md and the like as pages of their
own, links to files that are no pages, and notebooks. Invariant: the pages stay as they are read in
the repository; what is wrong with one is a warning, and a warning fails the build.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from myst_parser.sphinx_ import Parser
from sphinx.application import Sphinx

import cadenza

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
COPIED = {
    "site/start": ROOT / "README.md",
    "site/architecture": ROOT / "ARCHITECTURE.md",
    "site/contributing": ROOT / "CONTRIBUTING.md",
    "site/kernels": ROOT / "csrc" / "README.md",
    "site/changelog": ROOT / "CHANGELOG.md",
    "site/security": ROOT / "SECURITY.md",
}
"""Pages that stand in for files outside of this folder."""
PAGE_OF = {path: DOCS / f"{name}.md" for name, path in COPIED.items()}
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
LINK_TO_FOLDER = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)\)")
IMAGE = re.compile(r'(?<=<img src=")([^"#]+)(#[^"]*)?(?=")')

project = "Cadenza"
author = "Cadenza's contributors"
version = release = cadenza.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results"]
default_role = "code"
myst_enable_extensions = ["colon_fence", "html_image"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # JSON that is cut, as in serving.md
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
html_theme = "furo"
html_title = f"Cadenza {version}"
html_copy_source = False
html_show_copyright = html_show_sphinx = False
html_show_sourcelink = False


class NotebookParser(Parser):
    """Reads a Jupyter notebook as the Markdown of its cells and outputs."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        super().parse(markdown_of(json.loads(inputstring)), document)


def markdown_of(notebook: dict[str, Any]) -> str:
    """Of a notebook whose outputs are text and PNG pictures."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
            else:
                data = "".join(output["data"]["image/png"]).replace("\n", "")
                parts.append(f"![output](data:image/png;base64,{data})")
    return "\n\n".join(parts)


def read_page(_app: Sphinx, name: str, source: list[str]) -> None:
    """Puts a page's file in its place, and has its links lead to pages of the site."""
    page = DOCS / f"{name}.md"
    origin = COPIED.get(name, page)
    text = origin.read_text(encoding="utf-8") if name in COPIED else source[0]

    def path_of(link: str) -> Path:
        return Path(os.path.normpath(origin.parent / link))

    def as_page(found: re.Match[str]) -> str:
        path = path_of(found[1])
        return os.path.relpath(PAGE_OF.get(path, path), page.parent) + (found[2] or "")

    def without_folder(found: re.Match[str]) -> str:
        return f"{found[1]}" if path_of(found[2]).is_dir() else found[0]

    text = LINK_TO_FOLDER.sub(without_folder, text)
    source[0] = IMAGE.sub(as_page, LINK.sub(as_page, text))


def setup(app: Sphinx) -> None:
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    app.connect("source-read", read_page)
