"""`dbsp report`: what a run did, or how two runs differ."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dbsp_cli.comparison import Comparison, compare
from dbsp_cli.output import PATH, JsonFlag, TextTable, print_json, print_tables, require_apart, require_file_path
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
        require_file_path(html, "--html")
        files = [run / "report.json" if os.path.isdir(run) else run for run in runs]
        require_apart({"--html": html}, inputs={str(file): file for file in files})
    reports = [RunReport.read(path) for path in runs]
    if len(reports) == 1:
        (report,) = reports
        names = ("model", "framework", "world_size", "strategy", "planner", "seconds")
        values = {name: getattr(report, name) for name in names} | {"totals": asdict(report.totals)}
        values["layers"] = [asdict(one) for one in layer_summaries(report)]
        tables, page = run_tables(report), report_page(report) if html is not None else ""
    else:
        a, b = map(str, runs)
        comparison = compare(*reports)
        values = {"a": a, "b": b} | comparison.to_values()
        tables = _comparison_tables(a, b, comparison)
        page = render_page("comparison.html", names=(a, b), tables=tables)
    if html is not None:
        write_atomically(html, page)
    if as_json:
        print_json(**values)
    else:
        print_tables(tables)


def run_tables(report: RunReport) -> list[TextTable]:
    """Returns the tables of one run: its main numbers, and its layers."""
    compared = "not compared" if report.max_abs_diff is None else f"differs by {report.max_abs_diff:.1e}"
    rows = []
    for one in layer_summaries(report):
        density, before, rho, *rest = _cells(one)
        rows.append([str(one.layer), density, before, rho, f"{one.rho_worst:.3f}", f"{one.rho_best:.3f}", *rest])
    columns = ("layer", "density", "ρ_s before", "ρ_s", "worst", "least", "plans", "time", "sent")
    title = f"{report.model}, db-SP in {report.framework} on {report.world_size} ranks"
    caption = f"{in_seconds(report.seconds)}; final latents against one process: {compared}"
    return [
        TextTable(title, ("what", "value", "note"), headline(report), left=("what", "value", "note")),
        TextTable("by layer", columns, rows, caption, spare=("least", "worst", "density")),
    ]


def _comparison_tables(a: str, b: str, comparison: Comparison) -> list[TextTable]:
    """Returns the tables of a comparison: settings, numbers of the whole runs, and layers."""
    pair = [f"A: {a}", f"B: {b}"]
    settings = [one.in_words()[:3] for one in comparison.settings]
    numbers = [one.in_words() for one in comparison.numbers]
    layers = [
        [str(layer), *(f"{first} → {second}" for first, second in zip(*map(_cells, both), strict=True))]
        for layer, both in comparison.layers.items()
    ]
    of_layers = ["layer", "density", "ρ_s before", "ρ_s used", "plans", "time", "sent"]
    return [
        TextTable("set differently", ["setting", *pair], settings, "" if settings else "nothing", ("setting", *pair)),
        TextTable("whole runs", ["number", *pair, "B over A"], numbers, left=("number",)),
        TextTable("by layer, A → B", of_layers, layers, spare=("density", "plans")),
    ]


def _cells(one: LayerSummary | None) -> list[str]:
    """Returns a layer's density, ρ_s before and after, plans, time and bytes as text."""
    if one is None:
        return ["–"] * 6
    numbers = [f"{number:.3f}" for number in (one.density, one.rho_before, one.rho)]
    return [*numbers, str(one.replans), in_seconds(one.seconds), in_bytes(one.bytes_sent)]
