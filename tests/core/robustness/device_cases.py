"""What the workers run: db-SP under a default device that its tensors on the host must not follow."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    SequenceGroup,
    SequenceLayout,
    dual_balanced_attention,
    make_plan,
)
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession

HEADS, WIDTH, TOKENS = 4, 16, 200


def functions(rank: int, world: int, device: str | None) -> list[np.ndarray]:
    """Planned, prepared and called at once, with gradients. Returns outputs, and gradients of q, k and v."""
    generator, bits = torch.Generator().manual_seed(0), np.random.default_rng(0).random((HEADS, 13, 13)) < 0.4
    full = torch.randn(3, 1, HEADS, TOKENS, WIDTH, generator=generator)
    q, k, v = (one.chunk(world, dim=2)[rank].clone().requires_grad_() for one in full)
    with nullcontext() if device is None else torch.device(device):
        mask, found = BlockMask(bits, BlockGrid.uniform(TOKENS, 16)), []
        for one in (mask, BlockMask.dense(HEADS, mask.grid)):
            found.append(dual_balanced_attention(q, k, v, one, f"U{world}R1"))
        layout = SequenceLayout.contiguous(TOKENS, world)
        for strategy in (f"U{world}R1", f"U1R{world}"):
            plan = make_plan(mask, strategy, layout=layout)
            prepared = DualBalancedAttention.prepare(
                plan, mask, layout, SequenceGroup.from_group(), n_local=q.shape[2]
            )
            found.append(prepared(q, k, v))
        torch.stack(found).square().sum().backward()
    return [one.detach().numpy() for one in (*found, q.grad, k.grad, v.grad) if one is not None]


def session(rank: int, world: int, settings: dict[str, Any], device: str | None) -> list[np.ndarray]:
    """Two steps of a session. Returns outputs."""
    config = DbspConfig.load({**settings, "mask": {"block_q": 16, "block_k": 16} | settings["mask"]})
    found = []
    with nullcontext() if device is None else torch.device(device):
        one = AttentionSession(config, SequenceGroup.from_group(), Strategy(world, 1), HEADS, 1, lambda: 20)
        for step in range(2):
            layout = one.begin(Video((2, 8, 8)), timestep=1000.0 - step, device=torch.device("cpu"))
            generator = torch.Generator().manual_seed(10 * rank + step)
            q, k, v = torch.randn(3, 1, HEADS, layout.shard, WIDTH, generator=generator, device="cpu")
            found.append(one.attend(0, q, k, v).numpy())
        one.flush()
    return found
