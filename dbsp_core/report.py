"""What happened in a run: JSON, picture, table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from rich.table import Table

from dbsp_core.files import write_atomically
from dbsp_core.plan import Plan

__all__ = ["LayerReport", "RunReport", "balance_picture", "layer_reports"]


@dataclass(frozen=True)
class LayerReport:
    """One layer's numbers; see `dbsp_core.Plan`."""

    layer: int
    density: float
    rho_before: float
    rho: float
    rho_bound: float
    moved: float


@dataclass(frozen=True)
class RunReport:
    """One run.

    max_abs_diff: largest difference of the final latents from one process without parallelism, or None if not compared
    seconds:      the pipeline's wall time on rank 0, loading and compiling excluded
    """

    model: str
    host: str
    world_size: int
    strategy: str
    planner: str
    max_abs_diff: float | None
    layers: tuple[LayerReport, ...]
    seconds: float

    @classmethod
    def read(cls, path: Path) -> RunReport:
        """Reads a report.json. Raises ValueError when it is not one."""
        try:
            values = json.loads(path.read_text())
            return cls(**{**values, "layers": tuple(LayerReport(**layer) for layer in values["layers"])})
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a db-SP report ({error}); make one with --sp-report DIR") from error

    def write(self, path: Path) -> None:
        """Writes JSON, whole or not at all."""
        write_atomically(path, json.dumps(asdict(self), indent=2) + "\n")

    def table(self) -> Table:
        """The same as a table for the terminal."""
        title = f"{self.model} on {self.world_size} ranks, {self.strategy}, planner {self.planner}"
        table = Table(title=title, caption=self._caption())
        for name in ("layer", "density", "ρ_s before", "ρ_s", "bound", "moved"):
            table.add_column(name, justify="right")
        for layer in self.layers:
            numbers = (layer.rho_before, layer.rho, layer.rho_bound)
            table.add_row(
                str(layer.layer), f"{layer.density:.3f}", *(f"{n:.3f}" for n in numbers), f"{layer.moved:.1%}"
            )
        return table

    def _caption(self) -> str:
        compared = "not compared" if self.max_abs_diff is None else f"differs by {self.max_abs_diff:.1e}"
        return f"{self.seconds:.1f} s; final latents against one process: {compared}"


def layer_reports(records: Mapping[int, Plan]) -> tuple[LayerReport, ...]:
    """The numbers of every layer that ran, by layer."""
    return tuple(
        LayerReport(
            layer=layer,
            density=record.density,
            rho_before=record.rho_before,
            rho=record.rho,
            rho_bound=record.rho_bound,
            moved=record.moved,
        )
        for layer, record in sorted(records.items())
    )


def balance_picture(records: Mapping[int, Plan]) -> bytes:
    """PNG: per layer, the dense blocks of each rank before (contiguous) and after, ρ_s above. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = sorted(records)
    figure = Figure(figsize=(max(7.0, 1.5 + 0.9 * len(layers)), 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    rows = (
        (axes[0], "before: contiguous", [records[i].work_before for i in layers]),
        (axes[1], f"after: {records[layers[0]].planner}", [records[i].work for i in layers]),
    )
    for axis, title, work in rows:
        totals = np.array([periods.sum(axis=0) for periods in work])
        ranks = totals.shape[1]
        width = 0.8 / ranks
        for rank in range(ranks):
            place = np.arange(len(layers)) + (rank - (ranks - 1) / 2) * width
            axis.bar(place, totals[:, rank], width * 0.92, label=f"rank {rank}", color=f"C{rank % 10}")
        middle = np.arange(len(layers))
        axis.hlines(totals.mean(axis=1), middle - 0.45, middle + 0.45, "black", "dotted")
        for index, layer in enumerate(layers):
            plan = records[layer]
            rho = plan.rho_before if axis is axes[0] else plan.rho
            axis.annotate(
                f"ρ_s {rho:.3f}", (index, totals[index].max()), (0, 4), textcoords="offset points", ha="center", size=8
            )
        axis.set(title=title, ylabel="dense blocks")
        axis.margins(y=0.18)
    axes[1].set(xlabel="layer", xticks=np.arange(len(layers)), xticklabels=layers)
    axes[0].legend(ncols=min(8, ranks), fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.12))
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()
