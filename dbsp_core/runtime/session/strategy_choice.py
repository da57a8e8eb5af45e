"""What `strategy: auto` chooses among, and the machine's constants that it chooses by."""

from __future__ import annotations

import torch

from dbsp_core.comm.consistency import run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.hardware import Hardware, warn_if_elsewhere
from dbsp_core.cost.latency import Topology
from dbsp_core.cost.own_hardware import cost_basis, hardware_for
from dbsp_core.cost.selection import StrategySelector, candidates
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.log import log
from dbsp_kernels import choose_kernel
from dbsp_kernels.registry import returns_lse

__all__ = ["agree_on_constants", "selector_of"]


def agree_on_constants(
    config: DbspConfig, group: SequenceGroup, strategy: Strategy | None, device: torch.device
) -> Hardware | None:
    """Returns the machine's constants where strategies are chosen by them, else None. Collective then."""
    if strategy is not None:
        return None
    hardware = run_consistently(
        group,
        lambda: hardware_for(config.cost_model, device.type, config.kernel),
        lambda hardware: 0 if hardware is None else hardware.fingerprint,
        "the hardware file",
    )
    if group.rank == 0:
        log.info("costs are estimated by %s", cost_basis(hardware))
    return hardware


def selector_of(
    config: DbspConfig,
    group: SequenceGroup,
    topology: Topology,
    layout: SequenceLayout,
    hardware: Hardware | None,
    grid: BlockGrid,
    device: torch.device,
) -> StrategySelector:
    """Returns the selector for masks on `grid`, used on `device`. Rank 0 warns if the constants are of another one."""
    if hardware is not None and group.rank == 0:
        warn_if_elsewhere(hardware, device, _kernel_name(config.kernel, device))
    strategies = candidates(group.size, grid, returns_lse(config.kernel))
    return StrategySelector(strategies, hardware, topology, layout)


def _kernel_name(kernel: str, device: torch.device) -> str:
    """Returns the name of the kernel that is expected to run. Whether it can is checked at the first attention."""
    try:
        return choose_kernel(kernel, device, torch.bfloat16 if device.type == "cuda" else torch.float32).name
    except UserError:
        return kernel
