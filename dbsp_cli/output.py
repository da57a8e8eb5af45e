"""Output of commands (tables, JSON) and handling of options and paths."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dbsp_core.utils.errors import UserError, cut_short
from dbsp_core.utils.files import user_path
from dbsp_core.utils.process import printable

MOST_GPUS = 4096  # most GPUs of a prediction or plan; tables grow with its square
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def path(text: str) -> Path:
    """Parses a path option; help shows this function's name."""
    try:
        return user_path(text)
    except UserError as error:
        raise typer.BadParameter(str(error)) from None


PATH: dict[str, Any] = {"parser": path}  # arguments of `typer.Option` and `typer.Argument` for paths; see `user_path`

_LINES = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)
"""Box with only dashes below the column names."""


@dataclass(frozen=True)
class TextTable:
    """A table of plain text with title and caption."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    left: Collection[str] = ()  # Columns with words

    @classmethod
    def of(
        cls,
        title: str,
        columns: Sequence[tuple[str, str, Callable[[Any], str]]],
        records: Iterable[Mapping[str, Any]],
        caption: str = "",
        left: Collection[str] = (),
    ) -> TextTable:
        """Makes a row per record; columns are (heading, key of the record, format function)."""
        rows = [[write(record[key]) for _, key, write in columns] for record in records]
        return cls(title, [heading for heading, _, _ in columns], rows, caption, left)


def options_for(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a command (`context.params`) that are fields of a dataclass."""
    return {field.name: options[field.name] for field in fields(kind) if field.name in options}


def print_json(**values: Any) -> None:
    print(json.dumps(values))


def print_tables(tables: Iterable[TextTable]) -> None:
    """Prints tables, wrapped to the terminal's width; in full if the output is not a terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n\n".join(as_text(table, width) for table in tables))


def as_text(table: TextTable, width: int | None = None) -> str:
    """Formats a table in lines of at most `width`, wrapping cells; escapes control characters, as from files."""
    grid = Table(box=_LINES, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for name in table.columns:
        justify: Any = "left" if name in table.left else "right"
        grid.add_column(Text(printable(name)), justify=justify, overflow="fold")
    for row in table.rows:
        grid.add_row(*(Text(printable(str(cell))) for cell in row))
    page = Console(file=io.StringIO(), width=width or 10_000, color_system=None)
    page.print(grid)
    rows = [line.rstrip() for line in page.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    return "\n".join(filter(None, (printable(table.title), *rows, printable(table.caption))))


def require_apart(
    files: Mapping[str, Path], folders: Mapping[str, Path] | None = None, inputs: Mapping[str, Path] | None = None
) -> None:
    """Raises UserError if an output (file or folder, by option) would overwrite another or an input. Follows links."""
    named = [*files.items(), *(folders or {}).items(), *(inputs or {}).items()]
    paths = [(name, Path(os.path.realpath(path))) for name, path in named]
    for index, (name, path) in enumerate(paths[: len(files) + len(folders or {})]):
        for other, taken in paths[index + 1 :]:
            if path == taken:
                raise UserError(f"{name} and {other} are the same path, {cut_short(str(path))}; give another {name}")
        for other, file in paths[: len(files)]:
            if file in path.parents:
                raise UserError(f"{name} {cut_short(str(path))} is inside {other}, a file; give another {name}")
