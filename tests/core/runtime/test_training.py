"""Training with sessions: passes of inference mode before it, activation checkpointing, and what is kept of passes."""

from __future__ import annotations

import gc
from typing import Any, TypeVar

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from tests.support.oracle import largest_difference
from tests.support.settings import session_of

T = TypeVar("T")
HEADS, LAYERS = 4, 2
WINDOW = {"mask": {"source": "window", "window": [3, 3, 3], "block_q": 16, "block_k": 16}}
SPARGE = {"mask": {"source": "sparge", "cdf": 0.6, "block_q": 16, "block_k": 16}}


def kept_from_inference(
    rank: int, world: int, settings: dict[str, Any], strategy: str
) -> tuple[int, int, float, bool]:
    """Runs a pass in inference mode, then training.

    Returns how many tensors are left of the first pass and how many of them autograd would reject, how far the passes
    are apart, and whether there are gradients.
    """
    session = session_of(settings, strategy, HEADS)
    before = set(map(id, _alive(torch.Tensor)))
    with torch.inference_mode():
        layout = session.begin(Video((2, 4, 8)), timestep=900.0)
        q, k, v = torch.randn(3, 1, HEADS, layout.shard, 16, generator=torch.Generator().manual_seed(rank))
        first = session.attend(0, q, k, v).tolist()
    given = [t.tolist() for t in (q, k, v)]
    del q, k, v
    gc.collect()
    kept = [one for one in _alive(torch.Tensor) if id(one) not in before]
    session.begin(Video((2, 4, 8)), timestep=900.0)
    q, k, v = (torch.tensor(one, requires_grad=True) for one in given)
    out = session.attend(0, q, k, v)
    out.square().sum().backward()
    apart = largest_difference(out, torch.tensor(first))
    rejected = sum(one.is_inference() for one in kept)
    return len(kept), rejected, apart, all(t.grad is not None for t in (q, k, v))


def _alive(kind: type[T]) -> list[T]:
    """Returns all objects of a kind; `isinstance` would ask the object of a weak proxy, which may be gone."""
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


@pytest.mark.parametrize(
    ("strategy", "settings", "debug"),
    [("U2R1", WINDOW, ""), ("U1R2", SPARGE, ""), ("U2R1", SPARGE, "1")],
    ids=["window", "sparge", "debug"],
)
def test_tensors_kept_from_inference_mode_are_accepted_by_autograd(pool, monkeypatch, strategy, settings, debug):
    monkeypatch.setenv("DBSP_DEBUG", debug)
    for kept, rejected, apart, gradients in pool(2).run(kept_from_inference, settings, strategy):
        assert kept > 10
        assert rejected == 0
        assert apart <= 1e-5
        assert gradients


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
