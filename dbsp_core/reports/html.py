"""The page of a run: one HTML file that needs no others. Needs jinja2, which torch installs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbsp_core.reports.run_report import RunReport
from dbsp_core.reports.summary import flat_settings, headline, in_seconds, layer_summaries
from dbsp_core.utils.byte_sizes import in_bytes

__all__ = ["render_page", "report_page"]

_TEMPLATES = Path(__file__).with_name("pages")


def report_page(report: RunReport) -> str:
    """HTML of a report: numbers and tables are text, and its script draws heat maps and bars from embedded data."""
    totals, settings = report.totals, flat_settings(report.environment.settings)
    modelled = [
        ("saved against contiguous plans", in_seconds(totals.saved_s)),
        ("that perfectly even work would still save", in_seconds(totals.left_s)),
    ]
    kinds = [
        ("home → owner (queries, keys, values)", totals.bytes_to_owners),
        ("further chunks (keys, values)", totals.bytes_chunks),
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
        prompt=_prompt(report),
        settings=[(key, json.dumps(value).strip('"')) for key, value in settings.items() if value is not None],
        unset=[key for key, value in settings.items() if value is None],
        data=_embedded({"calls": vars(report.calls), "work": report.ranks.work, "before": report.ranks.work_before}),
    )


def _prompt(report: RunReport) -> str:
    """What the video shows, where the settings say it."""
    video = report.environment.settings.get("video")
    return str(video.get("prompt") or "") if isinstance(video, Mapping) else ""


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
    """JSON for a script element, which no text in it can end."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
