"""Predicted time of a denoising step's two guidance passes: all ranks for both, or half of the ranks for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dbsp_core.cost.machine import Hardware
from dbsp_core.cost.prediction import AttentionShape, candidates, exchange_s, predict
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.plan import make_plan

__all__ = ["GuidedStep"]


@dataclass(frozen=True)
class GuidedStep:
    """The self-attention of two guidance passes, dense: masks change the work, and hardly what is sent.

    Attributes:
        shape: The shape of one pass's attention, of any number of heads.
        layers: Number of attentions in a pass.
        output_bytes: Size of the transformer's output in one pass.
        any_strategy: Whether the fastest UxRy is taken; False: Ulysses on all ranks that share a sequence.
    """

    grid: BlockGrid
    shape: AttentionShape
    layers: int
    output_bytes: int
    hardware: Hardware
    any_strategy: bool

    def seconds(self, nodes: Sequence[int]) -> float:
        """Returns the seconds of both passes one after the other, on all ranks; `nodes` are those of the ranks."""
        return 2 * self.layers * self._attention_s(nodes)

    def halved_seconds(self, nodes: Sequence[int]) -> float:
        """Returns the seconds of both passes at the same time, each on half of the ranks, and of their exchange."""
        size = len(nodes) // 2
        sent = self.output_bytes * np.roll(np.eye(len(nodes)), size, axis=1)
        slower = max(self._attention_s(nodes[:size]), self._attention_s(nodes[size:]))
        return self.layers * slower + exchange_s(sent, self.hardware.constants, nodes)

    def _attention_s(self, nodes: Sequence[int]) -> float:
        """Returns the seconds of one attention on some ranks."""
        mask, world = BlockMask.dense(self.shape.heads, self.grid), len(nodes)
        strategies = candidates(world, self.grid) if self.any_strategy else [Strategy(world, 1)]
        plans = [make_plan(mask, strategy, compare=False) for strategy in strategies]
        return min(predict(plan, self.shape, self.hardware, nodes).total_s for plan in plans)
