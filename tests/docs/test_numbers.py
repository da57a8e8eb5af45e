"""Numbers and names in tables and claims of README and other pages are those of docs/results and the code."""

from __future__ import annotations

import re

import pytest

from dbsp_core.cost.machine import load_hardware
from dbsp_diffusers.models import ARCHITECTURES
from tests.docs.results import rows, table
from tests.support.repository import ROOT

TEXT = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
MODEL_NAMES = {"Wan2.1 14B": "wan2.1-t2v-14b", "CogVideoX1.5 5B": "cogvideox1.5-5b"}
STRATEGIES = ("U8R1", "U4R2", "U2R4", "U1R8")
PLANS = (("contiguous", "contiguous"), ("snake", "contiguous"), ("contiguous", "striped"), ("paper", "contiguous"))
"""Planners and layouts of the columns of docs/results/even.md, but for our own."""


def said(pattern: str) -> list[float]:
    """Returns the numbers in the only match of a pattern in README."""
    (found,) = re.findall(pattern, TEXT)
    return [float(one) for one in ([found] if isinstance(found, str) else found)]


def balanced(strategy: str, planner: str, layout: str, *keys: str) -> list[float]:
    """Returns numbers of balanced.csv on one way to plan Wan2.1-14B's masks."""
    (row,) = rows("balanced", preset="wan2.1-t2v-14b", strategy=strategy, planner=planner, layout=layout)
    return [float(row[key]) for key in keys]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_table_of_balance(strategy):
    (row,) = (row for row in table("docs/results/even.md", "| | before | snake | striped |") if row[0] == strategy)
    *columns, paper_moved, ours, ours_moved, _ = [
        [float(one) for one in re.findall(r"[\d.]+", cell)] for cell in row[1:]
    ]
    for (planner, layout), cell in zip((*PLANS, ("dbsp", "striped")), (*columns, ours), strict=True):
        assert cell == pytest.approx(balanced(strategy, planner, layout, "rho", "rho_max"), abs=0.00051), planner
    for plan, (moved,), within in ((PLANS[-1], paper_moved, 0.51), (("dbsp", "striped"), ours_moved, 0.051)):
        assert moved == pytest.approx(100 * balanced(strategy, *plan, "moved")[0], abs=within), plan


def test_each_known_class_has_a_row():
    classes = table("docs/diffusers.md", "| class in diffusers | pipelines | |")
    named = [name for cells in classes for name in re.findall(r"`(\w+)`", cells[0])]
    assert sorted(named) == sorted(ARCHITECTURES)
    assert all(pipelines for _, pipelines, _ in classes)
    assert said(r"(\d+) transformer classes") == [len(ARCHITECTURES)]


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


def test_densities_at_which_dense_attention_is_faster():
    hardware = load_hardware("h200")
    found = table("docs/latency-model.md", "| H200, D = 128, bf16 |")
    assert len(found) == 4
    for kernel, ratio, *limits in found:
        name, block_q, block_k = re.fullmatch(r"`([\w-]+)`, (\d+)×(\d+)", kernel).groups()
        of_kernel, blocks = hardware.with_kernel(name), (int(block_q), int(block_k))
        rates = of_kernel.at_blocks(*blocks)
        assert ratio == f"{rates.flops_per_s / rates.dense_flops_per_s:.3f}"
        tokens = (6_000, 32_760, 75_600, 115_000)
        assert limits == [f"{of_kernel.break_even(*blocks, 128, n):.2f}" for n in tokens]
