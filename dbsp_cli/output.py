"""How commands print: tables for people, one JSON object for programs; and how they hand on their options."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

__all__ = ["JsonFlag", "options_for", "print_json", "print_tables", "text_table"]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def options_for(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a command's options (its `context.params`) that are fields of a dataclass."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


def print_json(**values: Any) -> None:
    print(json.dumps(values))


def text_table(
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    caption: str | None = None,
    left: Collection[str] = ("strategy", "planner"),
) -> Table:
    """A compact table. left: names of the columns that hold words, not numbers"""
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def print_tables(tables: Iterable[Table], width: int = 0) -> None:
    """Prints tables. width: the least number of columns, also where the terminal has fewer"""
    console = Console(width=max(width, Console().width))
    for table in tables:
        console.print(table)
