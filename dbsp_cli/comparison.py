"""Compares the reports of two runs: settings that differ, and numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dbsp_core.reports.page import LayerSummary, flat_settings, in_seconds, layer_summaries, strategies_in_words
from dbsp_core.reports.run_report import RunReport
from dbsp_core.utils.files import in_bytes

__all__ = ["Comparison", "Difference", "compare"]


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


@dataclass(frozen=True)
class Comparison:
    """The settings that differ, the numbers of the whole runs, and by layer a pair of summaries, None without it."""

    settings: list[Difference]
    numbers: list[Difference]
    layers: dict[int, tuple[LayerSummary | None, LayerSummary | None]]

    def to_values(self) -> dict[str, Any]:
        """Returns the comparison for JSON."""
        pairs = {layer: [one and asdict(one) for one in pair] for layer, pair in self.layers.items()}
        return {
            "settings": [asdict(one) for one in self.settings],
            "numbers": [asdict(one) | {"change": one.change} for one in self.numbers],
            "layers": [{"layer": layer, "a": a, "b": b} for layer, (a, b) in pairs.items()],
        }


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


def compare(a: RunReport, b: RunReport) -> Comparison:
    """Compares run b with run a."""
    before, after = _context(a), _context(b)
    settings = [Difference(key, before.get(key), after.get(key)) for key in before | after]
    numbers = [Difference(name, getattr(a.totals, key), getattr(b.totals, key), unit) for name, key, unit in _NUMBERS]
    layers = [{one.layer: one for one in layer_summaries(report)} for report in (a, b)]
    return Comparison(
        settings=[one for one in settings if one.a != one.b],
        numbers=[*numbers, Difference("whole run", a.seconds, b.seconds, "s")],
        layers={layer: (layers[0].get(layer), layers[1].get(layer)) for layer in sorted(layers[0] | layers[1])},
    )


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
