"""`dbsp report`: shows the report of a run, or compares two runs, with imageio and scikit-image also their videos."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from safetensors import SafetensorError
from safetensors.torch import load_file

from dbsp_cli.output import PATH, JsonFlag, TextTable, print_json, print_tables
from dbsp_core.reports.collect import LATENTS
from dbsp_core.reports.page import LAYER_COLUMNS, flat_settings, headline, in_seconds, strategies_in_words
from dbsp_core.reports.run_report import RunReport
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import in_bytes
from dbsp_kernels.errors import install_command


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


def compare_videos(a: Path, b: Path) -> dict[str, float | None]:
    """Compares the videos of two report folders, which must have one mp4 each, of equal size and number of frames.

    Returns "psnr" in dB over all frames, infinite for equal videos, and "ssim", the mean over frames.
    """
    try:
        import imageio.v3  # noqa: F401  read by _frames
        from skimage.metrics import structural_similarity
    except ImportError as error:
        raise UserError(f"{error.name} is needed to compare videos; {install_command('diffusers')}") from error
    squared_error, values, similarities = 0.0, 0, []
    for frame, other in zip_longest(_frames(a), _frames(b)):
        if frame is None or other is None:
            raise UserError(f"the video of {a if frame is None else b} has fewer frames than the other")
        if frame.shape != other.shape:
            sizes = " and ".join(f"{image.shape[1]}×{image.shape[0]}" for image in (frame, other))
            raise UserError(f"the videos have different frame sizes, {sizes}")
        if min(frame.shape[:2]) < 11:  # SSIM's Gaussian window in pixels (Wang et al., 2004, §III.B)
            raise UserError(f"frames of {frame.shape[1]}×{frame.shape[0]} are smaller than SSIM's window of 11×11")
        squared_error += float(((frame - other) ** 2).sum())
        values += frame.size
        setting = {"gaussian_weights": True, "use_sample_covariance": False, "data_range": 1.0}
        similarities.append(float(structural_similarity(frame, other, channel_axis=2, **setting)))
    return {"psnr": _psnr(squared_error / values, 1.0), "ssim": math.fsum(similarities) / len(similarities)}


def compare_latents(a: Path, b: Path) -> dict[str, float | None]:
    """Compares the final latents of two report folders: "latents_psnr" in dB, relative to the value range in a."""
    both = []
    for folder in (a, b):
        try:
            both.append(load_file(folder / LATENTS)["latents"].double())
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(f"{folder} has no readable {LATENTS}") from error
    expected, latents = both
    if expected.shape != latents.shape:
        raise UserError(f"the latents have different shapes, {list(expected.shape)} and {list(latents.shape)}")
    value_range = float(expected.max() - expected.min())
    return {"latents_psnr": _psnr(float((expected - latents).square().mean()), value_range)}


def _frames(folder: Path) -> Iterator[np.ndarray]:
    """Yields frames, float64[H, W, 3] in [0, 1]. Raises UserError unless exactly one mp4 can be read."""
    import imageio.v3 as imageio

    videos = list(folder.glob("*.mp4"))
    if len(videos) != 1:
        raise UserError(f"{folder} has {len(videos) or 'no'} videos, expected one; put exactly one mp4 there")
    try:
        for frame in imageio.imiter(videos[0], plugin="FFMPEG"):
            yield np.asarray(frame, dtype=np.float64) / 255
    except (OSError, RuntimeError, ValueError, IndexError, SyntaxError) as error:
        raise UserError(f"{videos[0]} cannot be read as a video") from error


def _psnr(mean_squared_error: float, value_range: float) -> float:
    return 10 * math.log10(value_range**2 / mean_squared_error) if mean_squared_error else math.inf
