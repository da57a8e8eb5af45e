"""Published times of sequence parallelism and the model's: the CSV has every row, and the page what it says."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from dbsp_core.cost.machine import load_hardware
from scripts.reproduce import published, worth
from tests.docs.results import rows, table
from tests.support.repository import ROOT

PAGE = " ".join((ROOT / "docs" / "results" / "fast.md").read_text(encoding="utf-8").split())


def tables() -> list[list[dict[str, str]]]:
    """Returns the rows of each published table."""
    groups = itertools.groupby(rows("published"), lambda row: (row["table"], row["machine"], row["video"]))
    return [list(group) for _, group in groups]


def in_percent(errors: list[float]) -> str:
    """Returns the least and the largest of errors, or "fitted" if there are none."""
    percents = [round(100 * error) for error in errors]
    texts = [f"{percent:+d}".replace("-", "−") if percent else "0" for percent in sorted({*percents})]
    return f"{' to '.join(dict.fromkeys((texts[0], texts[-1])))} %" if texts else "fitted"


def span_of(values: list[float]) -> str:
    """Returns the least and the largest of values, or "–" if there are none."""
    return "–".join(dict.fromkeys((f"{min(values):.2f}", f"{max(values):.2f}"))) if values else "–"


def test_tables_are_what_the_model_says_today(monkeypatch):
    """Compares the fitted rows, one held-out row of each kind of size, and what engines are fitted to."""
    records = published.read_records()
    chosen = [record for record in records if record["fitted"] or record["model"] == "minimax-h3"]
    monkeypatch.setattr(published, "read_records", lambda: chosen)
    made = {(row.table, row.machine, row.video, row.gpus, row.strategy): row for row in published.measure()}
    kept = [row for row in rows("published") if row["half"] == "fitted" or row["model"] == "minimax-h3"]
    assert len(made) == len(kept) == len(chosen)
    for row in kept:
        now = made[row["table"], row["machine"], row["video"], int(row["gpus"]), row["strategy"]]
        assert now.modelled_s == pytest.approx(float(row["modelled_s"]), rel=1e-3)
        assert now.half == row["half"]
        if now.half == "fitted":
            assert now.modelled_s == pytest.approx(now.measured_s)
    assert sorted(row["engine"] for row in kept if row["half"] == "fitted") == sorted(published.speeds(records))


def test_the_page_says_what_the_tables_of_each_engine_and_machine_show():
    page = {first: others for first, *others in table("docs/results/fast.md", "| engine, machine | error of each")}
    errors, scalings = defaultdict(list), defaultdict(list)
    for first, *more in tables():
        name = f"{first['engine']}, {first['machine']}"
        errors[name] += [float(first["error"])] if first["half"] == "held out" else []
        scalings[name] += [float(row["scaling"]) / float(row["modelled_scaling"]) for row in more]
    assert page == {name: [in_percent(errors[name]), span_of(scalings[name])] for name in errors}


def test_the_page_says_each_engines_speed():
    speeds = {row["engine"]: row["speed"] for row in rows("published")}
    for engine, speed, of_it, worst in table("docs/results/fast.md", "| engine | speed |"):
        held = [row for row in rows("published") if row["engine"] == engine and row["half"] == "held out"]
        errors = [abs(float(row["error"])) for row in held]
        assert (speed, of_it) == (f"{float(speeds.pop(engine)):.2f}", str(len(held)))
        assert worst == (f"{100 * max(errors):.0f} %" if errors else "–")
    assert not speeds


def test_the_page_says_where_sparse_attention_helps():
    found = rows("worth")
    errors = {machine: [] for machine in worth.ENGINES}
    for row in found:
        if row["published"]:
            errors[row["machine"]].append(100 * (float(row["gain"]) / float(row["published"]) - 1))
    near = max(abs(error) for machine in ("h200", "h20") for error in errors[machine])
    assert f"within {near:.0f} % on H200s and H20s" in PAGE
    assert f"on B200s it is {min(errors['b200']):.0f} to {max(errors['b200']):.0f} % too high" in PAGE
    gains = {
        (row["density"], row["tokens"]): float(row["gain"])
        for row in found
        if row["machine"] == "h200" and row["kernel"] == "triton"
    }
    first, last, half = gains["0.25", "8000"], gains["0.25", "256000"], gains["0.5", "45300"]
    assert f"a quarter gain {first:.2f} times at 8,000 tokens and {last:.2f} at 256,000" in PAGE
    assert f"keep half gain {half:.2f} times at 45,300 tokens" in PAGE
    assert f"three quarters gain {max(gain for (d, _), gain in gains.items() if d == '0.75'):.2f} at most" in PAGE
    b200 = load_hardware("b200")
    rates = b200.constants
    assert f"is {rates.dense_flops_per_s / rates.flops_per_s:.1f} times as fast for each block" in PAGE
    assert f"below {b200.break_even(64, 64, 128, 100_000):.2f} (at 100,000 tokens)" in PAGE


def test_published_gains_are_beside_the_modelled_ones():
    """Compares the picture's rows with the model, and the page's largest error with the rows."""
    found = rows("worth")
    dots = [row for row in found if row["published"]]
    assert len(dots) == len((published.TABLES.with_name("subblock.csv")).read_text().splitlines()) - 1
    speeds = published.speeds(published.read_records())
    for row in (row for row in dots if row["machine"] == "b200"):
        size = int(row["gpus"]), int(row["tokens"])
        now = worth.gain_of("b200", *size, worth.SUBBLOCK, speeds["sglang"], worth.SUBBLOCK_OF_DENSE)
        assert now == pytest.approx(float(row["gain"]), abs=1e-3)
    for machine in worth.ENGINES:
        lines = [float(row["gain"]) for row in found if row["machine"] == machine and row["density"] == "0.1"]
        assert lines == sorted(lines), "the longer the video, the more there is to gain"
