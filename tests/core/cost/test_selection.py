"""The strategy predicted to be fastest: chosen identically on all ranks, changed where it pays, and exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceGroup, SequenceLayout, Strategy, make_plan
from dbsp_core.config import DbspConfig
from dbsp_core.cost import prediction
from dbsp_core.cost.machine import Hardware, load_hardware, measured_file, save_hardware
from dbsp_core.cost.prediction import AttentionShape, StrategySelector, by_rule, candidates, predict
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.process import log
from tests.core.runtime.session_cases import Session
from tests.support.workers import assert_all_raise


def choose(rank: int, world: int, machine: str | None, cache: str = "") -> tuple[list[str], list[str]]:
    """Returns the strategies of two layers of synthetic masks, and the log lines on costs.

    {} represents the rank in `machine`, a hardware profile's name, and in the cache's folder.
    """
    said: list[str] = []
    mask = {"source": "synthetic", "density": 0.4, "block_q": 8, "block_k": 8}
    config = DbspConfig.load({"mask": mask, "machine": machine and machine.format(rank), "strategy": "auto"})
    with (
        mock.patch.dict("os.environ", {"XDG_CACHE_HOME": cache.format(rank)}),
        mock.patch.object(log, "info", lambda text, *values: said.append(text % values)),
    ):
        session = AttentionSession(config, SequenceGroup.from_group(), None, heads=5, layers=2)
        q = torch.ones(1, 5, session.begin(Video((3, 8, 8))).shard, 16)
        for layer in range(2):
            session.attend(layer, q, q, q)
    strategies = [str(plan.strategy) for plan in session.records.values()]
    return strategies, [line for line in said if line.startswith("cost model")]


GRID = BlockGrid.uniform(64 * 16, 16)
HEADS = 8
SHAPE = AttentionShape(1, HEADS, 64, 2)
NODE = (0,) * 4
LAYOUT = SequenceLayout.named("striped", GRID, Strategy(1, 4))


def test_fastest_strategy_is_chosen_but_the_one_in_use_kept_for_a_small_loss(monkeypatch):
    rng = np.random.default_rng(1)
    mask = BlockMask(rng.random((HEADS, GRID.nq, GRID.nk)) < rng.uniform(0, 1, (HEADS, 1, 1)), GRID)
    known = load_hardware("a800")
    plans = {s: make_plan(mask, s, layout=LAYOUT) for s in Strategy.all_for(4)}
    seconds = {s: predict(plan, SHAPE, known, NODE, LAYOUT).total_s for s, plan in plans.items()}
    best, second = sorted(seconds, key=seconds.__getitem__)[:2]
    loss = 1 - seconds[best] / seconds[second]
    assert loss > 0
    for hysteresis, current, kept in ((loss * 1.01, second, second), (loss * 0.99, second, best), (0.9, None, best)):
        monkeypatch.setattr(prediction, "HYSTERESIS", hysteresis)
        chooser = StrategySelector(candidates(4, GRID), known, NODE, LAYOUT)
        assert chooser.choose(plans.__getitem__, SHAPE, current).strategy == kept


def attended(rank: int, world: int, mask: dict[str, object]) -> float:
    """Returns how far attention with the chosen strategy is from one process's."""
    return Session({"mask": {"block_q": 16, "block_k": 8, **mask}, "machine": "a800"}, "auto").attend(900.0)


def test_attention_with_the_chosen_strategy_is_exact(threads):
    assert max(threads(4).run(attended, {"source": "sparge", "cdf": 0.5})) <= 1e-5


NODES = [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("heads", "nodes", "first", "last"),
    [
        (40, [0] * 8, "U8R1", "U1R8"),
        (5, [0] * 8, "U4R2", "U8R1"),
        (40, NODES, "U8R2", "U16R1"),
        (40, range(4), "U1R4", "U4R1"),
        (40, [0, 1] * 4, "U1R8", "U8R1"),
        (40, [0, 0, 0, 1, 1, 1], "U3R2", "U6R1"),
    ],
)
def test_rule_without_constants_prefers_heads_within_a_node_and_rings_between_nodes(heads, nodes, first, last):
    found = by_rule(Strategy.all_for(len(nodes)), heads, nodes)
    assert (str(found[0]), str(found[-1])) == (first, last)
    assert by_rule(found[::-1], heads, nodes) == found


def measure(monkeypatch, cache: Path, hardware: Hardware) -> None:
    """Saves a profile as that of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    save_hardware(measured_file("cpu"), hardware)


def test_ranks_with_measured_constants_choose_by_them(pool, tmp_path, monkeypatch):
    """Uses constants with slow exchanges and kernels, with which a ring is predicted to be faster."""
    constants = replace(load_hardware("cpu-demo").constants, exchange_bytes_per_s=1.0, flops_per_s=1.0)
    measured = replace(load_hardware("cpu-demo"), name="here", constants=constants)
    measure(monkeypatch, tmp_path, measured)
    (first, said), (second, _) = pool(2).run(choose, None, str(tmp_path))
    assert first == second == ["U1R2"] * 2
    assert said == ["cost model: constants of here (measured, exchanges measured)"]


@pytest.mark.parametrize("machine", ["{}.yaml", None], ids=["other constants", "measured on one rank"])
def test_hardware_that_differs_on_one_rank_raises_on_all(pool, tmp_path, monkeypatch, machine):
    hardware = load_hardware("cpu-demo")
    other = replace(hardware, constants=replace(hardware.constants, overlap=0.5))
    for rank in range(3):
        save_hardware(tmp_path / f"{rank}.yaml", other if rank == 1 else hardware)
    measure(monkeypatch, tmp_path / "1", hardware)
    profile = machine and str(tmp_path / machine)
    message = "the hardware file differs on rank(s) [1]"
    assert_all_raise(pool, 3, message, choose, profile, str(tmp_path / "{}"))
