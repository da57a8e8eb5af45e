"""A result: rows as a CSV, as a table in the terminal, and as a picture that is drawn from the CSV alone."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Row
from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dbsp_core.utils.errors import UserError

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "results"


@dataclass(frozen=True)
class Result:
    """NAME.csv, and NAME.png where it is drawn.

    Columns are the attributes of a `Row`, of which `label` says what is measured, modelled or fitted.
    """

    name: str  # of both files
    title: str  # over the table in the terminal
    draw: Callable[[list[Row]], Figure] | None = None  # the picture, from the CSV's rows alone; None: no picture

    def run(
        self,
        parser: argparse.ArgumentParser,
        measure: Callable[[argparse.Namespace], Iterable[Any]],
        summary: Callable[[list[Any]], Iterable[str]] | None = None,
    ) -> None:
        """The program of a result: publishes what is measured under the parser's options, and prints a summary."""
        options = parser.parse_args()
        rows = list(measure(options))
        self.publish(rows, options.out)
        for line in summary(rows) if summary else ():
            Console(width=120).print(line)

    def publish(self, rows: list[Any], out: Path) -> None:
        """Writes the files into `out`, and prints the rows as a table."""
        records = write_csv(self.name, rows, out)
        if self.draw is not None:
            self.redraw(out)
        print_table(self.title, records)

    def read(self, folder: Path) -> list[Row]:
        """The rows of the CSV. Raises UserError where there is none."""
        path = folder / f"{self.name}.csv"
        if not path.is_file():
            raise UserError(f"{path} does not exist; make it with the command that docs/results/evidence.yaml names")
        with path.open(newline="", encoding="utf-8") as file:
            return [Row(**{key: _value(text) for key, text in record.items()}) for record in csv.DictReader(file)]

    def redraw(self, folder: Path, out: Path | None = None) -> Path:
        """Draws the picture again from the CSV in `folder`, into `out` or the same folder. returns: its path"""
        assert self.draw is not None
        path = (out or folder) / f"{self.name}.png"
        self.draw(self.read(folder)).savefig(path)
        return path


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=partial(argparse.ArgumentDefaultsHelpFormatter, width=100)
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV and the PNG")
    return parser


def write_csv(name: str, rows: list[Any], out: Path) -> list[dict[str, Any]]:
    """Writes NAME.csv into `out`, and returns what it has. rows: objects with the same attributes"""
    out.mkdir(parents=True, exist_ok=True)
    records = [{key: _short(value) for key, value in vars(row).items()} for row in rows]
    with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, records[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    return records


def print_table(title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Prints columns for what differs between rows; values that all rows share, such as labels, come below."""
    shared = {key for key in records[0] if len(records) > 1 and len({str(record[key]) for record in records}) == 1}
    caption = "; ".join(f"{key}: {value}" for key, value in records[0].items() if key in shared)
    shown = [key for key in records[0] if key not in shared]
    table = Table(*shown, title=title, caption=caption, box=SIMPLE_HEAD)
    for record in records:
        table.add_row(*(_in_table(record[key]) for key in shown))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _in_table(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 0.1 else str(_short(value))


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _value(text: str) -> int | float | str:
    """Returns what a value was before it was written."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
