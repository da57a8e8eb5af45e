"""What ranks on simulated GPUs run: passes of a transformer in a loop of a user's own, with inputs off by rounding."""

from __future__ import annotations

import torch

import dbsp_diffusers
from dbsp_core import SequenceGroup
from tests.gpu_node.faults import recorded
from tests.support.models.transformers_for_tests import Inputs, make_transformer
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

CONFIG = {"mask": {"source": "window", "window": [2, 3, 3], "block_q": 16, "block_k": 16}}
TIMESTEPS = (900.0, 700.0, 500.0, 300.0, 800.0, 600.0)
"""Two generations."""
FRAMEWORKS = ("dbsp_diffusers/", "dbsp_core/comm/")


def _given() -> dict[str, torch.Tensor]:
    given: dict[str, torch.Tensor] = Inputs.random("wan", (3, 5, 7), 1, 7).arguments
    return given


@shared
def on_one_process() -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Returns the weights and the output of each pass; ranks that are threads draw from one generator."""
    transformer, inputs = make_transformer("wan"), _given()
    weights = {name: one.clone() for name, one in transformer.state_dict().items()}
    with torch.no_grad():
        attach_single_process(transformer, CONFIG)
        return weights, [transformer(**inputs | {"timestep": torch.tensor([one])})[0] for one in TIMESTEPS]


def passes(rank: int, world: int) -> tuple[list[float], list[list[str]]]:
    """Returns the largest difference from one process, and the places of host waits outside attention, by pass."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    (weights, expected), transformer = on_one_process(), make_transformer("wan")
    transformer.load_state_dict(weights)
    transformer.to(device)
    dbsp_diffusers.enable(transformer, CONFIG)
    off = {
        name: (one * (1 + 1e-3 * rank)).to(device) if torch.is_tensor(one) else one for name, one in _given().items()
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
            waits.append([place for place in recorded.host_waits if place.partition(" at ")[2].startswith(FRAMEWORKS)])
    dbsp_diffusers.disable(transformer)
    return [float((one.cpu() - other).abs().max()) for one, other in zip(found, expected, strict=True)], waits
