"""Published times of sequence parallelism and the model's: the CSVs have every row as it is made today."""

from __future__ import annotations

import pytest

from scripts.reproduce import published, worth
from tests.docs.results import rows


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


def test_published_gains_are_beside_the_modelled_ones():
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
