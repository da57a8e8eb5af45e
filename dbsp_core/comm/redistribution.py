"""Distributing tokens over ranks: `sp_shard` and `sp_gather` for replicated tensors, and `Redistribution`.

A redistribution moves tokens from one sequence layout to another by one all-to-all, and back by another. Data loaders
leave whole sequences on ranks, while attention and linear layers need equal numbers of tokens. All tensors of the
tokens (hidden states, positions, timestep indices, labels), of any dtypes, are sent at once. One exchange in and one
out follows KnapFormer (Zhang et al., KnapFormer: An Online Load Balancer for Efficient Diffusion Transformers
Training, 2025).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from dbsp_core.comm.consistency import DEBUG_DIFFERS, ConcurrencyGuard, agree, attempt, needs_gradients
from dbsp_core.comm.groups import SequenceGroup, gather_shards
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_kernels.segments import to_device

TENSORS_DIFFER = (
    "the tensors to redistribute differ on rank(s) {} in number, dtype, sizes other than tokens, or requires_grad; "
    "pass alike tensors on all ranks"
)
LAYOUTS_DIFFER = "the layouts of a redistribution differ on rank(s) {}; make them from the same sequences on all ranks"


@dataclass(frozen=True, eq=False, repr=False)
class _Way:
    """One rank's side of one direction."""

    take: torch.Tensor  # int64[n], source slots of this rank's tokens, by destination; `sent` tokens to each rank
    sent: tuple[int, ...]
    put: torch.Tensor  # int64[m], target slots of its tokens, by source; `received` tokens from each rank
    received: tuple[int, ...]
    slots: tuple[int, int]  # this rank's slots before and after, padding included

    @classmethod
    def from_layouts(cls, source: SequenceLayout, target: SequenceLayout, rank: int, slots: tuple[int, int]) -> _Way:
        # Between two ranks, tokens are sent in order of their target slots, which both ends know.
        leaving, coming = np.flatnonzero(source.rank == rank), np.flatnonzero(target.rank == rank)
        leaving = leaving[np.lexsort((target.local[leaving], target.rank[leaving]))]
        coming = coming[np.lexsort((target.local[coming], source.rank[coming]))]
        return cls(
            torch.from_numpy(source.local[leaving]),
            tuple(np.bincount(target.rank[leaving], minlength=source.world).tolist()),
            torch.from_numpy(target.local[coming]),
            tuple(np.bincount(source.rank[coming], minlength=source.world).tolist()),
            slots,
        )

    def reversed(self) -> _Way:
        """Returns the opposite direction."""
        return _Way(self.put, self.received, self.take, self.sent, self.slots[::-1])

    def to(self, device: torch.device) -> _Way:
        """Returns a copy with tables on a device."""
        return replace(self, take=to_device(self.take, device), put=to_device(self.put, device))

    def run(self, tensors: Sequence[torch.Tensor], group: SequenceGroup) -> tuple[torch.Tensor, ...]:
        """Moves tensors [slots before, …] → [slots after, …], zero at padding, in one exchange of bytes."""
        # 1. Send tokens, each with its bytes of all tensors
        taken = [tensor.index_select(0, self.take) for tensor in tensors]
        leaving = [some.reshape(len(some), math.prod(some.shape[1:])).view(torch.uint8) for some in taken]
        together = leaving[0] if len(leaving) == 1 else torch.cat(leaving, dim=1)
        came = group.all_to_all(together, self.received, self.sent)
        # 2. Write tokens to their slots
        redistributed = []
        for tensor, received in zip(tensors, came.split([part.shape[1] for part in leaving], dim=1), strict=True):
            after = tensor.new_zeros(self.slots[1], *tensor.shape[1:])
            received = received if len(tensors) == 1 else received.clone(memory_format=torch.contiguous_format)
            redistributed.append(
                after.index_copy_(0, self.put, received.view(tensor.dtype).view(len(received), *tensor.shape[1:]))
            )
        return tuple(redistributed)


class Redistribution:
    """One rank's side of moving tokens from one layout to another and back; made by `between`.

    Attributes:
        source: Layout before `there`, such as `SequenceLayout.whole_sequences`.
        target: Layout after `there`, such as `SequenceLayout.striped`.
        group: The ranks of both layouts.
        debug: True to compare tensors across ranks before every exchange, not only the first.
    """

    def __init__(
        self, source: SequenceLayout, target: SequenceLayout, group: SequenceGroup, debug: bool, there: _Way
    ) -> None:
        self.source, self.target, self.group, self.debug = source, target, group, debug
        self._ways = {torch.device("cpu"): (there, there.reversed())}
        self._checked: set[bool] = set()  # directions (True: `back`) whose inputs ranks have compared

    def __repr__(self) -> str:
        return f"<Redistribution on rank {self.group.rank} of {self.group.size}: {self.source} → {self.target}>"

    @classmethod
    def between(
        cls,
        source: SequenceLayout,
        target: SequenceLayout,
        group: SequenceGroup | None = None,
        *,
        source_slots: int | None = None,
        target_slots: int | None = None,
        debug: bool = False,
    ) -> Redistribution:
        """Makes this rank's side. Not collective.

        Args:
            source: See `Redistribution`.
            target: A layout of the same tokens and ranks.
            group: None: all ranks of torch.distributed.
            source_slots: This rank's slots at the source. None: `source.shard`, including padding at the end.
            target_slots: This rank's slots at the target, likewise.
            debug: See `Redistribution`.

        Raises:
            UserError: The layouts differ in tokens or ranks, or the slots cannot hold this rank's tokens.
        """
        group = group or SequenceGroup.from_group()
        for layout, of_what in ((target, (source.tokens, source.world)), (source, (source.tokens, group.size))):
            if (layout.tokens, layout.world) != of_what:
                raise UserError(
                    f"a layout of {layout.tokens} tokens on {layout.world} ranks does not fit {of_what[0]} tokens on "
                    f"{of_what[1]}; make source and target from the same sequences and the ranks of the group"
                )
        slots = source.slots_of(group.rank, source_slots), target.slots_of(group.rank, target_slots)
        return cls(source, target, group, debug, _Way.from_layouts(source, target, group.rank, slots))

    @overload
    def there(self, tensor: torch.Tensor, /, *, dim: int = 0) -> torch.Tensor: ...
    @overload
    def there(self, *tensors: torch.Tensor, dim: int | Sequence[int] = 0) -> tuple[torch.Tensor, ...]: ...
    def there(self, *tensors: torch.Tensor, dim: int | Sequence[int] = 0) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Moves tensors of this rank's tokens from `source` to `target` in one all-to-all. Collective; differentiable.

        Backward is collective, too: every rank must call it, a rank without sequences on the sum of an empty tensor.

        Args:
            tensors: Tensors of any dtypes on one device, with one slot per token in `dim`.
            dim: Dimension of tokens, for all tensors or for each.

        Returns:
            The tensors with this rank's slots at the target, zero at padding; a single tensor is not wrapped in a
            tuple.

        Raises:
            UserError: A tensor does not fit; raised on all ranks at the first call and under debug.
        """
        return self._run(tensors, dim, back=False)

    @overload
    def back(self, tensor: torch.Tensor, /, *, dim: int = 0) -> torch.Tensor: ...
    @overload
    def back(self, *tensors: torch.Tensor, dim: int | Sequence[int] = 0) -> tuple[torch.Tensor, ...]: ...
    def back(self, *tensors: torch.Tensor, dim: int | Sequence[int] = 0) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Moves tensors from `target` to `source`, the inverse of `there`."""
        return self._run(tensors, dim, back=True)

    def bytes_sent(self, token_bytes: int) -> tuple[int, int]:
        """Returns the bytes that this rank sends to others there and back, at `token_bytes` per token."""
        there, back = (sum(way.sent) - way.sent[self.group.rank] for way in self._ways[torch.device("cpu")])
        return there * token_bytes, back * token_bytes

    def _run(
        self, tensors: Sequence[torch.Tensor], dim: int | Sequence[int], back: bool
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        dims = (dim,) * len(tensors) if isinstance(dim, int) else tuple(dim)
        with ConcurrencyGuard(self.group):
            # Ranks compare at the first call and under debug
            problem = self._problem(tensors, dims, back)
            error = None if problem is None else UserError(problem)
            if self.debug or back not in self._checked:
                layouts = fingerprint_of((self.source.fingerprint, self.target.fingerprint))
                of_tensors = 0 if error else _fingerprint(tensors, dims)
                fingerprints = {DEBUG_DIFFERS: int(self.debug), LAYOUTS_DIFFER: layouts, TENSORS_DIFFER: of_tensors}
                agree(self.group, fingerprints, problem=error)
                self._checked.add(back)
            if error is not None:
                raise error
            leading = [tensor.movedim(dim, 0) for tensor, dim in zip(tensors, dims, strict=True)]
            moved = _Redistributed.apply(self, back, *leading)
        out = tuple(tensor.movedim(0, dim) for tensor, dim in zip(moved, dims, strict=True))
        return out[0] if len(out) == 1 else out

    def _way(self, back: bool, device: torch.device) -> _Way:
        if device not in self._ways:
            there, back_way = self._ways[torch.device("cpu")]
            self._ways[device] = there.to(device), back_way.to(device)
        return self._ways[device][back]

    def _problem(self, tensors: Sequence[torch.Tensor], dims: Sequence[int], back: bool) -> str | None:
        """Returns what is wrong with this rank's tensors, or None."""
        if not tensors or len(dims) != len(tensors):
            return (
                f"a redistribution needs at least one tensor, and one dim for all or one for each, got {len(tensors)}"
            )
        if len({tensor.device for tensor in tensors}) > 1:
            return "tensors that are redistributed together must be on one device"
        slots = self._ways[torch.device("cpu")][back].slots[0]
        for tensor, dim in zip(tensors, dims, strict=True):
            if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] != slots:
                layout = "target" if back else "source"
                return (
                    f"tensor of shape {tuple(tensor.shape)} does not fit: rank {self.group.rank} has {slots} slots "
                    f"in the {layout} layout, in dimension {dim}; set dim to the dimension of tokens, or pass "
                    f"{layout}_slots to Redistribution.between"
                )
        return None


def sp_shard(
    whole: torch.Tensor, dim: int, *, layout: SequenceLayout | None = None, group: SequenceGroup | None = None
) -> torch.Tensor:
    """Returns this rank's shard of a replicated tensor. Not collective; differentiable.

    The gradient of `whole` is nonzero at this rank's tokens only.

    Args:
        whole: [..., tokens, ...], of any dtype.
        dim: The dimension of tokens.
        layout: Which rank has which tokens. None: rank r has the r-th run of ceil(tokens / P) without padding, so the
            last ranks have fewer or none.
        group: The ranks that share the sequence. None: all ranks of torch.distributed.

    Returns:
        [..., n, ...]; with a layout, n is `layout.shard` and padding is zero.

    Raises:
        UserError: The layout has another number of tokens or ranks.
    """
    group = group or SequenceGroup.from_group()
    _require_dim(whole, dim)
    dim, tokens = dim % whole.ndim, whole.shape[dim]
    if layout is None:
        length = -(-tokens // group.size)
        first = min(group.rank * length, tokens)
        return whole.narrow(dim, first, min(length, tokens - first))
    if (layout.tokens, layout.world) != (tokens, group.size):
        raise UserError(
            f"expected {layout.tokens} tokens on {layout.world} ranks as in the layout, got {tokens} in dim {dim} "
            f"on {group.size} ranks; set dim to the dimension of tokens, and layout to this sequence's"
        )
    token, slot = (torch.from_numpy(of).to(whole.device) for of in layout.tokens_at(group.rank))
    shard = whole.new_zeros(*whole.shape[:dim], layout.shard, *whole.shape[dim + 1 :])
    return shard.index_copy(dim, slot, whole.index_select(dim, token))


def sp_gather(
    shard: torch.Tensor, dim: int, *, layout: SequenceLayout | None = None, group: SequenceGroup | None = None
) -> torch.Tensor:
    """Gathers all ranks' tokens in order on every rank, the inverse of `sp_shard`. Collective; differentiable.

    Every rank must compute the whole loss: backward sends nothing and returns the gradient of the rank's own shard.
    Gradients of parameters must be summed over the group.

    Compares shards across ranks on the host first, so call it once per model, not per layer. See also
    `Redistribution`.

    Args:
        shard: [..., n, ...], of equal shape on all ranks except for n.
        dim: The dimension of tokens.
        layout: As for `sp_shard`; n is at most `layout.shard` (padding at the end is optional). None: shards of any
            lengths are concatenated by rank.
        group: The ranks that share the sequence. None: all ranks of torch.distributed.

    Returns:
        [..., tokens, ...], without padding.

    Raises:
        UserError: Shards differ in more than n or do not fit the layout; raised on all ranks.
    """
    group = group or SequenceGroup.from_group()

    def length() -> int:
        _require_dim(shard, dim)
        if layout is None:
            return shard.shape[dim]
        if layout.world != group.size:
            raise UserError(f"expected a layout for {group.size} ranks, got {layout.world}; make it for the group")
        return layout.slots_of(group.rank, shard.shape[dim])

    # 1. All ranks' lengths
    slots, problem = attempt(length)
    other_sizes = 0 if problem else _fingerprint([shard], [dim])
    layouts = 0 if layout is None else layout.fingerprint
    with ConcurrencyGuard(group):
        fingerprints = {LAYOUTS_DIFFER: layouts, TENSORS_DIFFER: other_sizes}
        lengths = [row[0] for row in agree(group.control(), fingerprints, problem=problem, numbers=[slots or 0])]
        # 2. Pad and gather shards → [..., P · longest, ...]
        dim, longest = dim % shard.ndim, max(lengths)
        padding = shard.new_zeros(*shard.shape[:dim], longest - shard.shape[dim], *shard.shape[dim + 1 :])
        together = gather_shards(torch.cat([shard, padding], dim), dim, group)
    # 3. Put tokens in order
    if layout is None:
        places = torch.cat([rank * longest + torch.arange(n, device="cpu") for rank, n in enumerate(lengths)])
    else:
        places = torch.from_numpy(layout.rank * longest + layout.local)
    return together.index_select(dim, places.to(shard.device))


def _require_dim(tensor: torch.Tensor, dim: int) -> None:
    """Raises UserError if a tensor has no such dimension."""
    if not -tensor.ndim <= dim < tensor.ndim:
        raise UserError(f"tensor of shape {tuple(tensor.shape)} has no dimension {dim}; set dim to that of the tokens")


def _fingerprint(tensors: Sequence[torch.Tensor], dims: Sequence[int]) -> int:
    """Returns a number below 2^63, equal for tensors that ranks can exchange."""
    leading = [tensor.movedim(dim, 0) for tensor, dim in zip(tensors, dims, strict=True)]
    return fingerprint_of([(tuple(tensor.shape[1:]), tensor.dtype, needs_gradients(tensor)) for tensor in leading])


class _Redistributed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, redistribution: Redistribution, back: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.redistribution, ctx.back = redistribution, back
        moved = redistribution._way(back, tensors[0].device).run(tensors, redistribution.group)
        ctx.mark_non_differentiable(
            *(tensor for tensor in moved if not (tensor.is_floating_point() or tensor.is_complex()))
        )
        return moved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = [index for index, wanted in enumerate(ctx.needs_input_grad[2:]) if wanted]
        way = ctx.redistribution._way(not ctx.back, grads[needed[0]].device)
        group = ctx.redistribution.group
        with ConcurrencyGuard(group):
            gradients = dict(zip(needed, way.run([grads[index] for index in needed], group), strict=True))
        return (None, None, *(gradients.get(index) for index in range(len(grads))))
