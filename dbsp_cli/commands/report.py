"""`dbsp report`: what a run did, or how two runs differ."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dbsp_cli.output import PATH, JsonFlag, TextTable, print_json, print_tables, require_apart
from dbsp_core.reports.page import (
    LayerSummary,
    flat_settings,
    headline,
    in_seconds,
    layer_summaries,
    render_page,
    report_page,
    strategies_in_words,
)
from dbsp_core.reports.run_report import RunReport
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import in_bytes, require_file_path, write_atomically


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
        values, tables = {"a": a, "b": b} | _comparison(*reports), _comparison_tables((a, b), *reports)
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


def _cells(one: LayerSummary | None) -> list[str]:
    """Returns a layer's density, ρ_s before and after, plans, time and bytes as text."""
    if one is None:
        return ["–"] * 6
    numbers = [f"{number:.3f}" for number in (one.density, one.rho_before, one.rho)]
    return [*numbers, str(one.replans), in_seconds(one.seconds), in_bytes(one.bytes_sent)]


@dataclass(frozen=True)
class Difference:
    """A number or setting of runs a and b, or None in a run that lacks it.

    Attributes:
        what: Name of the number or setting.
        unit: "s", "bytes" or none.
    """

    what: str
    a: Any
    b: Any
    unit: str = ""

    @property
    def change(self) -> float | None:
        """b / a − 1, or None if they are not numbers, a is 0 or one is negative."""
        numbers = all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in (self.a, self.b))
        return self.b / self.a - 1 if numbers and self.a > 0 <= self.b else None

    def in_words(self) -> tuple[str, str, str, str]:
        """Returns name, a, b and change as text."""
        change = self.change
        shown = "" if change is None else "same" if abs(change) < 5e-4 else f"{change:+.1%}"
        return self.what, self._show(self.a), self._show(self.b), shown

    def _show(self, value: Any) -> str:
        if value is None:
            return "–"
        if self.unit:
            return in_seconds(value) if self.unit == "s" else in_bytes(value)
        return f"{value:.4f}" if isinstance(value, float) else str(value)


_NUMBERS = (
    ("ρ_s before, contiguous", "rho_before", ""),
    ("ρ_s used", "rho", ""),
    ("ρ_s used, worst", "rho_worst", ""),
    ("ρ_s least possible", "rho_best", ""),
    ("density", "density", ""),
    ("attentions", "calls", ""),
    ("denoising steps", "steps", ""),
    ("plans made", "replans", ""),
    ("making plans", "plan_s", "s"),
    ("attention, slowest rank", "attention_s", "s"),
    ("attention, mean over ranks", "attention_mean_s", "s"),
    ("saved against contiguous (modelled)", "saved_s", "s"),
    ("even work would still save (modelled)", "left_s", "s"),
    ("source → owner", "bytes_to_owners", "bytes"),
    ("later chunks", "bytes_chunks", "bytes"),
    ("owner → source", "bytes_to_sources", "bytes"),
    ("sent, sum", "bytes_sent", "bytes"),
    ("plain USP would send", "bytes_usp", "bytes"),
)


def _settings(a: RunReport, b: RunReport) -> list[Difference]:
    """Returns what was set differently."""
    before, after = _context(a), _context(b)
    every = [Difference(key, before.get(key), after.get(key)) for key in before | after]
    return [one for one in every if one.a != one.b]


def _numbers(a: RunReport, b: RunReport) -> list[Difference]:
    """Returns the numbers of the whole runs."""
    numbers = [Difference(name, getattr(a.totals, key), getattr(b.totals, key), unit) for name, key, unit in _NUMBERS]
    return [*numbers, Difference("whole run", a.seconds, b.seconds, "s")]


def _layers(a: RunReport, b: RunReport) -> dict[int, tuple[LayerSummary | None, LayerSummary | None]]:
    """Returns by layer what each run did, None in a run without it."""
    before, after = ({one.layer: one for one in layer_summaries(report)} for report in (a, b))
    return {layer: (before.get(layer), after.get(layer)) for layer in sorted(before | after)}


def _context(report: RunReport) -> dict[str, Any]:
    """Returns everything that was known before the run began, and the strategies used."""
    environment = report.environment
    settings = {key: value for key, value in environment.settings.items() if key not in ("report", "record")}
    return {
        "model": report.model,
        "framework": report.framework,
        "ranks": report.world_size,
        "strategies": strategies_in_words(report),
        **flat_settings(settings),
        "kernel": environment.kernel,
        "tensors": environment.dtype,
        **{f"version of {name}": number for name, number in environment.software.items()},
        "hardware": ", ".join(sorted(set(environment.hardware))),
    }


def _comparison(a: RunReport, b: RunReport) -> dict[str, Any]:
    """Returns what --json prints of two runs."""
    pairs = {layer: [one and asdict(one) for one in pair] for layer, pair in _layers(a, b).items()}
    return {
        "settings": [asdict(one) for one in _settings(a, b)],
        "numbers": [asdict(one) | {"change": one.change} for one in _numbers(a, b)],
        "layers": [{"layer": layer, "a": before, "b": after} for layer, (before, after) in pairs.items()],
    }


def _comparison_tables(names: tuple[str, str], a: RunReport, b: RunReport) -> list[TextTable]:
    """Returns the tables of two runs: settings, numbers of the whole runs, and layers."""
    pair = [f"A: {names[0]}", f"B: {names[1]}"]
    settings = [one.in_words()[:3] for one in _settings(a, b)]
    numbers = [one.in_words() for one in _numbers(a, b)]
    layers = [
        [str(layer), *(f"{first} → {second}" for first, second in zip(*map(_cells, both), strict=True))]
        for layer, both in _layers(a, b).items()
    ]
    of_layers = ["layer", "density", "ρ_s before", "ρ_s used", "plans", "time", "sent"]
    return [
        TextTable("set differently", ["setting", *pair], settings, "" if settings else "nothing", ("setting", *pair)),
        TextTable("whole runs", ["number", *pair, "B over A"], numbers, left=("number",)),
        TextTable("by layer, A → B", of_layers, layers, spare=("density", "plans")),
    ]
