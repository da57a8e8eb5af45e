"""Training with sessions: passes of inference mode before it, activation checkpointing, and what is kept of passes."""

from __future__ import annotations

import gc
from typing import Any, TypeVar

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dbsp_core.masks.grid import Video
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


class Training:
    """A session of two layers, whose masks differ in each pass."""

    def __init__(self) -> None:
        self.session = session_of(SPARGE, "U2R1", HEADS, LAYERS)

    def forward(self, seed: int, reentrant: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the input and loss of a pass; reentrant: kind of checkpoint around each attention, or None."""
        layout = self.session.begin(Video((2, 4, 8)), timestep=900.0 - seed)
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
    """Trains three steps without checkpoints, then two with. Returns the worst relative error."""
    plain, training = Training(), Training()
    graphs, errors = [], []
    for seed in range(3):
        graphs.append(training.forward(seed))
        graphs[-1][1].backward()
    for seed in (8, 9):
        expected = plain.gradient(seed)
        errors.append(largest_difference(training.gradient(seed, reentrant), expected) / float(expected.abs().max()))
    return max(errors)


def retained_graph(rank: int, world: int, reentrant: bool, between: int = 0) -> float | str:
    """Calls backward twice under checkpoints, perhaps with other masks' forward passes between them.

    Returns the difference of gradients, or the error.
    """
    training = Training()
    q, loss = training.forward(1, reentrant)
    loss.backward(retain_graph=True)
    first, q.grad = grad_of(q), None
    _others = [training.forward(2 + number, False) for number in range(between)]
    try:
        loss.backward()
    except UserError as error:
        return str(error)
    return largest_difference(grad_of(q), first)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_turned_on_later_gives_equal_gradients(threads, reentrant):
    assert max(threads(2).run(checkpointing_turned_on_later, reentrant)) <= 1e-5


def test_second_backward_on_a_retained_graph_gives_equal_gradients(threads):
    assert max(threads(2).run(retained_graph, False)) <= 1e-6
    for rejection in threads(2).run(retained_graph, True):
        assert "checkpoint with use_reentrant=False to call it again on a retained graph" in rejection


def test_retained_graph_after_another_pass_raises(threads):
    for rejection in threads(2).run(retained_graph, False, 1):
        assert "2 forward passes of different sizes or masks wait for backward, or have retained graphs" in rejection
