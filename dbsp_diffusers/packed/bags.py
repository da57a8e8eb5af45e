"""Bags carried out: which sequences of a packed call go to which ranks, and the sessions in which these attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dbsp_core.comm.consistency import run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.cost.machine import hardware_for
from dbsp_core.cost.sequence_cost import (
    LayerSize,
    SequenceWork,
    WorkOfSizes,
    bag_layout,
    sequence_cost,
    whole_layout,
)
from dbsp_core.layout.sequence_layout import SequenceLayout, Streams
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.planning.bags import BagConfig, BagTopology
from dbsp_core.planning.sequences import SequencePlan, plan_sequences
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import MaskRequest
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_diffusers.packed.samples import PackedBatch, Sharing

MOST_KNOWN = 256
"""Sizes of sequences whose masks' rows are kept."""


@dataclass(eq=False, repr=False)
class BagSessions:
    """A transformer's sessions in bags, made once for each topology, and what it takes to plan them."""

    whole: AttentionSession  # The session of all ranks
    _sessions: dict[tuple[int, ...], AttentionSession] = field(default_factory=dict)
    """By the ranks of each bag."""
    _known: WorkOfSizes = field(default_factory=dict)
    _last: tuple[AttentionSession, int] | None = None
    """The session of this rank's last pass, and how many blocks its masks had, dense ones and others."""

    def begin(self, batch: PackedBatch, bags: BagConfig, layer: LayerSize, streams: Streams, **step: Any) -> Sharing:
        """Plans the bags of a pass, and begins it in this rank's. Collective.

        Args:
            bags: Equal on all ranks.
            layer: The transformer's.
            streams: Order of a rank's tokens of text and its others.
            step: The denoising step for `AttentionSession.begin`.

        Raises:
            UserError: On all ranks, where bags or sequences don't fit, or ranks would share them out otherwise.
        """
        videos = batch.videos
        group = self.whole.group
        control = group.control()
        density = self._density(control)
        # 1. The bag of each sequence: the same on all ranks, or an error on all.
        plan, work = run_consistently(
            control,
            lambda: self._planned(batch, bags, layer, density),
            lambda planned: fingerprint_of((planned[0].topology.ranks.tolist(), planned[0].bag.tolist())),
            "the bag of a sequence",
        )
        topology, ranks = plan.topology, tuple(plan.topology.ranks.tolist())
        bag = int(topology.bag_of_rank[group.rank])
        sequences = np.flatnonzero(plan.bag == bag)
        # 2. This rank's session, and its pass. Bags raise together, as each of them would wait for the others later.
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
        blocks = self.whole.heads * sum(
            work.grids[sequence].nq * work.grids[sequence].nk for sequence in sequences.tolist()
        )
        self._last = session, blocks
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
        """Returns the last pass's density on all ranks, if masks are predicted, else 1. Collective if so."""
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
        """Returns the bag of each sequence, and what all of them compute."""
        whole, config, loaders = self.whole, self.whole.config, batch.loaders
        # 1. The cost of each, as whole numbers. The middle layer's mask represents those of all layers.
        middle = whole.layers // 2
        requests = [
            MaskRequest(middle, whole.heads, video.thw, video.text, layers=whole.layers) for video in batch.videos
        ]
        work = SequenceWork.under(config.mask, requests, self._known, density)
        for oldest in list(self._known)[: max(0, len(self._known) - MOST_KNOWN)]:
            del self._known[oldest]
        hardware = hardware_for(config.machine, batch.device.type, config.kernel)
        cost = sequence_cost(layer, hardware, work.grids[0].block_q, work.grids[0].block_k)
        picoseconds = cost.picoseconds(work.tokens, work.blocks)
        loader = np.zeros(len(batch.videos), dtype=np.int64) if loaders is None else np.array(loaders)
        # 2. The bag of each. Where all ranks have all sequences, these are not bound to a unit.
        topology = BagTopology.parse(bags.topology, whole.group.size)
        if loaders is None:
            topology = BagTopology(tuple(topology.ranks.tolist()))
        return plan_sequences(picoseconds, work.tokens, loader, topology, bags.max_tokens), work


def is_text(videos: Sequence[Video]) -> np.ndarray:
    """Returns bool[tokens], which tokens of sequences packed one after another are text."""
    return np.concatenate([np.arange(video.tokens) < video.text for video in videos])


def _first(text: np.ndarray, streams: Streams) -> np.ndarray:
    """Returns bool[tokens], which tokens are of the stream that comes first."""
    return text if streams == "first" else ~text


def _with_streams(layout: SequenceLayout, text: np.ndarray, streams: Streams) -> SequenceLayout:
    """Returns the layout with text and video apart, and at least one slot for each on every rank, maybe for padding.

    Attention modules of two streams are given some of both.
    """
    if streams is None:
        return layout
    layout = layout.with_streams(text, streams)
    first = np.bincount(layout.rank[_first(text, streams)], minlength=layout.world)
    local = layout.local + (first[layout.rank] == 0)
    slots = max(layout.shard, int(local.max()) + 1, int(first.max()) + 1)
    return replace(layout, local=local, shard=slots)


def _strategy_within(config: DbspConfig, ranks: int, topology: BagTopology) -> Strategy | None:
    """Returns a bag's strategy for its number of ranks. Raises UserError for a configured one for other bags."""
    strategy = config.strategy
    if strategy is None or ranks == 1:
        return Strategy(ranks, 1)
    if isinstance(strategy, Strategy) and strategy.world != ranks:
        raise UserError(
            f"strategy {strategy} is for {strategy.world} ranks, and bags {topology} have {ranks}; leave strategy "
            "out, or set it to auto"
        )
    return strategy if isinstance(strategy, Strategy) else None
