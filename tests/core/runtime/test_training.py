"""Backward through sessions under activation checkpointing, on graphs that are retained."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_kernels import KernelRequirements, require_supported
from tests.support.oracle import largest_difference
from tests.support.settings import session_of, with_debug
from tests.support.workers import assert_all_raise

HEADS, LAYERS = 4, 2
SPARGE = {"mask": {"source": "sparge", "cdf": 0.6, "block_q": 16, "block_k": 16}}


def forward(session: AttentionSession, seed: int, reentrant: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input and loss of a pass with a checkpoint of a kind around each attention."""
    layout = session.begin(Video((2, 4, 8)), timestep=900.0 - seed)
    q = torch.randn(1, HEADS, layout.shard, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    x = q
    for layer in range(LAYERS):

        def attend(x: torch.Tensor, layer: int = layer) -> torch.Tensor:
            return session.attend(layer, x, x, x)

        x = x + checkpoint(attend, x, use_reentrant=reentrant)
    return q, x.square().sum()


def retained_graph(rank: int, world: int, reentrant: bool, with_another: bool = False) -> float | str:
    """Calls backward twice under checkpoints, perhaps with a forward pass of other masks between them.

    Returns the difference of gradients, or the error.
    """
    session = session_of(SPARGE, "U2R1", HEADS, LAYERS)
    q, loss = forward(session, 1, reentrant)
    loss.backward(retain_graph=True)
    first, q.grad = q.grad, None
    _another = forward(session, 2, False) if with_another else None
    try:
        loss.backward()
    except UserError as error:
        return str(error)
    return largest_difference(q.grad, first)


def test_second_backward_on_a_retained_graph_gives_equal_gradients_or_raises(threads):
    assert max(threads(2).run(retained_graph, False)) <= 1e-6
    for rejection in threads(2).run(retained_graph, True):
        assert "checkpoint with use_reentrant=False to call it again on a retained graph" in rejection
    for rejection in threads(2).run(retained_graph, False, True):
        assert "2 forward passes of different sizes or masks wait for backward, or have retained graphs" in rejection


def not_finite(rank: int, world: int, odd: int) -> None:
    """Runs a backward pass in which the gradient of one rank's output is NaN."""
    session = session_of(with_debug(SPARGE), f"U1R{world}", HEADS)
    q = torch.randn(1, HEADS, session.begin(Video((2, 4, 8)), timestep=900.0).shard, 16, requires_grad=True)
    out = session.attend(0, q, q, q)
    out.backward(torch.full_like(out, float("nan") if rank == odd else 1.0))


def inference_tensors(rank: int, world: int) -> None:
    """Runs attention with gradients in which k is a tensor of inference mode."""
    session = session_of(with_debug(SPARGE), f"U1R{world}", HEADS)
    q = torch.randn(1, HEADS, session.begin(Video((2, 4, 8)), timestep=900.0).shard, 16, requires_grad=True)
    with torch.inference_mode():
        k = q.clone()
    session.attend(0, q, k, q)


def test_bad_input_raises(threads):
    message = "rank(s) [1]: the gradient of attention's output has values that are not finite"
    assert_all_raise(threads, 3, message, not_finite, 1)
    assert_all_raise(threads, 2, "was made under torch.inference_mode()", inference_tensors)
    with pytest.raises(UserError, match="it has no backward, but gradients are needed; use cpu or triton"):
        require_supported("sparge", KernelRequirements(backward=True))
