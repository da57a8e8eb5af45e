"""Sphinx' settings for the site that `scripts/docs` builds from docs/: its pages, in the groups of the index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
REPOSITORY = "https://github.com/db-sp/db-sp/blob/main/"

project = "db-SP"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_default_options = {"members": True, "imported-members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
root_doc = "README"
exclude_patterns = ["pictures/*.py", "pictures/draw"]
suppress_warnings = ["misc.highlighting_failure"]  # programs with … in them
html_theme = "furo"
html_title = "db-SP"
html_show_copyright = False
myst_heading_anchors = 4  # by the names that the forge gives
_GROUP = re.compile(r"^## (\w+)$(.*?)(?=^## |\Z)", re.M | re.S)
_PAGE = re.compile(r"\]\(([\w/-]+)\.md\)")
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+)([^)#]+)((?:#[^)]*)?)\)")


def setup(app: Any) -> None:
    app.connect("source-read", _prepare)


def _prepare(app: Any, name: str, source: list[str]) -> None:
    """Links that leave docs/ lead to the repository; the index's groups become the site's navigation."""
    folder = (DOCS / name).parent

    def absolute(link: re.Match[str]) -> str:
        path = (folder / (link[1] + link[2])).resolve()
        if path.is_relative_to(DOCS):
            return link[0]
        return f"]({REPOSITORY}{path.relative_to(DOCS.parent).as_posix()}{link[3]})"

    source[0] = _OUTSIDE.sub(absolute, source[0])
    if name == root_doc:
        for title, pages in _GROUP.findall(source[0]):
            listed = "\n".join(_PAGE.findall(pages))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{listed}\n```\n"
