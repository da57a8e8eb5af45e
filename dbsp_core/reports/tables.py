"""Reports and comparisons as tables: titles, columns and rows, for the terminal and for pages."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dbsp_core.reports.compare import Comparison
from dbsp_core.reports.run_report import RunReport
from dbsp_core.reports.summary import LayerSummary, headline, in_bytes, in_seconds, layer_summaries

__all__ = ["TextTable", "comparison_tables", "layer_table", "run_tables"]


@dataclass(frozen=True)
class TextTable:
    """A table of words. The first column names the rows."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def to_table(self, caption: str | None = None) -> Table:
        """For the terminal."""
        table = Table(
            title=self.title,
            title_justify="left",
            caption=caption,
            box=SIMPLE_HEAD,
            padding=(0, 0, 0, 1),
            pad_edge=False,
        )
        for index, name in enumerate(self.columns):
            table.add_column(name, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def run_tables(report: RunReport) -> list[Table]:
    """One run: its headline numbers, and its layers."""
    title = f"{report.model}, db-SP in {report.host} on {report.world_size} ranks"
    head = TextTable(title, ["", "", ""], [list(row) for row in headline(report)]).to_table()
    for column in head.columns:
        column.justify = "left"
    head.show_header = False
    return [head, layer_table(report)]


def layer_table(report: RunReport) -> Table:
    """Means over a layer's attentions, sums of plans, time and bytes."""
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
    columns = ["layer", "density", "ρ_s before", "ρ_s", "worst", "least", "plans", "time", "sent"]
    title = f"{report.model} on {report.world_size} ranks, {report.strategy}, planner {report.planner}"
    caption = f"{in_seconds(report.seconds)}; final latents against one process: {compared}"
    return TextTable(title, columns, rows).to_table(caption)


def comparison_tables(names: tuple[str, str], comparison: Comparison) -> list[TextTable]:
    """What was set differently, what came of it, and that by layer."""
    pair = [f"A: {names[0]}", f"B: {names[1]}"]
    settings = [list(one.in_words()[:3]) for one in comparison.settings]
    numbers = [list(one.in_words()) for one in comparison.numbers]
    layers = [[str(one.layer), *_pairs(one.a, one.b)] for one in comparison.layers]
    of_layers = ["layer", "density", "ρ_s before", "ρ_s used", "plans", "time", "sent"]
    return [
        TextTable("set differently", ["", *pair], settings),
        TextTable("whole runs", ["", *pair, "B over A"], numbers),
        TextTable("by layer, A → B", of_layers, layers),
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
