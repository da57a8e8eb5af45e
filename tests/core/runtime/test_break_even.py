"""Predicted masks that are too dense give way to dense attention, and come back, on all ranks at the same calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dbsp_core import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.cost.machine import SHIPPED
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import Video
from dbsp_core.planning.reuse import PlanUse
from dbsp_core.reports.observer import observed_session
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.runtime.session_observer import SessionObserver
from dbsp_core.sources import LocalQK
from tests.core.runtime.session_cases import HEADS, PREDICTED, WIDTH
from tests.support.attention_cases import shards
from tests.support.oracle import largest_difference
from tests.support.outcomes import said
from tests.support.single_process import masked_attention
from tests.support.steady_cases import collectives
from tests.support.thread_ranks import once

LIMIT = 0.55
STEPS = 20
VIDEO = Video((3, 6, 8), 5)
LAYERS = 3


@pytest.fixture
def machine(tmp_path: Path) -> str:
    """A hardware file by which the CPU's kernel has about half of dense attention's rate on active blocks."""
    values = yaml.safe_load((SHIPPED / "cpu-demo.yaml").read_text())
    values["kernels"] = {"cpu": {"source": "assumed", "head_dim": WIDTH}}
    values["constants"]["dense_flops_per_s"] = values["constants"]["flops_per_s"] / LIMIT
    values["sources"]["dense_flops_per_s"] = "assumed"
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def sharpness(layer: int, step: int) -> float:
    """Returns the scale of q and k, which decides how dense a predicted mask is.

    Layer 0 is dense at first and sparse later, layer 1 sparse, and layer 2 sparse at first.
    """
    return {0: 0.3 if step < 10 else 12.0, 1: 12.0, 2: 12.0 if step < 4 else 0.3}[layer]


def drawn(layer: int, step: int, generation: int, tokens: int) -> list[torch.Tensor]:
    """Returns q, k and v of all tokens, float32[1, H, tokens, D]."""
    generator = torch.Generator().manual_seed(LAYERS * (100 * generation + step) + layer)
    q, k, v = torch.randn(3, 1, HEADS, tokens, WIDTH, generator=generator)
    return [q * sharpness(layer, step), k, v]


class UsedMasks(SessionObserver):
    """Notes the density of each attention's mask."""

    def __init__(self) -> None:
        self.uses: list[PlanUse] = []

    def attention_ends(self, layer: int, prepared: PreparedAttention, q: torch.Tensor, use: PlanUse) -> None:
        self.uses.append(use)


def two_generations(
    rank: int, world: int, settings: dict[str, Any], strategy: str, timesteps: bool = True, training: bool = False
) -> tuple[list[bool], list[float], float]:
    """Runs two generations of three layers.

    Returns:
        By call whether it was dense; this rank's largest difference from one process by call; and, as a negative
        control, the least over dense calls of how far the predicted mask's result is from it.
    """
    config, used = DbspConfig.load(settings), UsedMasks()
    torch.set_grad_enabled(training)  # of this rank's thread
    session = observed_session(config, SequenceGroup.from_group(), Strategy.parse(strategy), HEADS, LAYERS)
    session.observers.append(used)
    feed = once(lambda: MaskProvider(config.mask, config.dense_schedule, HEADS, LAYERS))
    dense, worst, wrong = [], [], []
    for call in range(2 * STEPS):
        generation, step = divmod(call, STEPS)
        timestep = 900.0 - step if timesteps else None
        layout = session.begin(VIDEO, timestep=timestep)
        once(lambda: feed.begin((VIDEO,), timestep))  # noqa: B023  called at once
        for layer in range(LAYERS):
            full = drawn(layer, step, generation, layout.tokens)
            local, token, slot = shards(full, layout, rank, padded=True)
            with torch.no_grad():  # as in a reentrant checkpoint
                out = session.attend(layer, *local)[:, :, slot]
            use = used.uses[-1]
            dense.append(use.counted is not None and use.counted.density == 1)
            predicted = once(lambda: feed.mask(layer, LocalQK.alone(*full[:2])))  # noqa: B023
            masks = {True: BlockMask.dense(HEADS, predicted.grid), False: predicted}
            both = (dense[-1], not dense[-1])
            right, other = (masked_attention(*full, masks[is_dense])[:, :, token] for is_dense in both)
            worst.append(largest_difference(out, right))
            if dense[-1]:
                wrong.append(largest_difference(out, other))
    session.flush()
    assert sum(session.reuse.replaced.values()) == sum(dense)
    return dense, worst, min(wrong, default=torch.inf)


def expected_calls() -> list[bool]:
    """Works out which calls are dense by the masks of one process: the rule again, from the inputs of each step."""
    config = DbspConfig.load(PREDICTED)
    feed, calls = MaskProvider(config.mask, config.dense_schedule, HEADS, LAYERS), []
    seen: dict[int, tuple[int, int, float]] = {}  # by layer the generation, step and density of its last mask
    for call in range(2 * STEPS):
        generation, step = divmod(call, STEPS)
        feed.begin((VIDEO,), 900.0 - step)
        for layer in range(LAYERS):
            last = seen.get(layer)
            is_dense = last is not None and last[:2] >= (generation, step // 8 * 8) and last[2] >= LIMIT
            calls.append(is_dense)
            if not is_dense:
                full = drawn(layer, step, generation, VIDEO.tokens)
                mask = feed.mask(layer, LocalQK.alone(*full[:2]))
                seen[layer] = generation, step, float(mask.bits.float().mean())
    return calls


@pytest.mark.parametrize("strategy", ["U2R1", "U1R2", "U3R1", "U1R3", "U2R2"])
def test_too_dense_masks_are_replaced_until_they_are_sparse_again(threads, machine, strategy):
    settings = PREDICTED | {"machine": machine}
    answers = threads(Strategy.parse(strategy).world).run(two_generations, settings, strategy)
    calls = expected_calls()
    for dense, worst, wrong in answers:
        assert dense == calls
        assert max(worst) <= 1e-5
        assert wrong > 1e-3, "the predicted mask would have given something else"
    by_layer = [calls[layer::LAYERS] for layer in range(LAYERS)]
    first = [False] + [True] * 7 + [False] + [True] * 7 + [False] * 4
    assert by_layer[0] == first * 2, "dense, looked at every eight steps, and sparse at the last look"
    assert not any(by_layer[1])
    assert any(by_layer[2])
    assert not any(by_layer[2][:5]), "sparse at first"


UNTOUCHED: dict[str, dict[str, Any]] = {
    "by step": {"mask": {**PREDICTED["mask"], "cdf": [PREDICTED["mask"]["cdf"], PREDICTED["mask"]["cdf"]]}},
    "no rates": {},
    "part of a union": {"mask": {"source": "union", "of": [PREDICTED["mask"], PREDICTED["mask"]]}},
    "trained with": {"mask": {"source": "vsa", "sparsity": 0.3, "tile": [2, 2, 4], "block_q": 16, "block_k": 16}},
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_other_masks_are_never_replaced(threads, machine, name):
    settings = PREDICTED | ({} if name == "no rates" else {"machine": machine}) | UNTOUCHED[name]
    for dense, worst, _ in threads(2).run(two_generations, settings, "U2R1"):
        assert not any(dense)
        assert max(worst) <= 1e-5


@pytest.mark.parametrize(("timesteps", "training"), [(False, False), (True, True)], ids=["no steps", "training"])
def test_masks_are_predicted_at_every_call_without_steps_and_in_training(threads, machine, timesteps, training):
    settings = PREDICTED | {"machine": machine}
    for dense, _, _ in threads(2).run(two_generations, settings, "U2R1", timesteps, training):
        assert not any(dense)


@torch.no_grad()
def collectives_by_step(rank: int, world: int, settings: dict[str, Any]) -> list[dict[str, int]]:
    """Returns what each of 18 steps of two dense layers and a sparse one starts to send and receive."""
    strategy = Strategy(world, 1)
    session = observed_session(DbspConfig.load(settings), SequenceGroup.from_group(), strategy, HEADS, 2)
    counts = []
    for step in range(18):
        with collectives() as seen:
            layout = session.begin(VIDEO, timestep=900.0 - step)
            for layer in range(2):
                q, k, v = (t[:, :, : layout.shard] for t in drawn(0, 0, 0, VIDEO.tokens + world))
                session.attend(layer, q if layer else q * 40, k, v)
        counts.append(dict(seen))
    assert session.reuse.replaced == ({1: 15} if "machine" in settings else {})
    return counts


def test_replaced_masks_add_no_collective_to_steady_passes(pool, machine):
    """Counts passes with a dense layer against those of the same inputs without rates, whose masks are predicted."""
    kept, replaced = (
        pool(2).run(collectives_by_step, PREDICTED | {"reuse": 100.0} | more)[0] for more in ({}, {"machine": machine})
    )
    steady = kept[3]
    assert all(seen == steady for seen in kept[3:])
    assert "all_gather" not in steady
    assert replaced[1].get("all_gather", 0) > 0, "ranks compare the first dense mask, like any that is new"
    for step, seen in enumerate(replaced[3:], 3):
        fewer = {name: number for name, number in seen.items() if number < steady[name]}
        assert seen.keys() <= steady.keys()
        assert all(number <= steady[name] for name, number in seen.items()), (step, seen)
        assert bool(fewer) == (step % 8 > 0), "nothing is exchanged to predict a mask that is not"


def rates_differ(rank: int, world: int, settings: dict[str, Any], other: str) -> str:
    """Attends with another hardware file on the last rank. Returns what is raised."""
    config = DbspConfig.load(settings if rank < world - 1 else settings | {"machine": other})
    session = observed_session(config, SequenceGroup.from_group(), Strategy(world, 1), HEADS, 1)
    layout = session.begin(VIDEO, timestep=900.0)
    return said(lambda: session.attend(0, *torch.randn(3, 1, HEADS, layout.shard, WIDTH)))


def test_ranks_with_other_rates_raise_together(threads, machine, tmp_path):
    other = tmp_path / "other.yaml"
    values = yaml.safe_load(Path(machine).read_text(encoding="utf-8"))
    values["constants"]["dense_flops_per_s"] /= 2
    other.write_text(yaml.safe_dump(values))
    for text in threads(2).run(rates_differ, PREDICTED | {"machine": machine}, str(other)):
        assert "the break-even density of dense attention differs on rank(s)" in text
