"""Masks of attentions: dense ends, steps and CFG passes inferred from timesteps, errors on all ranks together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dbsp_core import BlockGrid, BlockMask
from dbsp_core.masks.grid import Video
from dbsp_core.masks.steps import MOST_PASSES, DenoisingStep, DenseSchedule, Progress, StepClock
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.sources import MaskRequest, SpargeSource
from dbsp_core.sources.base import BlockSizes
from dbsp_core.utils.errors import UserError
from tests.support.settings import session_of
from tests.support.workers import WorkerError


@dataclass(frozen=True)
class OddOneOut(BlockSizes):
    """Everybody's mask is dense; `rank` does else: "grid", "mask", "bug", "key" (raise), "bits" (differ) or "heads".

    It cannot name its mask ("key") in the second step, in which ranks compare nothing.
    """

    changes = "per_step"
    rank: int = 0
    fault: str = "mask"

    def cache_key(self, request: MaskRequest) -> str:
        if request.step == 1 and self._odd("key"):
            raise ValueError("the table of contents is gone")
        return "always the same"

    def grid(self, request: MaskRequest) -> BlockGrid:
        if self._odd("grid"):
            raise UserError("the file is broken here")
        return super().grid(request)

    def mask(self, request: MaskRequest) -> BlockMask:
        if self._odd("mask"):
            raise UserError("the file is broken here")
        if self._odd("bug"):
            raise KeyError("layer 7")
        mask = BlockMask.dense(request.heads - self._odd("heads"), self.grid(request))
        if self._odd("bits"):
            mask.bits[0, 0, 0] = False
        return mask

    def _odd(self, fault: str) -> bool:
        return self.fault == fault and dist.get_rank() == self.rank


def attend_with(rank: int, world: int, source: BlockSizes) -> None:
    """Attends in two steps, and then meets in a collective, which would hang or fail if ranks were out of step."""
    session = session_of(source, f"U{world}R1", heads=world)
    try:
        for timestep in (900.0, 800.0):
            q = torch.ones(1, world, session.begin(Video((2, 4, 8)), timestep=timestep).shard, 16)
            session.attend(0, q, q, q)
    finally:
        dist.barrier()


def dense_moments(schedule: DenseSchedule, layers: int, timesteps: list[float], steps: int) -> list[list[int]]:
    """Returns the layers that are dense by forward pass."""
    feed = MaskProvider(BlockSizes(), schedule, 2, layers, lambda: steps)
    dense = []
    for timestep in timesteps:
        feed.begin([Video((2, 2, 2))], torch.tensor([timestep, timestep]))
        dense.append([layer for layer in range(layers) if feed.cache_key(layer) == "dense by schedule"])
    return dense


@pytest.mark.parametrize(
    ("world", "source", "kind", "message"),
    [
        (2, OddOneOut(16, 16, rank=1, fault="grid"), "UserError", "rank(s) [1]: the file is broken here"),
        (3, OddOneOut(16, 16, rank=0, fault="mask"), "UserError", "rank(s) [0]: the file is broken here"),
        (3, OddOneOut(16, 16, rank=2, fault="heads"), "UserError", "rank(s) [2]: expected a mask of"),
        (2, OddOneOut(16, 16, rank=1, fault="bug"), "ValueError", "rank(s) [1]: KeyError: 'layer 7'"),
        (3, OddOneOut(16, 16, rank=0, fault="bits"), "UserError", "the mask of layer 0 differs on rank(s)"),
        (3, OddOneOut(16, 16, rank=2, fault="key"), "ValueError", "rank(s) [2]: the table of contents is gone"),
    ],
    ids=str,
)
def test_fault_on_one_rank_raises_on_all(pool, world, source, kind, message):
    with pytest.raises(WorkerError) as raised:
        pool(world).run(attend_with, source)
    assert [rank for rank, *_ in raised.value.errors] == list(range(world))
    assert all(name == kind and message in text for _, name, text in raised.value.errors), raised.value.errors


unread = mock.Mock(side_effect=AssertionError("a timestep on a GPU would be waited for"))


def same_steps(*first: int | None) -> list[tuple[Any, ...]]:
    """Passes at one timestep, distinguished by the index; with `strength` below 1 it does not begin at 0."""
    return [(5.0, number % 2, index) for number, index in enumerate((*first, 7, 7, 8, 8, 9, 9, 7))]


BY_INDEX = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (0, 0)]
PASSES: dict[str, tuple[list[tuple[Any, ...]], list[tuple[int, int]]]] = {
    "timesteps": (
        [(t,) for t in (999, 999, 800, 800, 5, 5, 999, 999, 800)],
        [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (0, 0), (0, 1), (1, 0)],
    ),
    "generations of one step": ([(999.0,)] * 2 * MOST_PASSES, [(0, branch) for branch in range(MOST_PASSES)] * 2),
    # A scheduler has no index until its first step is over; and none again once its timesteps are set anew.
    "an index, and no timestep is read": (
        [(999.0,), (999.0,), (unread, None, 1), (unread, None, 1), (unread, None, 2), (999.0,), (unread, None, 1)],
        [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 0), (1, 0)],
    ),
    "counted from where a generation begins, no index first": (same_steps(None, None), BY_INDEX),
    "counted from where a generation begins": (same_steps(6, 6), BY_INDEX),
    "CFG passes, at timesteps that repeat": (
        [(999, 0), (999, 1), (800, 0), (800, 1), (800, 0), (5, 0), (5, 0), (5, 1), (999, 1), (800, 1)],
        [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (4, 1), (0, 1), (1, 1)],
    ),
}
"""(timestep, CFG pass, scheduler's index) of forward passes, which frameworks pass in part; inferred (step, pass)."""


@pytest.mark.parametrize(("passes", "moments"), PASSES.values(), ids=PASSES)
def test_steps_and_cfg_passes_are_inferred_from_what_the_framework_passes(passes, moments):
    index = None
    clock = StepClock(lambda: Progress(step_index=index))
    found = []
    for timestep, branch, index in ((*one, None, None)[:3] for one in passes):  # noqa: B007  read by the clock
        found.append(clock.advance(timestep, branch))
    assert found == [DenoisingStep(*moment) for moment in moments]


@pytest.mark.parametrize(
    ("passes", "generations"),
    [
        ([(0, 0), (0, 1), (1, 0), (3, 0), (3, 1), (5, 0), (0, 0), (2, 0)], 2),
        ([(4, 0), (5, 0), (4, 0), (5, 0), (5, 1)], 2),
        ([(0, 0), (0, 1), (0, 0), (0, 0), (1, 0)], 3),
    ],
    ids=["skipped steps", "late starts", "cut short in the first step"],
)
def test_steps_that_the_framework_counts_from_0_are_its_own(passes, generations):
    index = 0
    clock = StepClock(lambda: Progress(step_index=index, first_index=0))
    found = []
    for index, branch in passes:  # noqa: B007  read by the clock
        found.append(clock.advance(unread, branch))
    assert [(one.step, one.cfg_branch) for one in found] == passes
    assert [one.generation for one in found] == sorted(one.generation for one in found)
    assert len({one.generation for one in found}) == generations


def test_transformer_that_runs_in_later_steps_of_a_longer_generation_begins_with_it():
    """Two experts: the second begins its first generation in step 2, and the next, which has more steps, in step 5."""
    index = 0
    clock = StepClock(lambda: Progress(step_index=index, first_index=0), shared=True)
    experts = [MaskProvider(SpargeSource(), DenseSchedule(), 2, 1, clock=clock) for _ in range(2)]
    firsts = []
    for index, expert in ((0, 0), (1, 0), (2, 1), (3, 1), (0, 0), (4, 0), (5, 1), (6, 1)):
        if experts[expert].begin([Video((3, 5, 5))], 0.0, 0):
            firsts.append((index, expert))
    assert firsts == [(0, 0), (2, 1), (0, 0), (5, 1)]


def test_dense_ends():
    assert dense_moments(DenseSchedule(), 3, [900, 0], steps=2) == [[], []]
    schedule = DenseSchedule(first_steps=1, last_steps=1, first_layers=1, last_layers=2)
    everything, ends = [0, 1, 2, 3, 4], [0, 3, 4]
    moments = dense_moments(schedule, 5, [900, 900, 600, 600, 300, 300, 0, 0, 900, 600], steps=4)
    assert moments == [everything, everything, ends, ends, ends, ends, everything, everything, everything, ends]


def test_last_steps_need_the_number_of_steps():
    with pytest.raises(ValueError, match="enable db-SP on the pipeline"):
        DenseSchedule(last_steps=1).is_dense(0, 4, 3, None)
