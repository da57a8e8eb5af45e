"""What ranks on simulated GPUs run: passes of a transformer in a loop of a user's own, with inputs off by rounding."""

from __future__ import annotations

import torch

import dbsp_diffusers
from dbsp_core import SequenceGroup
from tests.gpu_node.faults import recorded
from tests.simulated.model_cases import MASKS, brief, brief_inputs
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

CONFIG = {"mask": MASKS["static"]}
TIMESTEPS = (900.0, 700.0, 500.0, 300.0, 800.0, 600.0)
"""Two generations."""
FRAMEWORKS = ("dbsp_diffusers/", "dbsp_core/comm/")


@shared
def on_one_process() -> list[torch.Tensor]:
    """Returns the output of each pass."""
    transformer, inputs = brief("wan"), brief_inputs("wan")
    with torch.no_grad():
        attach_single_process(transformer, CONFIG)
        return [transformer(**inputs | {"timestep": torch.tensor([one])})[0] for one in TIMESTEPS]


def passes(rank: int, world: int) -> tuple[list[float], list[list[str]]]:
    """Returns the largest difference from one process, and the lines of host waits outside attention, by pass."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    expected, transformer = on_one_process(), brief("wan").to(device)
    dbsp_diffusers.enable(transformer, CONFIG)
    off = {
        name: (one * (1 + 1e-3 * rank)).to(device) if torch.is_tensor(one) else one
        for name, one in brief_inputs("wan").items()
    }
    control, found, waits = SequenceGroup.from_group().control(), [], []
    with torch.no_grad():
        for timestep in TIMESTEPS:
            given = off | {"timestep": torch.full((1,), timestep, device=device)}
            control.barrier()
            if rank == 0:
                recorded.host_waits.clear()
            control.barrier()
            found.append(transformer(**given)[0])
            control.barrier()
            waits.append([line for line in recorded.host_waits if line.partition(" at ")[2].startswith(FRAMEWORKS)])
    dbsp_diffusers.disable(transformer)
    return [float((one.cpu() - other).abs().max()) for one, other in zip(found, expected, strict=True)], waits
