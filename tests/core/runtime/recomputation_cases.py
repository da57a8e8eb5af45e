"""What the workers of test_recomputation run: training with predicted masks, with and without checkpointing."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from dbsp_core import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError

HEADS, LAYERS = 4, 2
SPARGE = {"mask": {"source": "sparge", "cdf": 0.6, "block_q": 16, "block_k": 16}}


class Training:
    """A session of two layers, whose masks differ in each pass."""

    def __init__(self, strategy: str = "U2R1", **settings: Any) -> None:
        config = DbspConfig.load(SPARGE | settings)
        self.session = AttentionSession(config, SequenceGroup.from_group(), Strategy.parse(strategy), HEADS, LAYERS)

    def forward(self, seed: int, reentrant: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The input and loss of a pass; reentrant: kind of checkpoint around each attention, None without."""
        layout = self.session.begin(Video((4, 8, 8)), timestep=900.0 - seed)
        q = torch.randn(1, HEADS, layout.shard, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        x = q
        for layer in range(LAYERS):

            def attend(x: torch.Tensor, layer: int = layer) -> torch.Tensor:
                return self.session.attend(layer, x, x, x)

            x = x + (attend(x) if reentrant is None else checkpoint(attend, x, use_reentrant=reentrant))
        return q, x.square().sum()

    def gradient(self, seed: int, reentrant: bool | None = None) -> torch.Tensor:
        q, loss = self.forward(seed, reentrant)
        loss.backward()
        return grad_of(q)


def grad_of(q: torch.Tensor) -> torch.Tensor:
    assert q.grad is not None
    return q.grad.clone()


def checkpointing_turned_on_later(rank: int, world: int, reentrant: bool) -> float:
    """Three steps without, whose losses live on, then two with checkpoints. Returns the worst relative error."""
    plain, training = Training(), Training()
    losses, errors = [], []
    for seed in range(3):
        _, loss = training.forward(seed)
        loss.backward()
        losses.append(loss)
    for seed in (8, 9):
        expected = plain.gradient(seed)
        errors.append((training.gradient(seed, reentrant) - expected).abs().max() / expected.abs().max())
    return float(max(errors))


def retained_graph(rank: int, world: int, reentrant: bool) -> float | str:
    """Backward twice under checkpoints. Returns how far the second gradients are from the first, or the rejection."""
    q, loss = Training().forward(1, reentrant)
    loss.backward(retain_graph=True)
    first, q.grad = grad_of(q), None
    try:
        loss.backward()
    except UserError as error:
        return str(error)
    return float((grad_of(q) - first).abs().max())


def another_pass_between(rank: int, world: int) -> str:
    """A retained graph's second backward after another pass, whose masks differ, may not use that pass's masks."""
    training = Training()
    _, loss = training.forward(1, False)
    loss.backward(retain_graph=True)
    _other = training.forward(2, False)
    try:
        loss.backward()
    except UserError as error:
        return str(error)
    return ""


def executors_alive(rank: int, world: int) -> tuple[int, int]:
    """Executors that are left after ten steps of training without checkpoints, and those that the session keeps."""
    training = Training()
    for seed in range(10):
        training.gradient(seed)
    gc.collect()
    own = [one for size in training.session._sizes.values() for one in size._prepared.values()]
    return sum(isinstance(one, PreparedAttention) for one in gc.get_objects()), len(own)
