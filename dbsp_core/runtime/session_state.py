"""State of a session's forward pass: observers, recomputation in backward, one thread at a time."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.runtime.plan_keeper import PlanUse
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.utils.errors import UserError

TWO_THREADS = (
    "two threads use db-SP on the same ranks at once, which would answer each other's calls; let one run at a time, "
    "or give each a process group of its own"
)
_LOCKS: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()


class ConcurrencyGuard:
    """Keeps a second thread out while one is within a call on a group's ranks, whichever sessions they use."""

    def __init__(self, group: SequenceGroup) -> None:
        process_group, lock = group.group, threading.Lock()
        self._lock = lock if process_group is None else _LOCKS.setdefault(process_group, lock)

    def __enter__(self) -> None:
        """Guards one call. Raises UserError if another thread is within one."""
        if not self._lock.acquire(blocking=False):
            raise UserError(TWO_THREADS)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class SessionObserver:
    """Observer of a session; each method does nothing unless it is overridden.

    Attributes:
        compares: True if plans must be compared with the contiguous plan.
        counts_steps: True if denoising steps must be distinguished, also if masks don't depend on them.
    """

    compares = False
    counts_steps = False

    def begin(
        self, step: DenoisingStep, timestep: torch.Tensor | float | None, cfg_branch: int | None, index: int | None
    ) -> None:
        """Observes the start of a forward pass. timestep, cfg_branch and index (of the step) are the framework's."""

    def mask_made(self, key: Hashable, layer: int, mask: BlockMask, lasting: bool) -> None:
        """Observes a new mask.

        Args:
            key: By which `mask_used` will name it, until another is made with that key.
            lasting: True if it may be used in later passes, or for other layers, without being made again.
        """

    def mask_used(self, layer: int, key: Hashable) -> None:
        """Observes that a layer's attention is about to use the mask of this key."""

    def attention_begins(self, device: torch.device) -> None:
        """Observes that an attention on this device will be planned and computed."""

    def attention_ends(self, layer: int, prepared: PreparedAttention, q: torch.Tensor, use: PlanUse) -> None:
        """Observes that an attention of q [B, H, shard, D] was computed, or queued on its device.

        Args:
            use: Its plan. `use.counted` is set by the time the session's `flush` returns.
        """


MOST_PENDING = 16
"""Forward passes without a graph (reentrant checkpoints) that are remembered until they are recomputed."""


@dataclass(frozen=True)
class _Kept:
    """Inputs from which one layer of a forward pass was computed.

    Attributes:
        node: The attention's node in the autograd graph, which holds `prepared`; None inside a reentrant checkpoint,
            whose forward has no graph.
        prepared: The prepared attention, where there is no node.
    """

    node: weakref.ref[Any] | None
    prepared: PreparedAttention | None

    def waiting(self) -> PreparedAttention | None:
        """Returns the prepared attention if backward may still come to this attention, else None."""
        if self.node is None:
            return self.prepared
        node = self.node()
        return None if node is None or _freed(node) else node.prepared


@dataclass
class Recomputation:
    """The prepared attention of each layer in the forward passes whose backward is still to come.

    A pass whose graph is gone, or has freed what it saved for backward, is forgotten. Reentrant checkpoints have no
    graph before backward, so the number of their passes is bounded.
    """

    _passes: deque[dict[int, _Kept]] = field(default_factory=deque)
    _current: dict[int, _Kept] | None = None

    def begin(self, gradients: bool) -> None:
        """Starts a forward pass, which backward may follow if there are `gradients`."""
        self._passes = deque(one for one in self._passes if any(kept.waiting() for kept in one.values()))
        while len(self._passes) >= MOST_PENDING and all(kept.node is None for kept in self._passes[0].values()):
            self._passes.popleft()
        self._current = {} if gradients else None
        if self._current is not None:
            self._passes.append(self._current)

    def keep(self, layer: int, prepared: PreparedAttention, out: torch.Tensor) -> None:
        """Remembers what a layer of the current pass was computed with; `out` is its output as it was computed."""
        if self._current is None:
            return
        if out.grad_fn is not None:
            self._current[layer] = _Kept(weakref.ref(out.grad_fn), None)
        elif not torch.is_grad_enabled():  # a reentrant checkpoint's forward
            self._current[layer] = _Kept(None, prepared)

    def take(self, layer: int) -> PreparedAttention:
        """Returns the prepared attention that a layer was computed with, in the one pass that waits for backward.

        Raises:
            UserError: If no pass waits, or several that had different masks or plans.
        """
        found = [(one, prepared) for one in self._passes if layer in one and (prepared := one[layer].waiting())]
        if not found:
            raise UserError(
                f"layer {layer} is being recomputed, but no forward pass is waiting for backward; call backward() "
                "once per forward pass, or checkpoint with use_reentrant=False to call it again on a retained graph"
            )
        if len({id(prepared) for _, prepared in found}) > 1:
            raise UserError(
                f"{len(found)} forward passes with different masks wait for backward, or have retained graphs, and "
                f"activation checkpointing recomputes layer {layer} without saying for which; call backward() after "
                "each forward pass, drop retained graphs, and run passes without backward under torch.no_grad()"
            )
        last, prepared = found[-1]
        if last[layer].node is None:
            del last[layer]
        return prepared


def _freed(node: Any) -> bool:
    """Returns True if a node of the graph has freed what it saved: then its backward is over."""
    try:
        node._raw_saved_tensors  # noqa: B018  without unpacking them, which would recompute a checkpoint
    except RuntimeError:
        return True
    return False
