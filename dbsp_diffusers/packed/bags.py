"""Bags of a packed call: assignment of sequences to ranks, and the sessions of the bags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dbsp_core.comm.consistency import run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.cost.machine import hardware_for
from dbsp_core.cost.sequence_cost import LayerSize, SequenceWork, WorkOfSizes, bag_layout, sequence_cost, whole_layout
from dbsp_core.layout.sequence_layout import SequenceLayout, Streams
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.planning.bags import BagConfig, BagTopology
from dbsp_core.planning.sequences import SequencePlan, plan_sequences
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import MaskRequest
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_diffusers.packed.samples import PackedBatch, Sharing


@dataclass(eq=False, repr=False)
class BagSessions:
    """A transformer's sessions in bags, made once per topology."""

    whole: AttentionSession  # the session of all ranks
    _sessions: dict[tuple[int, ...], AttentionSession] = field(default_factory=dict)  # by the ranks of each bag
    _known: WorkOfSizes = field(default_factory=dict)
    _last: tuple[AttentionSession, int] | None = None
    """Session of this rank's last pass, and the number of its masks' blocks per layer, active or not."""

    def begin(self, batch: PackedBatch, bags: BagConfig, layer: LayerSize, streams: Streams, **step: Any) -> Sharing:
        """Plans the bags of a pass, and begins the pass in this rank's bag. Collective.

        `step` has arguments of `AttentionSession.begin` for the denoising step. Raises UserError on all ranks if bags
        or sequences do not fit, or ranks would assign them differently.
        """
        videos, group = batch.videos, self.whole.group
        control = group.control()
        density = self._density(control)
        # 1. Assign sequences to bags, equally on all ranks
        plan, work = run_consistently(
            control,
            lambda: self._planned(batch, bags, layer, density),
            lambda planned: fingerprint_of((planned[0].topology.ranks.tolist(), planned[0].bag.tolist())),
            "the bag of a sequence",
        )
        topology, ranks = plan.topology, tuple(plan.topology.ranks.tolist())
        bag = int(topology.bag_of_rank[group.rank])
        sequences = np.flatnonzero(plan.bag == bag)
        # 2. Begin the pass in this rank's session; all bags raise together
        if ranks not in self._sessions:
            self._sessions[ranks] = run_consistently(control, lambda: self._made(topology, bag))
        session = self._sessions[ranks]

        def begun() -> SequenceLayout | None:
            if not len(sequences):
                return None
            here = [videos[sequence] for sequence in sequences.tolist()]
            layout = _with_streams(bag_layout(plan, work.tokens, bag), is_text(here), streams)
            return session.begin(*here, device=batch.device, streams=layout, **step)

        layout = run_consistently(control, begun)
        grids = [work.grids[sequence] for sequence in sequences.tolist()]
        self._last = session, self.whole.heads * sum(grid.nq * grid.nk for grid in grids)
        text = is_text(videos)
        whole = _with_streams(whole_layout(plan, work.tokens), text, streams)
        first_here = 0 if streams is None else max(1, int(_first(text, streams)[whole.rank == group.rank].sum()))
        if layout is None:
            return Sharing(group, whole, 1 + first_here, first_here, None, plan)
        return Sharing(group, whole, layout.shard, first_here, session, plan)

    def _made(self, topology: BagTopology, bag: int) -> AttentionSession:
        """Returns this rank's session for a topology. Collective within its bag."""
        whole = self.whole
        strategies = {ranks: _strategy_within(whole.config, ranks, topology) for ranks in topology.sizes}
        ranks = int(topology.ranks[bag])
        return whole.within(whole.group.part(int(topology.first_rank[bag]), ranks), strategies[ranks])

    def _density(self, control: SequenceGroup) -> float:
        """Returns the last pass's density over all ranks for predicted masks (collective), else 1."""
        if self.whole.config.mask.changes != "per_call":
            return 1.0
        mine = [0, 0]
        if self._last is not None and self._last[1] and self._last[0].group.rank == 0:
            session, blocks = self._last
            plans = session.records.values()
            mine = [sum(int(plan.work.sum()) for plan in plans), blocks * len(plans)]
        dense, every = (sum(of_ranks) for of_ranks in zip(*control.gather_integers(mine), strict=True))
        return dense / every if every else 1.0

    def _planned(
        self, batch: PackedBatch, bags: BagConfig, layer: LayerSize, density: float
    ) -> tuple[SequencePlan, SequenceWork]:
        whole, config, loaders = self.whole, self.whole.config, batch.loaders
        # 1. Integer costs, with the middle layer's mask for all layers
        middle = whole.layers // 2
        requests = [
            MaskRequest(middle, whole.heads, video.thw, video.text, layers=whole.layers) for video in batch.videos
        ]
        work = SequenceWork.under(config.mask, requests, self._known, density)
        for oldest in list(self._known)[:-256]:
            del self._known[oldest]
        hardware = hardware_for(config.machine, batch.device.type, config.kernel)
        cost = sequence_cost(layer, hardware, work.grids[0].block_q, work.grids[0].block_k)
        picoseconds = cost.picoseconds(work.tokens, work.blocks)
        loader = np.zeros(len(batch.videos), dtype=np.int64) if loaders is None else np.array(loaders)
        # 2. Bags; sequences that all ranks have are not bound to a unit
        topology = BagTopology.parse(bags.topology, whole.group.size)
        if loaders is None:
            topology = BagTopology(tuple(topology.ranks.tolist()))
        return plan_sequences(picoseconds, work.tokens, loader, topology, bags.max_tokens), work


def is_text(videos: Sequence[Video]) -> np.ndarray:
    """Returns bool[tokens], True for text, for concatenated sequences."""
    return np.concatenate([np.arange(video.tokens) < video.text for video in videos])


def _first(text: np.ndarray, streams: Streams) -> np.ndarray:
    """Returns bool[tokens], True for the stream that comes first."""
    return text if streams == "first" else ~text


def _with_streams(layout: SequenceLayout, text: np.ndarray, streams: Streams) -> SequenceLayout:
    """Returns the layout with text and video separated, and at least one slot (maybe padding) of each on every rank.

    Two-stream attention modules need some of both.
    """
    if streams is None:
        return layout
    layout = layout.with_streams(text, streams)
    first = np.bincount(layout.rank[_first(text, streams)], minlength=layout.world)
    local = layout.local + (first[layout.rank] == 0)
    slots = max(layout.shard, int(local.max()) + 1, int(first.max()) + 1)
    return replace(layout, local=local, shard=slots)


def _strategy_within(config: DbspConfig, ranks: int, topology: BagTopology) -> Strategy | None:
    """Returns a bag's strategy. Raises UserError if the configured strategy has another number of ranks."""
    strategy = config.strategy
    if strategy is None or ranks == 1:
        return Strategy(ranks, 1)
    if isinstance(strategy, Strategy) and strategy.world != ranks:
        raise UserError(
            f"strategy {strategy} is for {strategy.world} ranks, but bags {topology} have {ranks}; remove strategy, "
            "or set it to auto"
        )
    return strategy if isinstance(strategy, Strategy) else None
