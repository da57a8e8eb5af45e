"""Activation checkpointing: in backward a layer's attention is called again, and must meet its forward's executor."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dbsp_core.runtime.executor import AttentionExecutor
from dbsp_core.utils.errors import UserError

__all__ = ["MOST_PENDING", "Recomputation"]

MOST_PENDING = 16
"""Forward passes whose executors are remembered for a backward that is still to come."""


@dataclass
class Recomputation:
    """Which executor each layer had, in the forward passes under autograd that backward has not computed again yet."""

    _pending: deque[dict[int, AttentionExecutor]] = field(default_factory=lambda: deque(maxlen=MOST_PENDING))
    _current: dict[int, AttentionExecutor] | None = None

    def begin(self, gradients: bool) -> None:
        """Starts a forward pass.

        Args:
            gradients: Whether backward may follow.
        """
        self._current = {} if gradients else None
        if self._current is not None:
            self._pending.append(self._current)

    def keep(self, layer: int, executor: AttentionExecutor) -> None:
        """Remembers what a layer of the current pass is computed with."""
        if self._current is not None:
            self._current[layer] = executor

    def take(self, layer: int) -> AttentionExecutor:
        """What a layer was computed with, in the last pass that it was not computed again for.

        Raises UserError where several passes wait that had different masks or plans: nothing says which one this is.
        """
        passes = [one for one in self._pending if layer in one]
        if not passes:
            raise UserError(
                f"attention of layer {layer} is computed again, but no forward pass with gradients waits for it; call "
                "backward once for each forward pass"
            )
        if len({id(one[layer]) for one in passes}) > 1:
            raise UserError(
                f"{len(passes)} forward passes with different masks wait for backward, and activation checkpointing "
                f"computes layer {layer} again without saying for which; call backward after each forward pass, and "
                "run passes without backward under torch.no_grad()"
            )
        return passes[-1].pop(layer)
