"""The page of a run: one HTML file with everything in it, which opens offline. Needs jinja2, which torch brings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbsp_core.reports.run_report import RunReport
from dbsp_core.reports.summary import headline, in_seconds, layer_summaries
from dbsp_core.utils.byte_sizes import in_bytes

__all__ = ["render_page", "report_page"]

_TEMPLATES = Path(__file__).with_name("pages")


def report_page(report: RunReport) -> str:
    """HTML. Numbers and tables stand in it as text; heat maps and bars are drawn by its script from the data below."""
    totals = report.totals
    modelled = [
        ("saved against contiguous plans", in_seconds(totals.saved_s)),
        ("that perfectly even work would still save", in_seconds(totals.left_s)),
    ]
    kinds = [
        ("home → owner (queries, keys, values)", totals.bytes_to_owners),
        ("ring rotation (keys, values)", totals.bytes_ring),
        ("owner → home (outputs)", totals.bytes_to_homes),
        ("sum", totals.bytes_sent),
        ("plain USP would send", totals.bytes_usp),
    ]
    return render_page(
        "report.html",
        report=report,
        totals=totals,
        headline=headline(report),
        modelled=modelled,
        kinds=[(name, in_bytes(count), f"{count:,}") for name, count in kinds],
        layers=layer_summaries(report),
        ranks=list(enumerate(zip(report.ranks.attention_s, report.ranks.bytes_sent, strict=True))),
        settings=_flat(report.environment.settings),
        data=_embedded({"calls": vars(report.calls), "work": report.ranks.work, "before": report.ranks.work_before}),
    )


def render_page(name: str, **values: Any) -> str:
    """HTML of a template in the folder `pages`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": in_seconds, "bytes": in_bytes}
    return environment.get_template(name).render(**values)


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element: no text in it can end that."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """("mask.source", "window") and so on."""
    found: list[tuple[str, str]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, "–" if value is None else json.dumps(value).strip('"')))
    return found
