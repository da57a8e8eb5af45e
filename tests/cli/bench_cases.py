"""What ranks measure for `dbsp bench` in tests: everything, at a tiny size."""

from __future__ import annotations

from typing import Any

import torch

from dbsp_cli.measure import Workload, measure
from dbsp_core import SequenceGroup
from dbsp_core.cost.machine import load_hardware


def measure_tiny(rank: int, world: int) -> dict[str, Any]:
    """Returns main numbers of a measurement on gloo ranks."""
    group = SequenceGroup.from_group()
    device = torch.device("cpu")
    work = Workload(4, 16, 256, (32, 16), "cpu", torch.float32, device, group, (1 << 12, 1 << 16), 2)
    found = measure(work, load_hardware("cpu-demo").constants, lambda what: None)
    runs = [(str(one.plan.strategy), one.plan.planner) for one in found.attentions]
    return {"runs": runs, "exchanges": found.exchanges, "constants": vars(found.constants), "residual": found.residual}
