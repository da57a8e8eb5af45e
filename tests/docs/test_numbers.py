"""Numbers and names in tables and claims of README and other pages are those of docs/results and the code."""

from __future__ import annotations

import importlib.util
import re

import pytest

from dbsp_diffusers.models import ARCHITECTURES
from tests.docs.results import rows, table
from tests.support.repository import ROOT

TEXT = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
MODEL_NAMES = {"Wan2.1 14B": "wan2.1-t2v-14b", "CogVideoX1.5 5B": "cogvideox1.5-5b"}
STRATEGIES = ("U8R1", "U4R2", "U2R4", "U1R8")
IN_USE = ("slow drift, 50 steps", "trained model, 50 steps")
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


def rho(strategy: str, planner: str, layout: str = "contiguous") -> float:
    return balanced(strategy, planner, layout, "rho")[0]


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


def test_seconds_of_minimax_h3():
    """Compares the table alone: the engine's tests run the page's commands."""
    found = table("docs/minimax-h3.md", "| attention | ")
    kept = rows("h3", machine="h100")
    assert len(found) == len(kept)
    for attention, way, _, milliseconds in found:
        (row,) = [row for row in kept if (row["attention"], row["way"]) == (attention, way)]
        digits = len(milliseconds.partition(".")[2])
        assert float(milliseconds) == round(float(row["attention_ms"]), digits), row


def test_each_known_class_has_a_row():
    classes = table("docs/diffusers.md", "| class in diffusers | pipelines | |")
    named = [name for cells in classes for name in re.findall(r"`(\w+)`", cells[0])]
    assert sorted(named) == sorted(ARCHITECTURES)
    assert all(pipelines for _, pipelines, _ in classes)
    assert said(r"(\d+) transformer classes") == [len(ARCHITECTURES)]


def test_seconds_per_video():
    named, model = [], ""
    for title, gpu, *seconds in table("README.md", "| model, video | GPU |"):
        model = title.partition(",")[0] or model
        (row,) = rows("seconds", model=MODEL_NAMES[model], machine=gpu.lower(), gpus="8")
        assert [float(one) for one in seconds] == [round(float(row[key])) for key in ("dense_s", "blind_s", "dbsp_s")]
        if title:
            assert title.partition(", ")[2] == f"{row['size']}, {row['steps']} steps"
        named.append((model, gpu))
    assert len(named) == len(set(named)) == 4


def test_what_planners_leave():
    even, snake, ours = said(r"equal split has ([\d.]+) \| ([\d.]+) \| – \| ([\d.]+) \|")
    assert even == round(rho("U8R1", "contiguous"), 3)
    assert snake == round(rho("U8R1", "snake"), 3)
    assert ours == round(rho("U8R1", "dbsp", "striped"), 3)


def test_how_even_fresh_plans_are():
    ours = [round(rho(one, "dbsp", "striped"), 3) for one in STRATEGIES]
    before = [round(rho(one, "contiguous"), 2) for one in STRATEGIES]
    pattern = (
        r"does ([\d.]+) to ([\d.]+) times the mean work, where .*? has ([\d.]+) to ([\d.]+) \(counted, (\d+) layers"
    )
    layers = rows("balanced", preset="wan2.1-t2v-14b")[0]["layers"]
    assert said(pattern) == [min(ours), max(ours), min(before), max(before), float(layers)]


def test_how_even_plans_are_in_use():
    of_default = [row for row in rows("reuse", threshold="1.02") if row["series"] in IN_USE]
    assert {row["series"] for row in of_default} == set(IN_USE)
    means = [round(float(row["rho"]), 3) for row in of_default]
    worst = round(max(float(row["rho_worst"]) for row in of_default), 2)
    assert said(r"\[([\d.]+) to ([\d.]+) in the mean, ([\d.]+) in the worst call\]") == [min(means), max(means), worst]


def test_how_much_faster_videos_are():
    ends = [row for row in rows("clusters") if row["cluster"].startswith("8 ") and "end to end" in row["figure"]]
    modelled = [round(extreme(float(row[key]) for row in ends), 2) for extreme, key in ((min, "least"), (max, "most"))]
    theirs = [float(one) for row in ends for one in row["theirs"].split("–")]
    assert said(r"([\d.]+) to ([\d.]+) times end to end on 8 GPUs, modelled") == modelled
    assert said(r"the paper measured ([\d.]+) to ([\d.]+)\]") == [min(theirs), max(theirs)]


def test_what_masks_cost():
    at_85, at_95 = (rows("quality", source="sparge cdf", setting=f"cdf {cdf}") for cdf in ("0.85", "0.95"))
    numbers = said(r"keep ([\d.]+) dB of PSNR against dense videos at density ([\d.]+) and ([\d.]+) dB at ([\d.]+)")
    for (psnr, density), found in zip((numbers[:2], numbers[2:]), (at_85, at_95), strict=True):
        assert psnr == round(mean(found, "psnr"))
        assert density == round(mean(found, "density"), 2)


def mean(found: list[dict[str, str]], key: str) -> float:
    return sum(float(row[key]) for row in found) / len(found)


def test_what_vllm_omni_does():
    (row,) = rows("engines", engine="vllm-omni", case="75 tokens, Ulysses, 2 ranks")
    assert said(r"not tried \| ([\d.e-]+) off \| exact") == [
        float(row["stock"].removeprefix("differs from one process: "))
    ]
    (row,) = rows("engines", engine="vllm-omni", case="block-sparse, ring, 2 ranks")
    assert row["stock"].startswith("not run: the kernel of its ring needs a GPU")
    assert f"vLLM-Omni {row['version'].rpartition('.')[0]}" in TEXT


@pytest.mark.parametrize(
    "message", ["does not support ring parallelism", "h must be divisible", "use_spargeattn_head_balance"]
)
def test_what_xdit_says_is_in_its_source(message):
    xfuser = importlib.util.find_spec("xfuser")
    if xfuser is None:
        pytest.skip("xfuser is not installed")
    assert message in TEXT
    (folder,) = xfuser.submodule_search_locations
    sources = (
        path
        for part in ("core", "model_executor/layers", "config")
        for path in ROOT.joinpath(folder, part).rglob("*.py")
    )
    assert any(message in path.read_text(encoding="utf-8") for path in sources)
