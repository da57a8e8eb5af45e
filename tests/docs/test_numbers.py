"""Seconds in README are those of docs/results, and the table of models names every class."""

from __future__ import annotations

import re

from dbsp_diffusers.models import ARCHITECTURES
from tests.docs.results import rows, table
from tests.support.repository import ROOT

MODEL_NAMES = {"Wan2.1 14B": "wan2.1-t2v-14b", "CogVideoX1.5 5B": "cogvideox1.5-5b"}


def test_each_known_class_has_a_row():
    classes = table("docs/diffusers.md", "| class in diffusers | pipelines | |")
    named = [name for cells in classes for name in re.findall(r"`(\w+)`", cells[0])]
    assert sorted(named) == sorted(ARCHITECTURES)
    assert all(pipelines for _, pipelines, _ in classes)
    assert f"{len(ARCHITECTURES)} transformer classes" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_seconds_per_video():
    named, model, mask, density = [], "", "", ""
    for title, of_mask, of_density, gpu, *numbers in table("README.md", "| model, video | mask | density |"):
        model = title.partition(",")[0] or model
        mask, density = of_mask or mask, of_density or density
        name = mask.split("`")[1]
        (row,) = rows("seconds", model=MODEL_NAMES[model], machine=gpu.lower(), gpus="8", mask=name)
        seconds = [f"{float(row[key]):.0f}" for key in ("dense_s", "blind_s", "dbsp_s")]
        gains = [f"{float(row[key]):.2f}×" for key in ("by_sparsity", "by_balance")]
        assert numbers == [*seconds, *gains]
        assert density == f"{float(row['density']):.2f}, {row['origin']}"
        assert ("steps dense" in mask) == (row["dense_steps"] != "0")
        if title:
            assert title.partition(", ")[2] == f"{row['size']}, {row['steps']} steps"
        named.append((model, name, gpu))
    assert len(named) == len(set(named)) == 4
