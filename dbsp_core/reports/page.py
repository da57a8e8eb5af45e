"""Renders a report as an HTML page and a picture, and its main numbers as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from dbsp_core.planning.plan import Plan
from dbsp_core.reports.run_report import RunReport
from dbsp_core.reports.style import INK, STYLE, heading, rank_colour
from dbsp_core.utils.files import in_bytes


def in_seconds(seconds: float) -> str:
    """Returns a time as text, such as "850 µs", "12.3 ms", "4.56 s" or "12 min 5 s"."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.3g} ms"
    if abs(seconds) < 100:
        return f"{seconds:.3g} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


LAYER_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("density", "density", "{:.3f}".format),
    ("ρ_s before", "rho_before", "{:.3f}".format),
    ("ρ_s", "rho", "{:.3f}".format),
    ("worst", "rho_worst", "{:.3f}".format),
    ("least", "rho_best", "{:.3f}".format),
    ("plans", "replans", str),
    ("time", "attention_s", in_seconds),
    ("sent", "bytes_sent", in_bytes),
)
"""Columns of tables by layer: heading, field of `Totals`, formatter."""
SHOWN_ROW = 0.25  # row share from which reports show it; below, the rows of a rank end at most at 1.14 times its mean
ON_CPU = "times on CPUs say nothing about GPUs"


def headline(report: RunReport) -> list[tuple[str, str, str]]:
    """Returns the main numbers: name, number and note. No saving is given for CPUs, which do not predict GPUs."""
    t = report.totals
    share = "a single rank sends nothing"
    if t.bytes_usp:
        more = t.bytes_sent / t.bytes_usp - 1
        share = "as much as plain USP" if abs(more) < 0.005 else f"{more:+.0%} against plain USP"
    saved = in_seconds(t.saved_s), f"modelled from ρ_s; perfect balance would save {in_seconds(t.left_s)} more"
    ratios = f"{t.rho_before:.3f} → {t.rho:.3f} × the mean"
    note = f"ρ_s: equal split → db-SP; at best {t.rho_best:.3f}{_if_worse(report)}"
    attention = f"{t.attention_share:.0%} of {in_seconds(report.seconds)}; slowest rank in each attention"
    of_slot = f"{t.row_share:.2f} of a slot's share", f"worst {t.row_share_worst:.2f}; {t.slots} slots"
    return [
        ("work of the slowest rank", ratios, note),
        *([("longest row", *of_slot)] if t.row_share_worst >= SHOWN_ROW else []),
        ("density", f"{t.density:.3f}", "share of blocks computed"),
        ("plans made", f"{t.replans}", f"in {t.calls} attentions of {t.steps} steps; {in_seconds(t.plan_s)} planning"),
        ("strategy", strategies_in_words(report), f"on {report.world_size} ranks, planner {report.planner}"),
        ("sent by all ranks", in_bytes(t.bytes_sent), share),
        ("time in attention", in_seconds(t.attention_s), attention),
        ("saved", *(("–", ON_CPU) if report.environment.on_cpu else saved)),
        *features(report),
    ]


def features(report: RunReport) -> list[tuple[str, str, str]]:
    """Returns rows as in `headline` for a step cache, quantized weights and compilation."""
    rows = []
    if report.skipped:
        skipped, blocks = (sum(counts) for counts in zip(*report.skipped.values(), strict=True))
        shares = [f"{count / max(1, of):.0%} of {name}" for name, (count, of) in report.skipped.items()]
        rows.append(("skipped by the cache", f"{skipped:,} of {blocks:,} blocks", ", ".join(shares)))
    if report.quantized:
        layers, before, after = (sum(counts) for counts in zip(*report.quantized.values(), strict=True))
        weights = f"{in_bytes(before)} → {in_bytes(after)}"
        rows.append(("quantized weights", weights, f"{layers:,} linear layers of {' and '.join(report.quantized)}"))
    if report.compile_s:
        rows.append(("compiling", in_seconds(report.compile_s), f"of {in_seconds(report.seconds)}; rank 0"))
    return rows


def in_a_line(report: RunReport) -> str:
    """Returns one line with the cost of attention and, with several ranks, the effect of balancing."""
    t = report.totals
    parts = [f"attention {t.attention_share:.0%} of {in_seconds(report.seconds)}", f"density {t.density:.3f}"]
    if report.world_size > 1:
        saved = f"{'saved' if t.saved_s >= 0 else 'lost'} {in_seconds(abs(t.saved_s))} (modelled)"
        balance = f"slowest rank's work {t.rho_before:.3f} → {t.rho:.3f} × the mean (ρ_s){_if_worse(report)}"
        parts += [balance, ON_CPU if report.environment.on_cpu else saved]
    if t.row_share_worst >= SHOWN_ROW:
        parts.append(f"longest row {t.row_share:.2f} of a slot's share ({t.slots} slots)")
    return ", ".join(parts)


def _if_worse(report: RunReport) -> str:
    """Returns a note if plans were less balanced than an equal split, else ""."""
    if report.totals.rho < report.totals.rho_before + 5e-4:
        return ""
    lagged = report.environment.settings.get("plan") == "lagged"
    return "; worse, because plans use the previous step's masks: try plan: current" if lagged else "; worse"


def strategies_in_words(report: RunReport) -> str:
    """Returns the strategies of attentions as text, such as "U4R2", or "30 × U4R2, 10 × U8R1"."""
    used = report.totals.strategies
    if len(used) == 1:
        return next(iter(used))
    return ", ".join(f"{count} × {name}" for name, count in used.items())


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to keys such as "mask.source"."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= flat_settings(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def balance_picture(records: Mapping[int, Plan]) -> bytes:
    """Draws a PNG: by layer, the active blocks of each rank before (contiguous) and after, with ρ_s above."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = sorted(records)
    plans = [records[layer] for layer in layers]
    before, after = np.mean([plan.rho_before for plan in plans]), np.mean([plan.rho for plan in plans])
    picture = BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(max(9.0, 1.5 + 0.95 * len(layers)), 6.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 1, sharex=True, sharey=True)
        heading(
            figure,
            f"How even was each layer's last attention? Imbalance ρ_s {before:.3f} → {after:.3f}",
            f"Active blocks by rank, {plans[0].strategy}; dotted: balanced; the report has ρ_s of the whole run",
        )
        middle = np.arange(len(layers))
        rows = (
            ("before: plain sequence parallelism", [(plan.rho_before, plan.compared[1]) for plan in plans]),
            (f"after: planner {plans[0].planner}", [(plan.rho, plan.work) for plan in plans]),
        )
        for axis, (title, numbers) in zip(axes, rows, strict=True):
            work = np.array([totals for _, totals in numbers])  # [layers, ranks]
            ranks = work.shape[1]
            for rank in range(ranks):
                left = middle + (rank - (ranks - 1) / 2) * 0.8 / ranks
                axis.bar(left, work[:, rank], 0.74 / ranks, label=f"rank {rank}", color=rank_colour(rank))
            axis.hlines(work.mean(axis=1), middle - 0.45, middle + 0.45, INK, "dotted")
            for index, (rho, totals) in enumerate(numbers):
                at = (index, totals.max())
                axis.annotate(f"ρ_s {rho:.3f}", at, (0, 7), textcoords="offset points", ha="center", size=9.5)
            axis.set(ylabel="active blocks")
            axis.set_title(title, loc="left")
            axis.margins(y=0.18)
            axis.grid(axis="x", visible=False)
        axes[1].set(xlabel="layer", xticks=middle, xticklabels=layers)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=min(8, len(labels)), loc="outside lower center")
        figure.savefig(picture, format="png")
    return picture.getvalue()


def report_page(report: RunReport, frame: str = "") -> str:
    """Returns the HTML of a report, with tables as text; its script draws heat maps and bars from embedded data.

    `frame` is the video's first frame as a data URI.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("pages"), encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": in_seconds, "bytes": in_bytes}
    data = {"calls": vars(report.calls), "work": report.ranks.work, "before": report.ranks.work_before}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "&<>":  # so that no text ends the script element
        text = text.replace(character, f"\\u{ord(character):04x}")
    return environment.get_template("report.html").render(
        report=report,
        frame=frame,
        totals=report.totals,
        headline=headline(report),
        columns=LAYER_COLUMNS,
        settings=flat_settings(report.environment.settings),
        data=text,
    )
