"""What ranks on simulated GPUs run: sessions of every mask source, against one CPU process, and what a step costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dbsp_core import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.reports.observer import observed_session
from tests.core.runtime.session_cases import WIDTH, Session
from tests.gpu_node.faults import recorded

THW = (3, 3, 5)
"""45 tokens: three blocks of 16 queries, six of 8 keys, the last ones short."""


@dataclass(frozen=True)
class Call:
    """One forward pass of a session."""

    timestep: float
    batch: int = 1
    thw: tuple[int, int, int] = THW
    text_tokens: int = 0
    settle: bool = False


@dataclass(frozen=True)
class SessionCase:
    """Forward passes of one session."""

    settings: dict[str, Any]
    strategy: str
    calls: tuple[Call, ...] = (Call(900.0), Call(800.0))
    layers: int = 1
    heads: int = 3
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Step:
    """What a steady forward pass cost.

    Attributes:
        waits: Host waits of the ranks' own threads in the product's files, by line of code.
        past_waits: Host waits for work of the step before, per rank.
        launches: Triton launches and NCCL calls per rank.
        operators: Torch's operators per rank.
        variants: Compiled variants by kernel, since the session began.
        new_variants: Kernels of which the step asked for a variant that was not there.
    """

    waits: dict[str, int]
    past_waits: float
    launches: float
    operators: float
    variants: dict[str, int] = field(default_factory=dict)
    new_variants: tuple[str, ...] = ()


def largest_errors(rank: int, world: int, case: SessionCase) -> tuple[list[float], list[int]]:
    """Returns how far this rank's output is from one process's, and the plans made so far, by forward pass."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    session = Session(case.settings, case.strategy, case.layers, heads=case.heads, device=device, dtype=case.dtype)
    errors, plans = [], []
    for call in case.calls:
        errors.append(session.attend(call.timestep, call.batch, call.thw, call.text_tokens, call.settle))
        plans.append(session.inner.reuse.plans)
    return errors, plans


def steady_step(
    rank: int, world: int, settings: dict[str, Any], strategy: str, heads: int, layers: int = 1, warm: int = 3
) -> Step:
    """Returns what the forward pass after `warm` others costs, with inputs that are on the device already."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = SequenceGroup.from_group()
    config = DbspConfig.load(settings)
    session = observed_session(config, group, Strategy.parse(strategy), heads, layers, lambda: 50)
    generator = torch.Generator().manual_seed(0)
    for step in range(warm + 1):
        if step < warm:
            shard = session.begin(Video(THW), timestep=900.0 - step, device=device).shard
        q, k, v = (torch.randn(1, heads, shard, WIDTH, generator=generator).to(device) for _ in range(3))
        if step == warm:
            group.control().barrier()
            before = {kernel: len(variants) for kernel, variants in recorded.variants.items()}
            group.control().barrier()
            if rank == 0:
                recorded.begin_step()
            group.control().barrier()
            session.begin(Video(THW), timestep=900.0 - step, device=device)
        for layer in range(layers):
            session.attend(layer, q, k, v)
    group.control().barrier()
    found = Step(
        recorded.waits_of_product(),
        sum(recorded.past_waits.values()) / world,
        sum(recorded.launches.values()) / world,
        sum(recorded.operators.values()) / world,
        {kernel: len(variants) for kernel, variants in recorded.variants.items()},
        tuple(kernel for kernel, variants in recorded.variants.items() if len(variants) > before.get(kernel, 0)),
    )
    group.control().barrier()
    session.flush()
    return found
