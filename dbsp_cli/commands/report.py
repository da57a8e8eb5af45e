"""`dbsp report`: what a run did, or how two runs differ."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dbsp_cli.comparison import compare
from dbsp_cli.output import PATH, JsonFlag, print_json, print_tables
from dbsp_cli.report_tables import comparison_page, comparison_tables, run_tables
from dbsp_core.reports.html import report_page
from dbsp_core.reports.run_report import RunReport
from dbsp_core.reports.summary import layer_summaries
from dbsp_core.utils.atomic_io import write_atomically
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.paths import require_apart, require_file_place

__all__ = ["report_command"]


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(help="One run, or two to compare: report folders or report.json files.", **PATH)
    ],
    as_json: JsonFlag = False,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file as well.", **PATH)] = None,
) -> None:
    """Show the report of a run, or compare two runs."""
    if len(runs) > 2:
        raise UserError(f"dbsp report takes one run or two, got {len(runs)}")
    if html is not None:
        require_file_place(html, "--html")
        files = [run / "report.json" if os.path.isdir(run) else run for run in runs]
        require_apart({"--html": html}, inputs={str(file): file for file in files})
    reports = [RunReport.read(path) for path in runs]
    if len(reports) == 1:
        _show(reports[0], as_json, html)
    else:
        _compare((str(runs[0]), str(runs[1])), reports[0], reports[1], as_json, html)


def _show(report: RunReport, as_json: bool, html: Path | None) -> None:
    if html is not None:
        write_atomically(html, report_page(report))
    if as_json:
        about = {
            name: getattr(report, name) for name in ("model", "host", "world_size", "strategy", "planner", "seconds")
        }
        layers = [asdict(one) for one in layer_summaries(report)]
        print_json(**about, totals=asdict(report.totals), layers=layers)
        return
    print_tables(run_tables(report))


def _compare(names: tuple[str, str], a: RunReport, b: RunReport, as_json: bool, html: Path | None) -> None:
    comparison = compare(a, b)
    tables = comparison_tables(names, comparison)
    if html is not None:
        write_atomically(html, comparison_page(names, tables))
    if as_json:
        print_json(a=names[0], b=names[1], **comparison.to_values())
        return
    print_tables(tables)
