"""Activation checkpointing: in backward a layer's attention is called again, and must meet its forward's executor."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from dbsp_core.runtime.executor import AttentionExecutor
from dbsp_core.utils.errors import UserError

__all__ = ["MOST_PENDING", "Recomputation"]

MOST_PENDING = 16
"""Forward passes without a graph (reentrant checkpoints) that are remembered until they are recomputed."""


@dataclass(frozen=True)
class _Kept:
    """What one layer of a forward pass was computed with.

    Attributes:
        node: The attention's node in the autograd graph, which holds the executor; None inside a reentrant checkpoint,
            whose forward has no graph.
        executor: The executor, where there is no node.
    """

    node: weakref.ref[Any] | None
    executor: AttentionExecutor | None

    def waiting(self) -> AttentionExecutor | None:
        """Returns the executor if backward may still come to this attention, else None."""
        if self.node is None:
            return self.executor
        node = self.node()
        return None if node is None or _freed(node) else node.prepared


@dataclass
class Recomputation:
    """The executor of each layer in the forward passes whose backward is still to come.

    A pass whose graph is gone, or has freed what it saved for backward, is forgotten. Reentrant checkpoints have no
    graph before backward, so the number of their passes is bounded.
    """

    _passes: deque[dict[int, _Kept]] = field(default_factory=deque)
    _current: dict[int, _Kept] | None = None

    def begin(self, gradients: bool) -> None:
        """Starts a forward pass.

        Args:
            gradients: True if backward may follow.
        """
        self._passes = deque(one for one in self._passes if any(kept.waiting() for kept in one.values()))
        while len(self._passes) >= MOST_PENDING and all(kept.node is None for kept in self._passes[0].values()):
            self._passes.popleft()
        self._current = {} if gradients else None
        if self._current is not None:
            self._passes.append(self._current)

    def keep(self, layer: int, executor: AttentionExecutor, out: torch.Tensor) -> None:
        """Remembers what a layer of the current pass was computed with.

        Args:
            out: The executor's output, as it returned it.
        """
        if self._current is None:
            return
        if out.grad_fn is not None:
            self._current[layer] = _Kept(weakref.ref(out.grad_fn), None)
        elif not torch.is_grad_enabled():  # a reentrant checkpoint's forward
            self._current[layer] = _Kept(None, executor)

    def take(self, layer: int) -> AttentionExecutor:
        """Returns the executor that a layer was computed with, in the one pass that waits for backward.

        Raises:
            UserError: If no pass waits, or several that had different masks or plans.
        """
        found = [(one, executor) for one in self._passes if layer in one and (executor := one[layer].waiting())]
        if not found:
            raise UserError(
                f"layer {layer} is being recomputed, but no forward pass is waiting for backward; call backward() "
                "once per forward pass, or checkpoint with use_reentrant=False to call it again on a retained graph"
            )
        if len({id(executor) for _, executor in found}) > 1:
            raise UserError(
                f"{len(found)} forward passes with different masks wait for backward, or have retained graphs, and "
                f"activation checkpointing recomputes layer {layer} without saying for which; call backward() after "
                "each forward pass, drop retained graphs, and run passes without backward under torch.no_grad()"
            )
        last, executor = found[-1]
        if last[layer].node is None:
            del last[layer]
        return executor


def _freed(node: Any) -> bool:
    """Returns True if a node of the graph has freed what it saved: then its backward is over."""
    try:
        node._raw_saved_tensors  # noqa: B018  without unpacking them, which would recompute a checkpoint
    except RuntimeError:
        return True
    return False
