"""`dbsp report`: shows the report of a run, or compares two runs."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dbsp_cli.output import PATH, JsonFlag, TextTable, print_json, print_tables
from dbsp_cli.video_quality import compare_latents, compare_videos
from dbsp_core.reports.page import LAYER_COLUMNS, flat_settings, headline, in_seconds, strategies_in_words
from dbsp_core.reports.run_report import RunReport
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import in_bytes


def report_command(
    runs: Annotated[list[Path], typer.Argument(help="One or two runs: report folders or report.json files.", **PATH)],
    as_json: JsonFlag = False,
) -> None:
    """Show the report of a run, or compare two runs: settings, density, ρ_s, seconds and videos."""
    if len(runs) > 2:
        raise UserError(f"dbsp report takes one or two runs, got {len(runs)}")
    tables, values = show_run(RunReport.read(runs[0])) if len(runs) == 1 else compare_runs(*runs)
    if as_json:
        print_json(**values)
    else:
        print_tables(tables)


def show_run(report: RunReport) -> tuple[list[TextTable], dict[str, Any]]:
    """Returns the tables of one run (main numbers, layers) and the values for --json."""
    names = ["model", "framework", "world_size", "strategy", "planner", "seconds"]
    names += ["skipped", "quantized", "compile_s", "video"]
    layers = [
        {"layer": layer, "seconds": totals.attention_s, **asdict(totals)} for layer, totals in report.layers().items()
    ]
    values = {name: getattr(report, name) for name in names} | {"totals": asdict(report.totals), "layers": layers}
    compared = "not compared" if report.max_abs_diff is None else f"differs by {report.max_abs_diff:.1e}"
    title = f"{report.model}, db-SP in {report.framework} on {report.world_size} ranks"
    caption = f"{in_seconds(report.seconds)}; final latents against a single process: {compared}"
    words = ("what", "value", "note")
    tables = [
        TextTable(title, words, headline(report), left=words),
        TextTable.of("by layer", (("layer", "layer", str), *LAYER_COLUMNS), layers, caption),
    ]
    return tables, values


_NUMBERS = (
    ("density", "density", ""),
    ("ρ_s before, contiguous", "rho_before", ""),
    ("ρ_s used", "rho", ""),
    ("ρ_s least possible", "rho_best", ""),
    ("plans made", "replans", ""),
    ("making plans", "plan_s", "s"),
    ("attention, slowest rank", "attention_s", "s"),
    ("sent, sum", "bytes_sent", "bytes"),
)
"""Totals to compare: name, field of `Totals`, unit."""


def compare_runs(a: Path, b: Path) -> tuple[list[TextTable], dict[str, Any]]:
    """Compares settings, numbers, videos and latents of two runs; returns the table and the values for --json."""
    reports = [RunReport.read(path) for path in (a, b)]
    rows: list[tuple[str, str, str, str]] = []
    # 1. Settings that differ; None if a run lacks the setting
    before, after = map(_context, reports)
    settings = [{"what": key, "a": before.get(key), "b": after.get(key)} for key in before | after]
    settings = [setting for setting in settings if setting["a"] != setting["b"]]
    rows += [(str(setting["what"]), _shown(setting["a"]), _shown(setting["b"]), "") for setting in settings]
    # 2. Numbers
    numbers = []
    pairs = [(name, *(getattr(report.totals, key) for report in reports), unit) for name, key, unit in _NUMBERS]
    for name, x, y, unit in [*pairs, ("whole run", *(report.seconds for report in reports), "s")]:
        change = y / x - 1 if x > 0 <= y else None
        numbers.append({"what": name, "a": x, "b": y, "unit": unit, "change": change})
        words = "" if change is None else "same" if abs(change) < 5e-4 else f"{change:+.1%}"
        rows.append((name, _shown(x, unit), _shown(y, unit), words))
    # 3. Videos and latents, or why they are not compared
    folders = [path if os.path.isdir(path) else path.parent for path in (a, b)]
    pictures: dict[str, float | None] = dict.fromkeys(("psnr", "ssim", "latents_psnr"))
    notes = []
    for what, compare in (("videos", compare_videos), ("latents", compare_latents)):
        try:
            pictures |= compare(*folders)
        except UserError as error:
            notes.append(f"{what} not compared: {error}")
    for name, key in (("video: PSNR", "psnr"), ("video: SSIM", "ssim"), ("latents: PSNR", "latents_psnr")):
        number = pictures[key]
        if number is not None:
            words = f"{number:.4f}" if key == "ssim" else f"{number:.2f} dB" if math.isfinite(number) else "equal"
            rows.append((name, "", words, ""))
    finite = {key: None if number == math.inf else number for key, number in pictures.items()}
    names = ["what", f"A: {a}", f"B: {b}"]
    table = TextTable("", [*names, "B over A"], rows, "\n".join(notes), left=names[:1])
    values = {"a": str(a), "b": str(b), "settings": settings, "numbers": numbers, **finite, "notes": notes}
    return [table], values


def _context(report: RunReport) -> dict[str, Any]:
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


def _shown(value: Any, unit: str = "") -> str:
    if value is None:
        return "–"
    if unit:
        return in_seconds(value) if unit == "s" else in_bytes(value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)
