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
) -> SequencePlan:
    """Plans every topology of `BagTopology.candidates`, and returns the plan whose slowest bag takes least.

    Deterministic: ranks with equal arguments choose the same.

    Args:
        plan: Shares out the sequences over bags; raises UserError where none can hold one.
        work: See `evaluate`, as for loader, cost, layer and hardware.
        world: Number of ranks.
        node_size: Of them on a node.

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
    return min(plans, key=lambda one: evaluate(one, work, loader, cost, layer, hardware, node_size).seconds)
