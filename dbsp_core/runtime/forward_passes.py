"""Forward passes of a session: the current one, and those that checkpointing recomputes in backward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.runtime.size import PassMasks, Size
from dbsp_core.utils.errors import UserError

MOST_PENDING = 16
"""Forward passes without a graph (reentrant checkpoints) to remember until they are recomputed."""
NOT_BEGUN = "attention was called before the forward pass began; enable db-SP on the transformer"
_running_backward = torch._C._current_graph_task_id
"""Returns the id of the backward running in this thread, or −1."""


@dataclass(eq=False)
class _Attended:
    """A computed attention of a forward pass."""

    prepared: PreparedAttention | None = None  # Its prepared attention, if backward may follow
    node: weakref.ref[Any] | None = None  # Its autograd node
    without_graph: bool = False  # True in a reentrant checkpoint (forward without graph) until it is recomputed

    @property
    def waits(self) -> bool:
        """True if backward may still reach it: its node is alive and has not freed its saved tensors."""
        node = None if self.node is None else self.node()
        if node is None:
            return self.without_graph
        try:
            node._raw_saved_tensors  # noqa: B018  raw: unpacking would recompute a checkpoint
        except RuntimeError:
            return False
        return True


@dataclass(eq=False)
class ForwardPass:
    """One forward pass."""

    gradients: bool  # True if backward may follow
    backward: int  # The backward within which it began, or −1; a checkpoint may contain the whole transformer
    size: Size | None = None  # State of its video size; None until set by `AttentionSession.begin`
    masks: PassMasks = ()  # Mask of each layer, None if predicted; `key`: their cache key
    key: Hashable = None
    # Fingerprints by message to compare at its first attention; None if already compared or nothing is new
    compared: Mapping[str, int] | None = None
    sharding: Any = None  # The framework's description of how it is sharded
    reached: dict[int, _Attended] = field(default_factory=dict)  # The computed attentions by layer

    @property
    def known_size(self) -> Size:
        """The pass's size. Raises RuntimeError if the pass has not begun."""
        if self.size is None:
            raise RuntimeError(NOT_BEGUN)
        return self.size

    def keep(self, layer: int, prepared: PreparedAttention, out: torch.Tensor) -> None:
        """Remembers a layer's prepared attention; `out` is its output with autograd node."""
        self.reached[layer] = done = _Attended()
        if self.gradients:
            done.prepared = prepared
            done.node = None if out.grad_fn is None else weakref.ref(out.grad_fn)
            done.without_graph = out.grad_fn is None and not torch.is_grad_enabled()

    @property
    def waits(self) -> bool:
        """True if backward may still reach this pass."""
        return any(done.waits for done in self.reached.values())

    def waits_for(self, layer: int) -> bool:
        """Returns True if backward may still reach this layer."""
        done = self.reached.get(layer)
        if done is None or done.node is not None:
            return done is not None and done.waits
        return done.without_graph or (done.prepared is not None and self.waits)  # also for frozen layers


class ForwardPasses:
    """The current forward pass of a session, and those that await backward.

    A recomputed checkpoint belongs to the pass of its first computation, not to the last pass. Checkpoints that db-SP
    follows name that pass (`resumed`); for others it must be unambiguous among the waiting passes.

    Not a dataclass, because FSDP searches dataclasses for tensors and passes refer back to sessions.
    """

    def __init__(self) -> None:
        self._last: ForwardPass | None = None
        self._resumed: ForwardPass | None = None
        self._waiting: deque[ForwardPass] = deque()

    def begin(self, gradients: bool) -> ForwardPass:
        """Starts a forward pass; with `gradients`, backward may follow."""
        self._waiting = deque(forward_pass for forward_pass in self._waiting if forward_pass.waits)
        while len(self._waiting) >= MOST_PENDING and all(
            done.node is None for done in self._waiting[0].reached.values()
        ):
            self._waiting.popleft()
        self._last = ForwardPass(gradients, _running_backward())
        if gradients:
            self._waiting.append(self._last)
        return self._last

    @property
    def last(self) -> ForwardPass:
        """The latest pass."""
        if self._last is None:
            raise RuntimeError(NOT_BEGUN)
        return self._last

    @contextmanager
    def resumed(self, forward_pass: ForwardPass) -> Iterator[None]:
        """Marks the body as recomputing a part of this pass."""
        before, self._resumed = self._resumed, forward_pass
        try:
            yield
        finally:
            self._resumed = before

    @property
    def recomputing(self) -> bool:
        """True while backward recomputes a part of an earlier pass."""
        if self._resumed is not None:
            return True
        if self._last is None or torch.compiler.is_compiling():  # compiled code only has followed checkpoints
            return False
        return _running_backward() not in (-1, self._last.backward)

    @property
    def now(self) -> ForwardPass:
        """The pass to which the current computation belongs.

        Raises:
            UserError: It is a recomputation, and passes with different sharding wait for backward.
        """
        if self._resumed is not None:
            return self._resumed
        if not self.recomputing:
            return self.last
        waiting = [forward_pass for forward_pass in self._waiting if forward_pass.waits] or list(self._waiting)
        return _only(waiting, [forward_pass.sharding for forward_pass in waiting], "a part of the transformer")

    def recomputed(self, layer: int) -> PreparedAttention | None:
        """Returns a layer's prepared attention if it is being recomputed; None in a forward pass.

        Raises:
            UserError: The pass is ambiguous: none waits for backward, or several with different masks or plans.
        """
        if not self.recomputing:
            return None
        forward_pass = self._resumed
        if forward_pass is None:
            waiting = [forward_pass for forward_pass in self._waiting if forward_pass.waits_for(layer)]
            plans = [id(forward_pass.reached[layer].prepared) for forward_pass in waiting]
            forward_pass = _only(waiting, plans, f"layer {layer}")
        done = forward_pass.reached[layer]
        if done.prepared is None:
            raise RuntimeError(f"layer {layer} is being recomputed, and its forward pass was without gradients")
        done.without_graph = False
        return done.prepared


def _only(waiting: list[ForwardPass], parts: list[Any], what: str) -> ForwardPass:
    """Returns the last waiting pass. Raises UserError unless all waiting passes have equal parts."""
    if not waiting:
        raise UserError(
            f"{what} is being recomputed, but no forward pass is waiting for backward; call backward() once per "
            "forward pass, or checkpoint with use_reentrant=False to call it again on a retained graph"
        )
    if any(part != parts[0] for part in parts):
        raise UserError(
            f"{len(waiting)} forward passes of different sizes or masks wait for backward, or have retained graphs, "
            f"and activation checkpointing recomputes {what} without saying for which; use "
            "transformer.enable_gradient_checkpointing() or torch's checkpoint_wrapper, which db-SP follows; or call "
            "backward() after each forward pass, drop retained graphs, and run passes without backward under "
            "torch.no_grad()"
        )
    return waiting[-1]
