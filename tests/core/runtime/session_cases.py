"""What the workers run: sessions whose batch, size, masks or settings change, against attention in one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, SequenceGroup, SequenceLayout, make_plan
from dbsp_core.comm.exchange import Route
from dbsp_core.comm.groups import CommunicationError
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.reports.observer import observed_session, run_observer
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import LocalQK, MaskRequest, WindowSource
from dbsp_core.sources.base import BlockSizes
from dbsp_core.sources.head_shares import gather_bits
from dbsp_core.utils.process import package_versions
from tests.support.single_process import masked_attention
from tests.support.thread_ranks import once

HEADS, WIDTH, THW = 5, 16, (3, 6, 10)


@dataclass(frozen=True)
class Drifting(BlockSizes):
    """Random masks whose heads grow and shrink from step to step; another one for each layer and pass."""

    changes = "per_step"
    slope: float = 0.0

    def cache_key(self, request: MaskRequest) -> tuple[int, int, int]:
        return request.layer, request.step, request.cfg_branch

    def mask(self, request: MaskRequest) -> BlockMask:
        grid = self.grid(request)
        rng = np.random.default_rng([request.layer, request.cfg_branch])
        score = rng.random((request.heads, grid.nq, grid.nk))
        density = 0.5 + self.slope * request.step * np.linspace(-1, 1, request.heads)
        return BlockMask(score < density[:, None, None], grid)


@dataclass
class Session:
    """One rank of a session that attends and compares. strategy: UxRy or auto; device, dtype: of its q, k and v."""

    settings: dict[str, Any]
    strategy: str
    layers: int = 1
    steps: int = 50
    heads: int = HEADS
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    inner: AttentionSession = field(init=False)
    feed: MaskProvider = field(init=False)

    def __post_init__(self) -> None:
        config, strategy = (
            DbspConfig(**self.settings),
            None if self.strategy == "auto" else Strategy.parse(self.strategy),
        )
        self.inner = observed_session(
            config, SequenceGroup.from_group(), strategy, self.heads, self.layers, lambda: self.steps
        )
        self.feed = once(self._feed_alone)

    def _feed_alone(self) -> MaskProvider:
        """Returns the masks of one process, from a source of its own."""
        config = DbspConfig(**self.settings)
        return MaskProvider(config.mask, config.dense_schedule, self.heads, self.layers, lambda: self.steps)

    def attend(
        self,
        timestep: float,
        batch: int = 1,
        thw: tuple[int, int, int] = THW,
        text_tokens: int = 0,
        settle: bool = False,
    ) -> float:
        """Runs a forward pass. Returns how far this rank's output is from one process's."""
        if settle:
            self.inner.flush()
        layout = self.inner.begin(Video(thw, text_tokens), timestep=timestep, device=self.device)
        once(lambda: self.feed.begin([Video(thw, text_tokens)], timestep))
        token, slot = (torch.from_numpy(one) for one in layout.tokens_at(self.inner.group.rank))
        shape, worst = (batch, self.heads, layout.tokens, WIDTH), 0.0
        for layer in range(self.layers):
            full, expected = once(partial(self._alone, layer, shape, self.layers * int(timestep) + layer))
            local = [torch.zeros(batch, self.heads, layout.shard, WIDTH) for _ in full]
            for shard, whole in zip(local, full, strict=True):
                shard[:, :, slot] = whole[:, :, token]
            out = self.inner.attend(layer, *(shard.to(self.device, self.dtype) for shard in local)).cpu()
            worst = max(worst, float((out[:, :, slot] - expected[:, :, token]).abs().max()))
        return worst

    def _alone(
        self, layer: int, shape: tuple[int, int, int, int], seed: int
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Returns q, k and v of all tokens, and attention to them in one process."""
        generator = torch.Generator().manual_seed(seed)
        full = [(torch.randn(shape, generator=generator) * 2).to(self.dtype).float() for _ in range(3)]
        return full, masked_attention(*full, self.feed.mask(layer, LocalQK.alone(full[0], full[1])))


PREDICTED = {"mask": {"source": "sparge", "cdf": 0.6, "similarity": -1.0, "block_q": 16, "block_k": 16}}


@dataclass(frozen=True)
class Passes:
    """State of a session after forward passes.

    worst: the largest error; calls: of attention; plans: made until the end of each pass
    kept, prepared: plans and prepared attentions that all sizes keep; known: sizes of which cache keys are known
    keys: which are sent
    """

    worst: float
    calls: int
    plans: list[int]
    kept: int
    prepared: int
    known: int
    keys: set[str]


def run_passes(
    rank: int, world: int, settings: dict[str, Any], strategy: str, passes: Sequence[dict[str, Any]], layers: int = 2
) -> Passes:
    """Runs a forward pass for each of these arguments of `Session.attend`, as the steps of one generation."""
    steps = len({one["timestep"] for one in passes})
    session = Session(settings, strategy, layers=layers, steps=steps)
    worst, plans = 0.0, []
    for one in passes:
        worst = max(worst, session.attend(**one))
        plans.append(session.inner.reuse.plans)
    contexts, inner = session.inner._sizes.values(), session.inner
    kept, prepared = (
        sum(map(len, of)) for of in ([c.keeper._last for c in contexts], [c._prepared for c in contexts])
    )
    keys = {plan.chunks.keys for plan in inner.records.values()}
    return Passes(worst, inner.reuse.calls, plans, kept, prepared, len(inner._mask_provider._numbers), keys)


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
        "mask": {"flipped": True},
        "version": {"version": {"torch": "1.0"}},
    }.get(fault, {})
    given = {"thw": THW, "cfg_branch": 0, "layer": 0, "scale": 1.0, "flipped": False, "version": {}}
    given |= changed if rank == odd else {}
    versions = package_versions() | given["version"]

    def gathered(*arguments: Any) -> torch.Tensor:
        return gather_bits(*arguments) ^ given["flipped"]

    try:
        with (
            mock.patch("dbsp_core.utils.process.package_versions", return_value=versions),
            mock.patch("dbsp_core.sources.head_shares.gather_bits", gathered),
        ):
            session = Session(PREDICTED | {"debug": debug}, f"U{world}R1", layers=2).inner
            layout = session.begin(Video(given["thw"]), timestep=900.0, cfg_branch=given["cfg_branch"])
            q = torch.zeros(1, HEADS, layout.shard, WIDTH)
            if rank == odd:
                q = {"batch": q.repeat(2, 1, 1, 1), "dtype": q.double(), "shard": q[:, :, 1:]}.get(fault, q)
            session.attend(given["layer"], q, q, q, scale=given["scale"])
    finally:
        dist.barrier()


def agreements(rank: int, world: int, mask: Any, debug: bool) -> list[int]:
    """Returns how often ranks compare numbers in each of three attentions, planning not counted."""
    counts, gather, here = [], SequenceGroup.gather_integers, threading.current_thread()
    session = AttentionSession(
        DbspConfig(mask=mask, debug=debug), SequenceGroup.from_group(), Strategy.parse(f"U{world}R1"), HEADS, 1
    )

    def counted(group: SequenceGroup, *numbers: Any) -> Any:
        counts[-1] += threading.current_thread() is here
        return gather(group, *numbers)

    with mock.patch.object(SequenceGroup, "gather_integers", counted):
        for step in range(3):
            counts.append(0)
            layout = session.begin(Video(THW), timestep=900.0 - step)
            counts[-1] = 0
            q = torch.ones(1, HEADS, layout.shard, WIDTH)
            session.attend(0, q, q, q)
    return counts


def an_executor_that_differs(rank: int, world: int, odd: int, when: str) -> None:
    """Changes the mask, kernel or input of one rank's executor after the first pass, under debug."""
    settings = {"mask": WindowSource(16, 16, window=(1, 3, 3)), "debug": True}
    session = Session(settings, f"U{world}R1").inner
    q = torch.ones(1, HEADS, session.begin(Video(THW), timestep=900.0).shard, WIDTH)
    try:
        session.attend(0, q, q, q)
        session.begin(Video(THW), timestep=890.0)
        ((executor,),) = (context._prepared.values() for context in session._sizes.values())
        if (rank, when) == (odd, "mask"):
            vars(executor)["mask_fingerprint"] ^= 1
        if (rank, when) == (odd, "kernel"):
            executor.kernels.clear()
            vars(executor)["kernel"] = "reference"
        session.attend(0, q, q * (torch.nan if (rank, when) == (odd, "value") else 1.0), q)
    finally:
        dist.barrier()


def a_shard_that_does_not_fit(rank: int, world: int, odd: int, when: str) -> None:
    """Prepares for, or calls with, fewer tokens than the layout gives, on one rank."""
    mask = BlockMask.dense(HEADS, BlockGrid.uniform(world * 32, 16))
    layout = SequenceLayout.contiguous(world * 32, world)
    plan = make_plan(mask, f"U1R{world}", layout=layout)
    here, call = (20 if (rank, when) == (odd, moment) else 32 for moment in ("prepare", "call"))
    try:
        attend = DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup.from_group(), n_local=here)
        q = torch.zeros(1, HEADS, call, WIDTH)
        attend(q, q, q)
    finally:
        dist.barrier()


def gradients(rank: int, world: int, wanted: bool) -> bool:
    """Attends outside no_grad. Returns whether the output has a graph."""
    session = Session(PREDICTED, f"U{world}R1").inner
    layout = session.begin(Video(THW))
    q = torch.ones(1, HEADS, layout.shard, WIDTH, requires_grad=wanted)
    return session.attend(0, q, q, q).requires_grad


def computed_again_after_another_size(rank: int, world: int, debug: bool) -> list[float]:
    """Recomputes an attention after a larger video's pass. Returns how far gradients are off."""
    settings = {"mask": WindowSource(16, 16, window=(1, 3, 3)), "debug": debug}
    found = []
    for recompute in (False, True):
        session = Session(settings, f"U{world}R1").inner
        shard = session.begin(Video(THW), timestep=900.0).shard
        q = torch.linspace(0, 1, HEADS * shard * WIDTH).view(1, HEADS, shard, WIDTH).requires_grad_()
        out = checkpoint(session.attend, 0, q, q, q, use_reentrant=False) if recompute else session.attend(0, q, q, q)
        with torch.no_grad():
            larger = torch.ones(1, HEADS, session.begin(Video((5, 6, 10)), timestep=900.0).shard, WIDTH)
            session.attend(0, larger, larger, larger)
        out.square().sum().backward()
        found.append(q.grad)
    return [float((one - found[0]).abs().max()) for one in found]


def an_attention_that_breaks_off(rank: int, world: int, odd: int) -> tuple[int, list[float]]:
    """Fails in the exchange of outputs on all ranks, except one that fails before the mask is predicted.

    Returns plans in use afterwards, and the errors of the next generation.
    """
    session = Session(PREDICTED | {"reuse": 1.0}, f"U{world}R1")
    for step in range(3):
        session.attend(900.0 - step)
    gone, group = CommunicationError("a rank has gone"), session.inner.group
    target = (MaskProvider, "mask") if rank == odd else (SequenceGroup, "all_gather_along")
    left = session.inner._now.keeper.calls
    with mock.patch.object(*target, side_effect=gone), pytest.raises(CommunicationError):
        session.attend(890.0)
    if rank != odd:  # as if these had gone on to the exchange of outputs
        session.inner._now.keeper.calls += 1
    dist.barrier(group.group)
    errors = [session.attend(900.0 - step) for step in range(3)]
    return session.inner._now.keeper.calls - left, errors


def from_two_threads(rank: int, world: int) -> str:
    """Attends in a second thread while the first one is within an attention. Returns the second one's error."""
    session, other = (Session({}, f"U{world}R1").inner for _ in range(2))
    q = torch.zeros(1, HEADS, session.begin(Video(THW)).shard, WIDTH)
    other.begin(Video(THW))
    inside, messages = threading.Event(), []
    exchange = SequenceGroup.all_to_all

    def all_to_all(*args: Any) -> torch.Tensor:
        if not inside.is_set():
            inside.set()
            second.join()
        return exchange(*args)

    def attend() -> None:
        inside.wait()
        try:
            other.attend(0, q, q, q)
        except ValueError as error:
            messages.append(f"{type(error).__name__}: {error}")

    second = threading.Thread(target=attend)
    second.start()
    try:
        SequenceGroup.all_to_all = all_to_all  # type: ignore[method-assign]
        session.attend(0, q, q, q)
    finally:
        SequenceGroup.all_to_all = exchange  # type: ignore[method-assign]
    other.attend(0, q, q, q)  # one after the other, they go on
    return "".join(messages)


@dataclass(frozen=True)
class Growing(BlockSizes):
    """Bands that reach further from step to step, up to `most` blocks."""

    changes = "per_step"
    most: int = 3

    def cache_key(self, request: MaskRequest) -> int:
        return min(self.most, request.step)

    def mask(self, request: MaskRequest) -> BlockMask:
        grid = self.grid(request)
        distance = np.abs(np.arange(grid.nq)[:, None] - np.arange(grid.nk))
        return BlockMask(np.tile(distance <= 1 + min(self.most, request.step), (request.heads, 1, 1)), grid)


@dataclass(frozen=True)
class Unread(BlockSizes):
    """Masks that never change, and in which no row attends to the middle key blocks."""

    def mask(self, request: MaskRequest) -> BlockMask:
        mask = BlockMask.dense(request.heads, self.grid(request))
        mask.bits[:, :, 2:4] = False
        return mask


def exchanges_before_the_first_attention(rank: int, world: int, settings: dict[str, Any], strategy: str) -> list[str]:
    """Makes a session in a new group and attends once. Returns the collectives before q was sent."""
    made = SequenceGroup.from_group(dist.new_group(list(range(world)), timeout=timedelta(seconds=77)))
    seen: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            seen.append(name)
            return function(*args, **options)

        return call

    def sent(*_: Any) -> Any:
        seen.append("q")
        raise CommunicationError("far enough")

    names = ("barrier", "all_reduce", "monitored_barrier", "broadcast", "all_gather")
    with ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch.object(dist, name, noted(name, getattr(dist, name))))
        patches.enter_context(mock.patch.object(Route, "dispatch", sent))
        config, chosen = DbspConfig.load(settings), None if strategy == "auto" else Strategy.parse(strategy)
        session = observed_session(config, made, chosen, HEADS, 1)
        q = torch.ones(1, HEADS, session.begin(Video(THW), timestep=900.0).shard, WIDTH)
        with pytest.raises(CommunicationError, match="far enough"):
            session.attend(0, q, q, q)
    return seen
