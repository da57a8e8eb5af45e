"""Writes the tables of settings in docs/configuration.md from the settings' classes: names, defaults and docstrings.

tests/docs/test_pages.py asks whether they are up to date.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import griffe

from dbsp_core.config import DbspConfig
from dbsp_core.masks.steps import DenseSchedule
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.planning.bags import BagConfig
from dbsp_core.sources import SOURCES
from dbsp_core.utils.schema import setting_names

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
SECTIONS: dict[str, type] = {
    "settings": DbspConfig,
    "generate": GenerateSettings,
    "dense_schedule": DenseSchedule,
    "bags": BagConfig,
}
"""The settings class of each table, by the table's name in the page."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(text: str) -> str:
    """Returns the page with the tables as they are now, each between `<!-- table NAME -->` and `<!-- end -->`."""

    def renewed(match: re.Match[str]) -> str:
        table = _sources() if match[1] == "mask" else _table(SECTIONS[match[1]])
        return f"<!-- table {match[1]} -->\n{table}<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", renewed, text, flags=re.DOTALL)


def _table(cls: type) -> str:
    described = _descriptions(cls)
    rows = [f"| `{setting.name}` | {_default(setting)} | {described[setting.name]} |\n" for setting in _settings(cls)]
    return "| key | default | what it does |\n|---|---|---|\n" + "".join(rows)


def _sources() -> str:
    rows = []
    for name, cls in SOURCES.items():
        keys = ", ".join(f"`{setting.name}`" for setting in _settings(cls))
        rows.append(f"| `{name}` | {keys} |\n")
    return "| source | keys |\n|---|---|\n" + "".join(rows)


def _settings(cls: Any) -> list[Field[Any]]:
    return [setting for setting in fields(cls) if setting.name in setting_names(cls)]


def _descriptions(cls: type) -> dict[str, str]:
    """The text of each attribute in a class's docstring."""
    sections = griffe.Docstring(cls.__doc__ or "").parse("google")
    kind = griffe.DocstringSectionKind.attributes
    return {
        parameter.name: _linked(parameter.description)
        for part in sections
        if part.kind is kind
        for parameter in part.value
    }


def _default(setting: Field[Any]) -> str:
    if setting.default is MISSING and setting.default_factory is MISSING:
        return "required"
    if setting.default is MISSING or setting.default is None:
        return "none"
    shown = getattr(setting.default, "setting", setting.default)
    return f"`{str(shown).lower() if isinstance(shown, bool) else shown}`"


def _linked(text: str) -> str:
    """One line, in which the names of pages are links."""
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", " ".join(text.replace("|", "\\|").split()))


if __name__ == "__main__":
    main()
