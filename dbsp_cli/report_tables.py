"""Reports and comparisons of runs as tables, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Sequence

from dbsp_cli.comparison import Comparison
from dbsp_cli.output import TextTable
from dbsp_core.reports.html import render_page
from dbsp_core.reports.run_report import RunReport
from dbsp_core.reports.summary import LayerSummary, headline, in_seconds, layer_summaries
from dbsp_core.utils.byte_sizes import in_bytes

__all__ = ["comparison_page", "comparison_tables", "run_tables"]


def run_tables(report: RunReport) -> list[TextTable]:
    """The tables of one run: its main numbers, and its layers."""
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


def comparison_tables(names: tuple[str, str], comparison: Comparison) -> list[TextTable]:
    """The tables of a comparison: settings, numbers of the whole runs, and layers."""
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


def comparison_page(names: tuple[str, str], tables: Sequence[TextTable]) -> str:
    """HTML of a comparison."""
    return render_page("comparison.html", names=names, tables=tables)


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
