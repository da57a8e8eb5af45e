"""The strategy predicted to be fastest: chosen identically on all ranks, changed where it pays, and exact."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dbsp_core import BlockGrid, BlockMask, SequenceGroup, SequenceLayout, Strategy, make_plan
from dbsp_core.config import DbspConfig
from dbsp_core.cost import prediction
from dbsp_core.cost.machine import RULE, Hardware, load_hardware, measured_file, save_hardware
from dbsp_core.cost.prediction import AttentionShape, StrategySelector, by_rule, candidates, predict
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.process import log
from tests.core.cost.latency_cases import machine
from tests.diffusers.test_enable import run_steps
from tests.support.workers import WorkerError


def choose_together(rank: int, world: int, settings: dict[str, Any], odd: int = -1) -> list[str]:
    """Returns the strategies of two layers of synthetic masks.

    {} in the hardware's name represents 1 on rank `odd` and 0 on the others
    """
    hardware = settings["machine"].format(int(rank == odd))
    mask = {"source": "synthetic", "density": 0.4, "block_q": 8, "block_k": 8}
    config = DbspConfig.load({**settings, "machine": hardware, "mask": mask, "strategy": "auto"})
    session = AttentionSession(config, SequenceGroup.from_group(), config.strategy_or(None), heads=5, layers=2)
    try:
        layout = session.begin(Video((3, 8, 8)))
        q = torch.ones(1, 5, layout.shard, 16)
        for layer in range(2):
            session.attend(layer, q, q, q)
    finally:
        dist.barrier()
    return [str(plan.strategy) for plan in session.records.values()]


def choose_unmeasured(rank: int, world: int, cache: str) -> tuple[list[str], list[str]]:
    """Returns the strategies of two layers without a hardware profile, and the log lines on costs.

    {} in the cache's name represents the rank.
    """
    said: list[str] = []
    config = DbspConfig.load(
        {"mask": {"source": "synthetic", "density": 0.4, "block_q": 8, "block_k": 8}, "strategy": "auto"}
    )
    with (
        mock.patch.dict("os.environ", {"XDG_CACHE_HOME": cache.format(rank)}),
        mock.patch.object(log, "info", lambda text, *values: said.append(text % values)),
    ):
        session = AttentionSession(config, SequenceGroup.from_group(), None, heads=5, layers=2)
        try:
            q = torch.ones(1, 5, session.begin(Video((3, 8, 8))).shard, 16)
            for layer in range(2):
                session.attend(layer, q, q, q)
        finally:
            dist.barrier()
    strategies = [str(plan.strategy) for plan in session.records.values()]
    return strategies, [line for line in said if line.startswith("costs")]


GRID = BlockGrid.uniform(64 * 16, 16)
HEADS = 8
SHAPE = AttentionShape(1, HEADS, 64, 2)
NODE = (0,) * 4
LAYOUT = SequenceLayout.named("striped", GRID, Strategy(1, 4))


def mask_of(seed: int) -> BlockMask:
    rng = np.random.default_rng(seed)
    density = rng.uniform(0, 1, (HEADS, 1, 1))
    return BlockMask(rng.random((HEADS, GRID.nq, GRID.nk)) < density, GRID)


def selector(**constants: float) -> StrategySelector:
    hardware = load_hardware("a800")
    hardware = replace(hardware, constants=replace(hardware.constants, **constants))
    return StrategySelector(candidates(4, GRID), hardware, NODE, LAYOUT)


def planned(mask: BlockMask):
    return lambda strategy: make_plan(mask, strategy, layout=LAYOUT)


def test_int8_makes_another_strategy_the_fastest():
    """Compares a ring, all of whose transfers shrink, with Ulysses, whose output does not."""
    grid = BlockGrid.uniform(4096, 64)
    mask = BlockMask(np.ones((8, grid.nq, grid.nk), dtype=bool), grid)
    known = machine(exchange_bytes_per_s=1.0, p2p_bytes_per_s=0.9)
    layout, shape = SequenceLayout.contiguous(4096, 2), AttentionShape(1, 8, 128)
    chosen = {}
    for precision in ("model", "int8"):
        make = functools.partial(make_plan, mask, planner="contiguous", layout=layout, precision=precision)
        chooser = StrategySelector((Strategy(2, 1), Strategy(1, 2)), known, (0, 0), layout)
        chosen[precision] = str(chooser.choose(lambda one, make=make: make(strategy=one), shape, None).strategy)
    assert chosen == {"model": "U2R1", "int8": "U1R2"}


@pytest.mark.parametrize("seed", range(5))
def test_chosen_strategy_is_predicted_to_be_fastest(seed):
    mask, chooser = mask_of(seed), selector()
    plan = chooser.choose(planned(mask), SHAPE, None)
    seconds = [
        predict(make_plan(mask, s, layout=LAYOUT), SHAPE, chooser.hardware, NODE, LAYOUT).total_s
        for s in Strategy.all_for(4)
    ]
    assert predict(plan, SHAPE, chooser.hardware, NODE, LAYOUT).total_s <= min(seconds) + 1e-9


def test_slow_exchanges_or_rings_change_the_choice():
    mask = mask_of(0)
    dear_rings = selector(p2p_latency_s=1.0)
    assert dear_rings.choose(planned(mask), SHAPE, None).strategy == Strategy(4, 1)
    dear_exchanges = selector(exchange_bytes_per_s=1e3)
    assert dear_exchanges.choose(planned(mask), SHAPE, None).strategy.ring > 1


def test_strategy_in_use_is_kept_for_a_small_loss(monkeypatch):
    mask = mask_of(1)
    plans = {s: planned(mask)(s) for s in Strategy.all_for(4)}
    known = selector().hardware
    seconds = {s: predict(plan, SHAPE, known, NODE, LAYOUT).total_s for s, plan in plans.items()}
    best, second = sorted(seconds, key=seconds.__getitem__)[:2]
    loss = 1 - seconds[best] / seconds[second]
    assert loss > 0
    for hysteresis, current, kept in ((loss * 1.01, second, second), (loss * 0.99, second, best), (0.9, None, best)):
        monkeypatch.setattr(prediction, "HYSTERESIS", hysteresis)
        assert selector().choose(planned(mask), SHAPE, current).strategy == kept


def test_rings_need_blocks_and_a_kernel_that_merges():
    few = BlockGrid.uniform(40, 16)
    assert [str(s) for s in candidates(8, few)] == ["U8R1", "U4R2"]
    assert [str(s) for s in candidates(8, GRID, merges=False)] == ["U8R1"]


def test_unequal_constants_raise_on_all_ranks(pool, tmp_path):
    hardware: Hardware = load_hardware("a800")
    save_hardware(tmp_path / "0.yaml", hardware)
    save_hardware(tmp_path / "1.yaml", replace(hardware, constants=replace(hardware.constants, overlap=0.5)))
    with pytest.raises(WorkerError) as raised:
        pool(3).run(choose_together, {"machine": str(tmp_path / "{}.yaml")}, 1)
    errors = raised.value.errors
    assert [rank for rank, *_ in errors] == [0, 1, 2]
    assert all("the hardware file differs on rank(s) [1]" in text for *_, text in errors), errors


@pytest.mark.parametrize(
    ("model", "source"),
    [("wan", {"source": "sparge", "cdf": 0.5, "similarity": 0.0}), ("cogvideox", {"source": "svg", "bandwidth": 0.2})],
)
def test_attention_with_the_chosen_strategy_is_exact(pool, model, source):
    config = {
        "mask": {"block_q": 16, "block_k": 8, **source}, "strategy": "auto", "machine": "a800",
    }  # fmt: skip
    pool(4).run(run_steps, model, (4, 5, 7), config)


NODES = [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("heads", "nodes", "first", "last"),
    [
        (40, [0] * 8, "U8R1", "U1R8"),
        (12, [0] * 8, "U8R1", "U1R8"),
        (5, [0] * 8, "U4R2", "U8R1"),
        (40, NODES, "U8R2", "U16R1"),
        (6, NODES, "U4R4", "U16R1"),
        (40, range(4), "U1R4", "U4R1"),
        (40, [0, 1] * 4, "U1R8", "U8R1"),
        (40, [0, 0, 0, 1, 1, 1], "U3R2", "U6R1"),
    ],
)
def test_rule_without_constants_prefers_heads_within_a_node_and_rings_between_nodes(heads, nodes, first, last):
    found = by_rule(Strategy.all_for(len(nodes)), heads, nodes)
    assert (str(found[0]), str(found[-1])) == (first, last)
    assert by_rule(found[::-1], heads, nodes) == found


def test_rule_without_constants_plans_the_first_strategy_alone():
    mask, made = mask_of(0), []

    def make(strategy: Strategy):
        made.append(str(strategy))
        return planned(mask)(strategy)

    chooser = StrategySelector(candidates(4, GRID), None, NODE, LAYOUT)
    assert str(chooser.choose(make, SHAPE, Strategy(1, 4)).strategy) == "U4R1"
    assert made == ["U4R1"], "no other strategy is planned"


@pytest.mark.parametrize(("world", "strategy"), [(2, "U2R1"), (4, "U4R1")])
def test_ranks_without_measured_constants_choose_by_the_rule(pool, tmp_path, world, strategy):
    answers = pool(world).run(choose_unmeasured, str(tmp_path))
    for rank, (strategies, said) in enumerate(answers):
        assert strategies == [strategy] * 2
        assert said == ([f"costs are estimated by {RULE}"] if rank == 0 else [])


def test_ranks_with_measured_constants_choose_by_them(pool, tmp_path, monkeypatch):
    """Uses constants with slow exchanges and kernels, with which a ring is predicted to be faster."""
    constants = replace(load_hardware("cpu-demo").constants, exchange_bytes_per_s=1.0, flops_per_s=1.0)
    measured = replace(load_hardware("cpu-demo"), name="here", constants=constants)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured_file("cpu").parent.mkdir(parents=True)
    save_hardware(measured_file("cpu"), measured)
    (first, said), (second, _) = pool(2).run(choose_unmeasured, str(tmp_path))
    assert first == second == ["U1R2"] * 2
    assert said == [f"costs are estimated by constants of here, measured on {measured.device}"]


def test_measured_constants_on_one_rank_raise_on_all(pool, tmp_path, monkeypatch):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "1"))
    measured_file("cpu").parent.mkdir(parents=True)
    save_hardware(measured_file("cpu"), load_hardware("cpu-demo"))
    with pytest.raises(WorkerError) as raised:
        pool(2).run(choose_unmeasured, str(tmp_path / "{}"))
    assert all("the hardware file differs on rank(s) [1]" in text for *_, text in raised.value.errors)
    assert len(raised.value.errors) == 2
