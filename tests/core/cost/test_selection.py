"""The strategy predicted to be fastest: chosen identically on all ranks, changed where it pays, and exact."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, Strategy, make_plan
from dbsp_core.cost import prediction
from dbsp_core.cost.machine import RULE, Hardware, load_hardware, measured_file, save_hardware
from dbsp_core.cost.prediction import AttentionShape, StrategySelector, by_rule, candidates, predict
from tests.core.cost.latency_cases import machine
from tests.core.cost.selection_cases import choose_together, choose_unmeasured
from tests.para.para_cases import ParaCase, run_sparge_case
from tests.support.workers import WorkerError

GRID = BlockGrid.uniform(64 * 16, 16)
HEADS = 8
SHAPE = AttentionShape(1, HEADS, 64, 2)
NODE = (0,) * 4
HOME = SequenceLayout.named("striped", GRID, Strategy(1, 4))


def mask_of(seed: int) -> BlockMask:
    rng = np.random.default_rng(seed)
    density = rng.uniform(0, 1, (HEADS, 1, 1))
    return BlockMask(rng.random((HEADS, GRID.nq, GRID.nk)) < density, GRID)


def selector(**constants: float) -> StrategySelector:
    hardware = load_hardware("a800")
    hardware = replace(hardware, constants=replace(hardware.constants, **constants))
    return StrategySelector(candidates(4, GRID), hardware, NODE, HOME)


def planned(mask: BlockMask):
    return lambda strategy: make_plan(mask, strategy, layout=HOME)


def test_int8_makes_another_strategy_the_fastest():
    """It spares a ring all that it sends, and Ulysses all but the output."""
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
def test_no_strategy_is_predicted_to_be_faster(seed):
    mask, chooser = mask_of(seed), selector()
    plan = chooser.choose(planned(mask), SHAPE, None)
    seconds = [
        predict(make_plan(mask, s, layout=HOME), SHAPE, chooser.hardware, NODE, HOME).total_s
        for s in Strategy.all_for(4)
    ]
    assert predict(plan, SHAPE, chooser.hardware, NODE, HOME).total_s <= min(seconds) + 1e-9


def test_dear_exchanges_and_dear_rings_change_the_choice():
    mask = mask_of(0)
    dear_rings = selector(p2p_latency_s=1.0)
    assert dear_rings.choose(planned(mask), SHAPE, None).strategy == Strategy(4, 1)
    dear_exchanges = selector(exchange_bytes_per_s=1e3)
    assert dear_exchanges.choose(planned(mask), SHAPE, None).strategy.ring > 1


def test_a_strategy_in_use_is_kept_for_a_small_loss(monkeypatch):
    mask = mask_of(1)
    plans = {s: planned(mask)(s) for s in Strategy.all_for(4)}
    known = selector().hardware
    seconds = {s: predict(plan, SHAPE, known, NODE, HOME).total_s for s, plan in plans.items()}
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


def test_ranks_with_other_constants_are_rejected(pool, tmp_path):
    hardware: Hardware = load_hardware("a800")
    save_hardware(tmp_path / "0.yaml", hardware)
    save_hardware(tmp_path / "1.yaml", replace(hardware, constants=replace(hardware.constants, overlap=0.5)))
    with pytest.raises(WorkerError) as raised:
        pool(3).run(choose_together, {"machine": str(tmp_path / "{}.yaml")}, 1)
    errors = raised.value.errors
    assert [rank for rank, *_ in errors] == [0, 1, 2]
    assert all("the hardware file differs on rank(s) [1]" in text for *_, text in errors), errors


@pytest.mark.parametrize("model", ["wan", "cogvideox"])
@pytest.mark.parametrize(
    "source", [{"source": "sparge", "cdf": 0.5, "similarity": 0.0}, {"source": "svg", "bandwidth": 0.2}]
)
def test_whatever_is_chosen_is_exact(pool, model, source):
    config = {
        "mask": {"block_q": 16, "block_k": 8, **source}, "strategy": "auto", "machine": "a800",
    }  # fmt: skip
    case = ParaCase(model, thw=(4, 5, 7), config=config)
    for rank in pool(4).run(run_sparge_case, case):
        assert all(difference <= 1e-5 for difference, *_ in rank), rank


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
def test_without_constants_heads_are_distributed_within_a_node_and_rings_join_nodes(heads, nodes, first, last):
    found = by_rule(Strategy.all_for(len(nodes)), heads, nodes)
    assert (str(found[0]), str(found[-1])) == (first, last)
    assert by_rule(found[::-1], heads, nodes) == found


def test_without_constants_only_the_first_strategy_by_the_rule_is_planned():
    mask, made = mask_of(0), []

    def make(strategy: Strategy):
        made.append(str(strategy))
        return planned(mask)(strategy)

    chooser = StrategySelector(candidates(4, GRID), None, NODE, HOME)
    assert str(chooser.choose(make, SHAPE, Strategy(1, 4)).strategy) == "U4R1"
    assert made == ["U4R1"], "no other strategy is planned"


@pytest.mark.parametrize(("world", "strategy"), [(2, "U2R1"), (4, "U4R1")])
def test_ranks_choose_by_the_rule_where_nothing_was_measured(pool, tmp_path, world, strategy):
    answers = pool(world).run(choose_unmeasured, str(tmp_path))
    for rank, (strategies, said) in enumerate(answers):
        assert strategies == [strategy] * 2
        assert said == ([f"costs are estimated by {RULE}"] if rank == 0 else [])


def test_ranks_choose_by_the_constants_that_were_measured(pool, tmp_path, monkeypatch):
    """A ring is predicted to be faster where exchanges take longest and no kernel hides them."""
    constants = replace(load_hardware("cpu-demo").constants, exchange_bytes_per_s=1.0, flops_per_s=1.0)
    measured = replace(load_hardware("cpu-demo"), name="here", constants=constants)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured_file("cpu").parent.mkdir(parents=True)
    save_hardware(measured_file("cpu"), measured)
    (first, said), (second, _) = pool(2).run(choose_unmeasured, str(tmp_path))
    assert first == second == ["U1R2"] * 2
    assert said == [f"costs are estimated by constants of here, measured on {measured.device}"]


def test_ranks_of_which_one_has_measured_raise_together(pool, tmp_path, monkeypatch):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "1"))
    measured_file("cpu").parent.mkdir(parents=True)
    save_hardware(measured_file("cpu"), load_hardware("cpu-demo"))
    with pytest.raises(WorkerError) as raised:
        pool(2).run(choose_unmeasured, str(tmp_path / "{}"))
    assert all("the hardware file differs on rank(s) [1]" in text for *_, text in raised.value.errors)
    assert len(raised.value.errors) == 2
