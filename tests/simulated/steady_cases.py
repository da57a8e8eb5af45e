"""What ranks on simulated GPUs run: passes of a second generation, whose timesteps are on the device, and training."""

from __future__ import annotations

from typing import Any

import torch

from dbsp_core import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.reports.observer import observed_session
from tests.core.runtime.session_cases import WIDTH
from tests.gpu_node.faults import recorded

STEPS, HEADS = 2, 2
THW = (2, 3, 4)
"""Host waits do not depend on how many blocks there are: two of queries, three of keys."""


def waits_of_a_pass(rank: int, world: int, settings: dict[str, Any], strategy: str, training: bool) -> dict[str, int]:
    """Returns the host waits of one pass of the second generation, and its backward, by line of code."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = SequenceGroup.from_group()
    config = DbspConfig.load(settings)
    session = observed_session(config, group, Strategy.parse(strategy), HEADS, 1, lambda: STEPS)
    draws = torch.Generator().manual_seed(0)
    waits: dict[str, int] = {}
    for generation in range(2):
        timesteps = torch.linspace(999.0, 0.0, STEPS).to(device)
        for step in range(STEPS):
            last = (generation, step) == (1, STEPS - 1)
            shard = session.layout.shard if session._sizes else session.begin(Video(THW), device=device).shard
            q, k, v = (torch.randn(1, HEADS, shard, WIDTH, generator=draws).to(device) for _ in range(3))
            if training:
                q, k, v = (t.requires_grad_() for t in (q, k, v))
            group.control().barrier()
            if rank == 0:
                recorded.begin_step()
            group.control().barrier()
            with torch.set_grad_enabled(training):
                session.begin(Video(THW), timestep=timesteps[step].expand(2), device=device)
                out = session.attend(0, q, k, v)
            if training:
                out.backward(torch.ones_like(out))
            group.control().barrier()
            if last:
                waits = recorded.waits_of_product()
            group.control().barrier()
    session.flush()
    return waits
