"""Splitting a batch over groups of ranks: a transformer computes its own samples, and returns all."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from dbsp_core.comm.consistency import check_consistent
from dbsp_core.comm.groups import SequenceGroup, gather_shards
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.patching import PatchSet, sample_of, signature_of

__all__ = ["BatchSplit", "split_batch"]

LISTS = {"cap_feats", "img_shapes", "x"}
"""Arguments, of any transformer, that are lists with an entry for each sample of the batch."""


def split_batch(
    transformer: nn.Module, group: SequenceGroup, patches: PatchSet, *, repeat_uneven: bool = False
) -> SequenceGroup | BatchSplit:
    """Cuts the batch of every forward pass into equal runs of samples, one a rank of `group`, and gathers the outputs.

    Where one rank's pass fails, the others' raise RuntimeError.

    Args:
        group: The ranks that have the same part of the sequence. Collective at once: they get an auxiliary gloo group.
        repeat_uneven: Whether every rank computes a pass whose batch does not divide; otherwise it raises UserError.

    Returns:
        The group, for what its ranks decide together within a pass.
    """
    if group.size == 1:
        return group
    split = BatchSplit(group, group.control(), repeat_uneven)
    patches.hook(transformer.register_forward_pre_hook, split.take, with_kwargs=True)
    # Also called when the pass failed: the other ranks of the group must not wait for its output.
    patches.hook(transformer.register_forward_hook, split.gather, always_call=True)
    return split


class BatchSplit:
    """The ranks that hold the same part of the sequence, of other samples, within a forward pass."""

    def __init__(self, group: SequenceGroup, control: SequenceGroup, repeat_uneven: bool) -> None:
        self._group = group
        self._control = control
        self._repeat_uneven = repeat_uneven
        self._replicated = False  # whether the current pass is computed by every rank
        self._aborted = False  # whether another rank has reported a failure

    @property
    def size(self) -> int:
        return self._group.size

    def all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """The group's `all_gather`, within a pass. Raises RuntimeError where another rank's pass has failed."""
        self._check(None)
        return self._group.all_gather(mine)

    @torch.compiler.disable
    def take(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This rank's part of every argument that has one row for each sample of the batch."""
        self._aborted = False
        call = signature_of(module).bind(*args, **kwargs)
        batch, ranks = len(sample_of(call.arguments)), self._group.size
        self._replicated = batch % ranks > 0 and self._repeat_uneven
        if self._replicated:
            return args, kwargs
        if batch % ranks:
            raise UserError(
                f"{batch} item(s) in a pass cannot be shared by {ranks} batch groups; make the mesh with "
                "max_batch_dim_size=1, or with a divisor of the batch (Wan passes the two branches of guidance one "
                "after the other, CogVideoX in one batch)"
            )
        samples = batch // ranks
        mine = slice(self._group.rank * samples, (self._group.rank + 1) * samples)
        for name, value in call.arguments.items():
            if (name in LISTS or (isinstance(value, torch.Tensor) and value.ndim > 0)) and len(value) == batch:
                call.arguments[name] = value[mine]
        return call.args, call.kwargs

    @torch.compiler.disable
    def gather(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Makes an output whole: a tuple or diffusers output of tensors; None after a failure."""
        failure = sys.exc_info()[1] if output is None else None
        if self._aborted:
            return None
        if failure is not None:
            with suppress(RuntimeError):  # the failure itself is being raised
                self._check(RuntimeError(f"{type(failure).__name__}: {failure}"))
            return None
        self._check(None)
        if self._replicated:
            return output
        if isinstance(output, tuple):
            return tuple(map(self._whole, output))
        return type(output)(**{name: self._whole(value) for name, value in output.items()})

    def _whole(self, value: Any) -> Any:
        if isinstance(value, list):
            return list(gather_shards(torch.stack(value), 0, self._group))
        return gather_shards(value, 0, self._group) if isinstance(value, torch.Tensor) else value

    def _check(self, problem: Exception | None) -> None:
        try:
            check_consistent(self._control, problem, {}, RuntimeError)
        except RuntimeError:
            self._aborted = True
            raise
