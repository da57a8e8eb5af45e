"""Summaries of a report: its layers, and its main numbers as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dbsp_core.reports.run_report import RunReport
from dbsp_core.utils.byte_sizes import in_bytes

__all__ = [
    "LayerSummary",
    "flat_settings",
    "headline",
    "in_a_line",
    "in_seconds",
    "layer_summaries",
    "strategies_in_words",
]


@dataclass(frozen=True)
class LayerSummary:
    """One layer: means over its attentions, and sums of replans, seconds of the slowest rank, and bytes."""

    layer: int
    calls: int
    density: float
    rho_before: float
    rho: float
    rho_worst: float
    rho_best: float
    replans: int
    seconds: float
    bytes_sent: int


def layer_summaries(report: RunReport) -> tuple[LayerSummary, ...]:
    """The report's layers."""
    calls = report.calls
    layer = np.array(calls.layer, dtype=np.int64)
    sent = np.array([calls.bytes_to_owners, calls.bytes_chunks, calls.bytes_to_homes], dtype=np.int64).sum(axis=0)

    def of(index: int) -> LayerSummary:
        here = layer == index

        def mean(column: Sequence[float]) -> float:
            return float(np.array(column)[here].mean())

        return LayerSummary(
            layer=index,
            calls=int(here.sum()),
            density=mean(calls.density),
            rho_before=mean(calls.rho_before),
            rho=mean(calls.rho),
            rho_worst=float(np.array(calls.rho)[here].max()),
            rho_best=mean(calls.rho_bound),
            replans=int(np.array(calls.replanned)[here].sum()),
            seconds=float(np.array(calls.seconds)[here].sum()),
            bytes_sent=int(sent[here].sum()),
        )

    return tuple(of(index) for index in sorted(set(layer.tolist())))


def headline(report: RunReport) -> list[tuple[str, str, str]]:
    """The main numbers: name, number, and note."""
    t = report.totals
    share = "alone, there is nothing to send"
    if t.bytes_usp:
        more = t.bytes_sent / t.bytes_usp - 1
        share = "as much as plain USP" if abs(more) < 0.005 else f"{more:+.0%} against plain USP"
    return [
        (
            "ρ_s",
            f"{t.rho_before:.3f} → {t.rho:.3f}",
            f"imbalance, slowest rank over mean; contiguous → db-SP; at best {t.rho_best:.3f}",
        ),
        ("density", f"{t.density:.3f}", "share of blocks computed"),
        ("plans made", f"{t.replans}", f"in {t.calls} attentions of {t.steps} steps; {in_seconds(t.plan_s)} planning"),
        ("strategy", strategies_in_words(report), f"on {report.world_size} ranks, planner {report.planner}"),
        ("sent by all ranks", in_bytes(t.bytes_sent), share),
        (
            "time in attention",
            in_seconds(t.attention_s),
            f"{t.attention_share:.0%} of {in_seconds(report.seconds)}; slowest rank of each",
        ),
        ("saved", in_seconds(t.saved_s), f"modelled from ρ_s; perfectly even would save {in_seconds(t.left_s)} more"),
    ]


def in_a_line(report: RunReport) -> str:
    """What attention cost and what balancing brought, in a line. One process has nothing to balance."""
    t = report.totals
    parts = [f"attention {t.attention_share:.0%} of {in_seconds(report.seconds)}", f"density {t.density:.3f}"]
    if report.world_size > 1:
        saved = f"{'saved' if t.saved_s >= 0 else 'lost'} {in_seconds(abs(t.saved_s))} (modelled)"
        parts += [f"ρ_s {t.rho_before:.3f} → {t.rho:.3f}", saved]
    return ", ".join(parts)


def strategies_in_words(report: RunReport) -> str:
    """The strategies of attentions as text, such as "U4R2", or "30 × U4R2, 10 × U8R1"."""
    used = report.totals.strategies
    if len(used) == 1:
        return next(iter(used))
    return ", ".join(f"{count} × {name}" for name, count in used.items())


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by keys such as "mask.source"."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat_settings(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def in_seconds(seconds: float) -> str:
    """A time as text, such as "850 µs", "12.3 ms", "4.56 s" or "12 min 5 s"."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.3g} ms"
    if abs(seconds) < 100:
        return f"{seconds:.3g} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
