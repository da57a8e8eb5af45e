"""`dbsp report`: what a run did, or how two runs differ."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dbsp_cli.comparison import Comparison, compare
from dbsp_cli.output import PATH, JsonFlag, TextTable, print_json, print_tables, require_apart, require_file_place
from dbsp_core.reports.page import LayerSummary, headline, in_seconds, layer_summaries, render_page, report_page
from dbsp_core.reports.run_report import RunReport
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import in_bytes, write_atomically

__all__ = ["report_command", "run_tables"]


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
    tables = _comparison_tables(names, comparison)
    if html is not None:
        write_atomically(html, render_page("comparison.html", names=names, tables=tables))
    if as_json:
        print_json(a=names[0], b=names[1], **comparison.to_values())
        return
    print_tables(tables)


def run_tables(report: RunReport) -> list[TextTable]:
    """Returns the tables of one run: its main numbers, and its layers."""
    compared = "not compared" if report.max_abs_diff is None else f"differs by {report.max_abs_diff:.1e}"
    rows = [
        [
            str(one.layer),
            f"{one.density:.3f}",
            *(f"{number:.3f}" for number in (one.rho_before, one.rho, one.rho_worst, one.rho_best)),
            str(one.replans),
            in_seconds(one.seconds),
            in_bytes(one.bytes_sent),
        ]
        for one in layer_summaries(report)
    ]
    columns = ("layer", "density", "ρ_s before", "ρ_s", "worst", "least", "plans", "time", "sent")
    title = f"{report.model}, db-SP in {report.host} on {report.world_size} ranks"
    caption = f"{in_seconds(report.seconds)}; final latents against one process: {compared}"
    return [
        TextTable(title, ("what", "value", "note"), headline(report), left=("what", "value", "note")),
        TextTable("by layer", columns, rows, caption, spare=("least", "worst", "density")),
    ]


def _comparison_tables(names: tuple[str, str], comparison: Comparison) -> list[TextTable]:
    """Returns the tables of a comparison: settings, numbers of the whole runs, and layers."""
    pair = [f"A: {names[0]}", f"B: {names[1]}"]
    settings = [one.in_words()[:3] for one in comparison.settings]
    numbers = [one.in_words() for one in comparison.numbers]
    layers = [[str(one.layer), *_pairs(one.a, one.b)] for one in comparison.layers]
    of_layers = ["layer", "density", "ρ_s before", "ρ_s used", "plans", "time", "sent"]
    return [
        TextTable("set differently", ["setting", *pair], settings, "" if settings else "nothing", ("setting", *pair)),
        TextTable("whole runs", ["number", *pair, "B over A"], numbers, left=("number",)),
        TextTable("by layer, A → B", of_layers, layers, spare=("density", "plans")),
    ]


def _pairs(a: LayerSummary | None, b: LayerSummary | None) -> list[str]:
    shown = [
        (
            *(f"{number:.3f}" for number in (one.density, one.rho_before, one.rho)),
            *(str(one.replans), in_seconds(one.seconds), in_bytes(one.bytes_sent)),
        )
        if one is not None
        else ("–",) * 6
        for one in (a, b)
    ]
    return [f"{first} → {second}" for first, second in zip(*shown, strict=True)]
