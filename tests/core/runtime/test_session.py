"""A session through changes of batch, size, mask and settings: what it keeps is never used for something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from dbsp_core import BlockGrid, BlockMask, SequenceGroup
from dbsp_core.comm.exchange import Exchange
from dbsp_core.comm.groups import CommunicationError
from dbsp_core.masks.grid import Video
from dbsp_core.masks.steps import MOST_PASSES
from dbsp_core.reports.observer import run_observer
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.session import MOST_SIZES
from dbsp_core.sources import CallableSource, MaskRequest, WindowSource
from dbsp_core.sources.base import BlockSizes
from dbsp_kernels import KERNELS
from tests.core.runtime.session_cases import HEADS, PREDICTED, THW, WIDTH, Session
from tests.support.oracle import largest_difference
from tests.support.workers import assert_all_raise


def drifting(grid: BlockGrid, request: MaskRequest, slope: float = 0.0) -> np.ndarray:
    """Returns random masks whose heads grow and shrink from step to step; another one for each layer and pass."""
    score = np.random.default_rng([request.layer, request.cfg_branch]).random((request.heads, grid.nq, grid.nk))
    density = 0.5 + slope * request.step * np.linspace(-1, 1, request.heads)
    return score < density[:, None, None]


def by_step(function: Callable[..., np.ndarray], **parameters: float) -> CallableSource:
    return CallableSource(16, 16, function, parameters, depends_on="step")


def run_passes(
    rank: int, world: int, settings: dict[str, Any], strategy: str, passes: Sequence[dict[str, Any]], layers: int = 2
) -> SimpleNamespace:
    """Runs a forward pass for each of these arguments of `Session.attend`, as the steps of one generation."""
    steps = len({one["timestep"] for one in passes})
    session = Session(settings, strategy, layers=layers, steps=steps)
    worst, plans = 0.0, []
    for one in passes:
        worst = max(worst, session.attend(**one))
        plans.append(session.inner.reuse.plans)
    inner, sizes, used = session.inner, session.inner._sizes.values(), session.inner.records.values()
    slots = [slot for size in sizes for slot in size.slots.values()]
    return SimpleNamespace(
        exact=worst <= 1e-5,
        calls=inner.reuse.calls,
        plans=plans,  # made until the end of each pass
        kept=sum(slot.use is not None for slot in slots),  # plans
        prepared=len({id(slot.prepared) for slot in slots}),
        known=len({mask.key[0] for size in sizes for mask in size.masks.values()}),  # sizes
        keys={plan.chunks.keys for plan in used},
        split_heads=sum(plan.split_heads for plan in used),
        least_sent=min(float(plan.chunks.sent.mean(axis=(1, 2)).min()) * plan.strategy.ulysses for plan in used),
    )


def settings_on_one_rank(rank: int, world: int, odd: int, settings: dict[str, Any], others: dict[str, Any]) -> Any:
    """Runs a pass of a session with other settings on one rank. Returns its report's folder."""
    session = Session(settings if rank == odd else others, f"U{world}R1")
    session.attend(900.0)
    session.inner.flush()
    observer = run_observer(session.inner)
    return None if observer is None else observer.folder, observer is not None


def a_wrong_input(rank: int, world: int, odd: int, fault: str, debug: bool) -> None:
    """Runs a forward pass with a fault on one rank."""
    changed = {
        "size": {"thw": (3, 6, 8)},
        "pass": {"cfg_branch": 1},
        "layer": {"layer": 1},
        "scale": {"scale": 2.0},
    }.get(fault if rank == odd else "", {})
    given = {"thw": THW, "cfg_branch": 0, "layer": 0, "scale": 1.0} | changed
    try:
        session = Session(PREDICTED | {"debug": debug}, f"U{world}R1", layers=2).inner
        layout = session.begin(Video(given["thw"]), timestep=900.0, cfg_branch=given["cfg_branch"])
        q = torch.zeros(1, HEADS, layout.shard, WIDTH)
        if rank == odd:
            others = {"batch": q.repeat(2, 1, 1, 1), "dtype": q.double(), "shard": q[:, :, 1:]}
            q = (others | {"gradients": q.clone().requires_grad_()}).get(fault, q)
        session.attend(given["layer"], q, q, q, scale=given["scale"])
    finally:
        dist.barrier()


def computed_again_after_another_size(rank: int, world: int) -> float:
    """Recomputes an attention after a larger video's pass. Returns how far gradients are off."""
    gradients = []
    for recompute in (False, True):
        session = Session({"mask": WindowSource(16, 16, window=(1, 3, 3))}, f"U{world}R1").inner
        shard = session.begin(Video(THW), timestep=900.0).shard
        q = torch.linspace(0, 1, HEADS * shard * WIDTH).view(1, HEADS, shard, WIDTH).requires_grad_()
        out = checkpoint(session.attend, 0, q, q, q, use_reentrant=False) if recompute else session.attend(0, q, q, q)
        with torch.no_grad():
            larger = torch.ones(1, HEADS, session.begin(Video((5, 6, 10)), timestep=900.0).shard, WIDTH)
            session.attend(0, larger, larger, larger)
        out.square().sum().backward()
        gradients.append(q.grad)
    return largest_difference(*gradients)


def an_attention_that_breaks_off(rank: int, world: int, odd: int, reuse: float) -> tuple[int, list[float]]:
    """Fails in the exchange of outputs on all ranks, except one that fails before the mask is predicted.

    Returns plans in use afterwards, and the errors of the next generation.
    """
    session = Session(PREDICTED | {"reuse": reuse}, f"U{world}R1")
    for step in range(3):
        session.attend(900.0 - step)
    gone, group = CommunicationError("a rank has gone"), session.inner.group
    target = (MaskProvider, "mask") if rank == odd else (SequenceGroup, "all_gather_along")
    left = session.inner.passes.last.size.predicted_calls
    with mock.patch.object(*target, side_effect=gone), pytest.raises(CommunicationError):
        session.attend(890.0)
    size = session.inner.passes.last.size
    if rank != odd:  # as if these had gone on to the end, with the route that the next call needs
        size.predicted_calls += 1
    else:
        (slot,) = size.slots.values()
        slot.prepared = None
    dist.barrier(group.group)
    errors = [session.attend(900.0 - step) for step in range(3)]
    return size.predicted_calls - left, errors


def order_of_steps(rank: int, world: int, debug: bool, batches: Sequence[int]) -> list[tuple[str, float]]:
    """Runs a step with each batch. Returns by step what was done in which order, and the error.

    "s", an exchange started: of q, k and v, of a chunk, of the output;  "m", the mask was predicted
    """
    session = Session(PREDICTED | {"reuse": 100.0, "debug": debug}, f"U1R{world}")
    start, predict, done, found = Exchange.start, MaskProvider.mask, [], []

    def watched_start(*given: Any) -> Any:
        done.append("s")
        return start(*given)

    def watched_predict(provider: MaskProvider, *given: Any) -> BlockMask:
        if provider is session.inner._provider:
            done.append("m")
        return predict(provider, *given)

    with mock.patch.object(Exchange, "start", watched_start), mock.patch.object(MaskProvider, "mask", watched_predict):
        for step, batch in enumerate(batches):
            error = session.attend(900.0 - step, batch=batch)
            found.append(("".join(done), error))
            done.clear()
    return found


@dataclass(frozen=True)
class Growing(BlockSizes):
    """Two bands, the second wider and of all steps but the first."""

    changes = "per_step"

    def cache_key(self, request: MaskRequest) -> int:
        return min(1, request.step)

    def mask(self, request: MaskRequest) -> BlockMask:
        grid = self.grid(request)
        distance = np.abs(np.arange(grid.nq)[:, None] - np.arange(grid.nk))
        return BlockMask(np.tile(distance <= 1 + min(1, request.step), (request.heads, 1, 1)), grid)


def without_the_middle(grid: BlockGrid, request: MaskRequest) -> np.ndarray:
    """Returns masks in which no row attends to the middle key blocks."""
    return np.tile(np.isin(np.arange(grid.nk), (2, 3), invert=True), (grid.nq, 1))


@pytest.mark.parametrize(("ragged", "keys"), [(True, "needed"), (False, "all")])
def test_keys_that_no_row_reads_are_sent_to_kernels_of_whole_heads(monkeypatch, threads, ragged, keys):
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], ragged_rows=ragged))
    settings = {"mask": CallableSource(16, 16, without_the_middle, depends_on="nothing"), "kernel": "cpu"}
    for found in threads(5).run(run_passes, settings, "U5R1", [{"timestep": 900.0}], 1):
        assert (found.exact, found.keys) == (True, {keys})


@pytest.mark.parametrize(
    ("mask", "ranks", "planner"),
    [("known", 2, "dbsp"), ("predicted", 3, "dbsp"), ("known", 4, "dbsp"), ("predicted", 3, "paper")],
)
def test_plans_for_kernels_of_whole_heads_split_none(monkeypatch, threads, mask, ranks, planner):
    """Five heads of unequal work: without this limit planner dbsp splits some, and the kernel is rejected."""
    whole = replace(KERNELS["cpu"], ragged_rows=False, returns_lse=False)
    monkeypatch.setitem(KERNELS, "cpu", whole)
    source = PREDICTED["mask"] if mask == "predicted" else by_step(drifting, slope=0.05)
    settings = {"mask": source, "kernel": "cpu", "reuse": 1.0, "planner": planner}
    for strategy in (f"U{ranks}R1", "auto"):
        for found in threads(ranks).run(run_passes, settings, strategy, steps(3)):
            assert (found.exact, found.split_heads) == (True, 0)
    monkeypatch.setattr(type(whole), "why_unsupported_anywhere", lambda *_: None)
    splits = [found.split_heads for found in threads(ranks).run(run_passes, settings, f"U{ranks}R1", steps(3))]
    assert all(splits) == (planner == "dbsp"), "with kernels of any rows, heads are split"


@pytest.mark.parametrize(
    ("changes", "passed", "message"),
    [
        ({"ragged_rows": False}, {"text_tokens": 21}, "it supports only whole heads, but heads are split"),
        ({"least_tokens": 200}, {}, "it needs at least 200 tokens per head, got 180"),
    ],
)
def test_limits_of_a_kernel_are_reported_on_all_ranks_at_the_first_attention(
    monkeypatch, threads, changes, passed, message
):
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], **changes))
    settings = PREDICTED | {"kernel": "cpu"}
    assert_all_raise(threads, 2, message, run_passes, settings, "U2R1", [{"timestep": 1.0} | passed])


@pytest.mark.parametrize(
    ("world", "strategy", "reuse"), [(2, "U1R2", 1.0), (4, "U2R2", 9.0), (6, "U2R3", 1.0), (3, "auto", 9.0)]
)
def test_predicted_masks_are_sent_the_keys_that_they_need(threads, world, strategy, reuse):
    """Each call has another mask, and keeps a plan only if its keys are among those that the plan sends."""
    few = {"mask": PREDICTED["mask"] | {"cdf": 0.2}, "plan": "current", "keys": "needed", "reuse": reuse}
    passes = [{"timestep": 900.0 - step, "batch": 1 + step % 2} for step in range(4)]
    for found in threads(world).run(run_passes, few, strategy, passes):
        assert (found.exact, found.keys) == (True, {"needed"})
        assert found.least_sent < 0.9


LAYERS = PASSES = 2


def steps(count: int, passes: int = 1) -> list[dict[str, object]]:
    """Returns arguments of `count` steps of `passes` passes each."""
    return [{"timestep": 900.0 - step} for step in range(count) for _ in range(passes)]


@pytest.mark.parametrize(("strategy", "batches"), [("U2R1", [1, 1, 2, 2, 1]), ("U1R2", [2, 2, 1, 1, 2])])
def test_plan_for_another_batch_is_not_used(threads, strategy, batches):
    """Switches guidance on or off between calls of one size, after a plan for the old heads was made."""
    passes = [{"timestep": 900.0 - step, "batch": batch, "settle": True} for step, batch in enumerate(batches)]
    for found in threads(2).run(run_passes, PREDICTED | {"reuse": 1.0}, strategy, passes, 1):
        assert found.exact
        assert found.plans[-1] > 2, "plans must have been waiting"


def test_static_mask_is_planned_once_however_imbalanced(threads):
    """Distributes five equal heads over two ranks: three and two, above P_s."""
    settings = {"mask": WindowSource(16, 16, window=(1, 3, 3)), "planner": "contiguous"}
    for found in threads(2).run(run_passes, settings, "U2R1", steps(3, PASSES)):
        assert (found.exact, found.calls, found.plans[-1]) == (True, 3 * PASSES * LAYERS, 1)
    growing = {"mask": Growing(16, 16), "planner": "contiguous"}
    for found in threads(2).run(run_passes, growing, "U2R1", steps(5)):
        assert found.plans[-1] == 2, "one for each of the masks, which layers share"


class TestMasksThatChangeByStep:
    @pytest.mark.parametrize("slope", [0.0, 0.01])
    def test_plans_are_kept_from_step_to_step(self, threads, slope):
        for found in threads(2).run(run_passes, {"mask": by_step(drifting, slope=slope)}, "U2R1", steps(8, PASSES)):
            assert (found.exact, found.calls) == (True, 8 * PASSES * LAYERS)
            assert found.plans[-1] >= LAYERS * PASSES, "each attention has one of its own"
            assert found.plans[-1] <= LAYERS * PASSES * (1 if slope == 0 else 5), "and not one a step"
            assert found.kept == found.prepared == LAYERS * PASSES, "what steps behind had is dropped"

    def test_dense_steps_have_one_plan(self, threads):
        settings = {"mask": by_step(drifting), "dense_schedule": {"first_steps": 2, "last_steps": 2}}
        for found in threads(2).run(run_passes, settings, "U2R1", steps(9, PASSES)):
            assert (found.exact, found.calls) == (True, 9 * PASSES * LAYERS)
            assert found.plans[-1] == LAYERS * PASSES + 1


def test_plans_of_passes_that_cannot_be_distinguished_are_limited(threads):
    for found in threads(2).run(run_passes, PREDICTED | {"reuse": 9.0}, "U2R1", steps(1, MOST_PASSES + 3)):
        assert found.exact
        assert found.plans[-1] == found.kept == found.prepared == LAYERS * MOST_PASSES, "kept by later generations"


class TestSizes:
    def test_alternating_sizes_keep_their_plans(self, threads):
        passes = [one | {"text_tokens": text} for one in steps(4) for text in (7, 20)]
        for found in threads(2).run(run_passes, PREDICTED | {"reuse": 1.10}, "U2R1", passes, 1):
            assert (found.exact, found.plans[-1]) == (True, 2)

    def test_dropped_sizes_are_forgotten(self, threads):
        settings = {"mask": {"source": "callable", "function": "tests.support.user_masks:band", "depends_on": "step"}}
        passes = [{"timestep": 900.0, "text_tokens": text} for text in range(MOST_SIZES + 2)]
        assert [one.known for one in threads(2).run(run_passes, settings, "U2R1", passes, 1)] == [MOST_SIZES] * 2


class TestSettings:
    @pytest.mark.parametrize("other", [{"mask": PREDICTED["mask"] | {"cdf": 0.9}}, {"reuse": 1.3}, {"debug": True}])
    def test_other_settings_on_one_rank_raise_on_all(self, threads, other):
        message = "the settings differ on rank(s) [1]"
        assert_all_raise(threads, 3, message, settings_on_one_rank, 1, PREDICTED | other, PREDICTED)

    def test_report_set_on_one_rank_is_made_by_all(self, pool, tmp_path):
        asked = PREDICTED | {"report": str(tmp_path)}
        assert pool(2).run(settings_on_one_rank, 1, asked, PREDICTED) == [(str(tmp_path), True)] * 2


class TestInputs:
    @pytest.mark.parametrize(
        ("fault", "debug", "message"),
        [
            ("batch", False, "or whether they need gradients, differ on rank(s) [1]"),
            ("dtype", False, "or whether they need gradients, differ on rank(s) [1]"),
            ("gradients", False, "or whether they need gradients, differ on rank(s) [1]"),
            ("shard", False, "rank(s) [1]: q of shape (1, 5, 59, 16) does not fit: the model has 5 heads"),
            ("size", False, "differs on rank(s) [1]"),
            ("scale", True, "the softmax scale differs on rank(s) [1]"),
            ("layer", False, "rank(s) [1] are at another layer's attention"),
            ("pass", False, "the denoising step or CFG pass differs on rank(s) [1]"),
        ],
    )
    def test_input_that_differs_on_one_rank_raises_on_all(self, pool, fault, debug, message):
        assert_all_raise(pool, 3, message, a_wrong_input, 1, fault, debug)

    def test_recomputation_after_a_pass_of_another_size_is_exact(self, threads):
        assert threads(2).run(computed_again_after_another_size) == [0.0] * 2


@pytest.mark.parametrize(("odd", "reuse"), [(0, 1.0), (2, 1.0), (2, 100.0)])
def test_plans_are_dropped_after_a_pass_that_ranks_left_at_different_calls(pool, odd, reuse):
    """Guards against decisions by the counts of different calls, and by routes that only some ranks have."""
    for calls, errors in pool(3).run(an_attention_that_breaks_off, odd, reuse):
        assert calls == 0, "as many calls as before the failure, since all plans were dropped"
        assert max(errors) <= 1e-5


@pytest.mark.parametrize(
    ("debug", "orders"),
    [(False, ["msss", "smss", "smss", "smsss", "smss", "msss", "smss"]), (True, ["msss"] * 7)],
    ids=["steady", "debug"],
)
def test_q_k_and_v_leave_before_a_mask_is_predicted(pool, debug, orders):
    """But in the first call, under debug, and where the batch had other heads; one more leaves the first in vain."""
    for found in pool(2).run(order_of_steps, debug, [1, 1, 1, 2, 2, 1, 1]):
        assert [order for order, _ in found] == orders
        assert max(error for _, error in found) <= 1e-5
