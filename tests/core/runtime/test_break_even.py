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
from dbsp_core.reports.observer import observed_session
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.sources import LocalQK
from tests.core.runtime.session_cases import HEADS, PREDICTED, WIDTH
from tests.support.attention_cases import shards
from tests.support.oracle import largest_difference
from tests.support.outcomes import said
from tests.support.single_process import masked_attention
from tests.support.thread_ranks import once

LIMIT = 0.55
STEPS, CALLS = 20, 30
"""Steps of a generation, and of both, of which the second is cut short."""
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


def two_generations(
    rank: int,
    world: int,
    settings: dict[str, Any],
    strategy: str,
    calls: int = CALLS,
    timesteps: bool = True,
    training: bool = False,
) -> tuple[list[bool], float, float]:
    """Runs two generations of three layers, or the first `calls` of their passes.

    Returns by call whether it was dense; this rank's largest difference from one process; and, as a negative control,
    the least over dense calls of how far the predicted mask's result is from it.
    """
    config = DbspConfig.load(settings)
    torch.set_grad_enabled(training)  # of this rank's thread
    session = observed_session(config, SequenceGroup.from_group(), Strategy.parse(strategy), HEADS, LAYERS)
    feed = once(lambda: MaskProvider(config.mask, config.dense_schedule, HEADS, LAYERS))
    dense, worst, wrong = [], 0.0, torch.inf
    for call in range(calls):
        generation, step = divmod(call, STEPS)
        timestep = 900.0 - step if timesteps else None
        layout = session.begin(VIDEO, timestep=timestep)
        once(lambda: feed.begin((VIDEO,), timestep))  # noqa: B023  called at once
        for layer in range(LAYERS):
            full, replaced = drawn(layer, step, generation, layout.tokens), session.reuse.replaced[layer]
            local, token, slot = shards(full, layout, rank, padded=True)
            with torch.no_grad():  # as in a reentrant checkpoint
                out = session.attend(layer, *local)[:, :, slot]
            dense.append(session.reuse.replaced[layer] > replaced)
            predicted = once(lambda: feed.mask(layer, LocalQK.alone(*full[:2])))  # noqa: B023
            expected = once(lambda: masked_attention(*full, predicted))[:, :, token]  # noqa: B023
            if dense[-1]:
                wrong = min(wrong, largest_difference(out, expected))
                every_block = BlockMask.dense(HEADS, predicted.grid)
                expected = once(lambda: masked_attention(*full, every_block))[:, :, token]  # noqa: B023
            worst = max(worst, largest_difference(out, expected))
    return dense, worst, wrong


def expected_calls() -> list[bool]:
    """Works out which calls are dense by the masks of one process: the rule again, from the inputs of each step."""
    config = DbspConfig.load(PREDICTED)
    feed, calls = MaskProvider(config.mask, config.dense_schedule, HEADS, LAYERS), []
    seen: dict[int, tuple[int, int, float]] = {}  # by layer the generation, step and density of its last mask
    for call in range(CALLS):
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


@pytest.mark.parametrize("strategy", ["U1R2", "U2R2"])
def test_too_dense_masks_are_replaced_until_they_are_sparse_again(threads, machine, strategy):
    settings = PREDICTED | {"machine": machine}
    answers = threads(Strategy.parse(strategy).world).run(two_generations, settings, strategy)
    calls = expected_calls()
    for dense, worst, wrong in answers:
        assert (dense == calls, worst <= 1e-5) == (True, True)
        assert wrong > 1e-3, "the predicted mask would have given something else"
    by_layer = [calls[layer::LAYERS] for layer in range(LAYERS)]
    first = [False] + [True] * 7 + [False] + [True] * 7 + [False] * 4
    assert by_layer[0] == (first * 2)[:CALLS], "dense, looked at every eight steps, and sparse at the last look"
    assert not any(by_layer[1] + by_layer[2][:5]), "sparse at first"
    assert any(by_layer[2])


UNTOUCHED: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "by step": ({"mask": {**PREDICTED["mask"], "cdf": [PREDICTED["mask"]["cdf"]] * 2}}, True, False),
    "no rates": ({"machine": None}, True, False),
    "part of a union": ({"mask": {"source": "union", "of": [PREDICTED["mask"], PREDICTED["mask"]]}}, True, False),
    "trained with": (
        {"mask": {"source": "vsa", "sparsity": 0.3, "tile": [2, 2, 4], "block_q": 16, "block_k": 16}},
        *(True, False),
    ),
    "no steps": ({}, False, False),
    "training": ({}, True, True),
}
"""Settings, whether there are timesteps, and whether gradients are needed."""


@pytest.mark.parametrize(("settings", "timesteps", "training"), UNTOUCHED.values(), ids=UNTOUCHED)
def test_other_masks_are_never_replaced(threads, machine, settings, timesteps, training):
    settings = PREDICTED | {"machine": machine} | settings
    for dense, worst, _ in threads(2).run(two_generations, settings, "U2R1", 4, timesteps, training):
        assert (any(dense), worst <= 1e-5) == (False, True)


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
