"""Which bags to share several sequences out in: those with the least modelled forward time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dbsp_core.cost.hardware import Hardware
from dbsp_core.cost.sequences import LayerSize, SequenceWork, evaluate
from dbsp_core.planning.sequences.bags import BagTopology
from dbsp_core.planning.sequences.cost import SequenceCost
from dbsp_core.planning.sequences.sequence_plan import SequencePlan
from dbsp_core.utils.errors import UserError

__all__ = ["fastest_bags"]


def fastest_bags(
    plan: Callable[[BagTopology], SequencePlan],
    work: SequenceWork,
    loader: np.ndarray,
    cost: SequenceCost,
    layer: LayerSize,
    hardware: Hardware,
    world: int,
    node_size: int,
    slack: float = 0.0,
) -> SequencePlan:
    """Plans every topology of `BagTopology.candidates`, and returns the plan whose slowest bag takes least.

    With `slack`, that is the first plan that takes at most this share more than the best. Small bags come first.

    Deterministic: ranks with equal arguments choose the same.

    Args:
        plan: Shares out the sequences over bags; raises UserError where none can hold one.
        work: See `evaluate`, as for loader, cost, layer and hardware.
        world: Number of ranks.
        node_size: Of them on a node.
        slack: What smaller bags may cost, as their exchanges are smaller, if the constants know nothing of exchanges.

    Raises:
        UserError: Where no topology can hold the sequences.
    """
    plans: list[SequencePlan] = []
    refused: UserError | None = None
    for topology in BagTopology.candidates(world, node_size):
        try:
            plans.append(plan(topology))
        except UserError as error:
            refused = error
    if refused is not None and not plans:
        raise refused
    seconds = [evaluate(one, work, loader, cost, layer, hardware, node_size).seconds for one in plans]
    most = min(seconds) * (1 + slack)
    return next(plan for plan, one in zip(plans, seconds, strict=True) if one <= most)
