"""Predicted time of a denoising step's two CFG passes: all ranks for both, or half of the ranks for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dbsp_core.cost.machine import Hardware
from dbsp_core.cost.prediction import AttentionShape, candidates, exchange_s, predict
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.plan import Plan, make_plan


@dataclass(frozen=True)
class GuidedStep:
    """The self-attentions of two CFG passes of one size.

    Attributes:
        mask: The mask of all attentions.
        layers: Number of attentions in a pass.
        output_bytes: Size of the transformer's output in one pass.
        any_strategy: True if the fastest UxRy is taken; False for Ulysses on all ranks that share a sequence.
    """

    mask: BlockMask
    shape: AttentionShape
    layers: int
    output_bytes: int
    hardware: Hardware
    any_strategy: bool

    def seconds(self, nodes: Sequence[int]) -> float:
        """Returns the seconds of both passes one after the other, on all ranks; `nodes` are those of the ranks."""
        return 2 * self.layers * self.fastest(nodes)[1]

    def halved_seconds(self, nodes: Sequence[int]) -> float:
        """Returns the seconds of both passes at the same time, each on half of the ranks, and of their exchange."""
        size = len(nodes) // 2
        slower = max(self.fastest(half)[1] for half in {tuple(nodes[:size]), tuple(nodes[size:])})
        sent = self.output_bytes * np.roll(np.eye(len(nodes)), size, axis=1)
        return self.layers * slower + exchange_s(sent, self.hardware.constants, nodes)

    def fastest(self, nodes: Sequence[int]) -> tuple[Plan, float]:
        """Returns the plan of one attention on some ranks, and its seconds."""
        ranks = len(nodes)
        strategies = candidates(ranks, self.mask.grid) if self.any_strategy else [Strategy(ranks, 1)]
        plans = [make_plan(self.mask, strategy, compare=False) for strategy in strategies]
        seconds = [predict(plan, self.shape, self.hardware, nodes).total_s for plan in plans]
        best = min(range(len(plans)), key=seconds.__getitem__)
        return plans[best], seconds[best]
