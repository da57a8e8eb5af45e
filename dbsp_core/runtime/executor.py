"""What computes attention under one plan and one mask on one rank, once all ranks have agreed on both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from dbsp_core.comm.consistency import needs_gradients
from dbsp_core.comm.exchange import Route
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.backward import attention_with_gradients
from dbsp_core.runtime.chunk_attention import PreparedAttention, forward
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.runtime.tables import ChunkTable, build_tables, dense_spans_of
from dbsp_core.utils.errors import UserError
from dbsp_kernels import Kernel, KernelRequirements, choose_kernel

__all__ = ["AttentionExecutor", "KernelChoice"]

Executor = TypeVar("Executor", bound="AttentionExecutor")
KernelQuestion = tuple[KernelRequirements, torch.device, torch.dtype]


class KernelChoice:
    """The kernel for a plan's attentions, chosen once for a device, dtype and head size, with gradients or without.

    Args:
        asked: A name from `dbsp_kernels.KERNELS`, or "auto".
        needs: What the plan needs of a kernel.
    """

    def __init__(self, asked: str, needs: KernelRequirements) -> None:
        self.asked = asked
        self._needs = needs
        self._chosen: dict[KernelQuestion, Kernel] = {}

    @property
    def name(self) -> str:
        """Name of the kernel that was chosen last, or what was asked for before the first call."""
        return next(reversed(self._chosen.values())).name if self._chosen else self.asked

    def kernel_for(self, q: torch.Tensor, *, backward: bool = False) -> Kernel:
        """Returns the kernel for inputs like q [..., D], with a backward if there are gradients.

        Raises UserError where none, or not the one asked for, can serve.
        """
        question = self.question(q, backward=backward)
        if question not in self._chosen:
            needs, device, dtype = question
            self._chosen[question] = choose_kernel(self.asked, device, dtype, needs)
        return self._chosen[question]

    def question(self, q: torch.Tensor, *, backward: bool) -> KernelQuestion:
        """Returns everything that `kernel_for` decides by."""
        needs = replace(self._needs, width=q.shape[-1], lse=backward or self._needs.lse, backward=backward)
        return needs, q.device, q.dtype


@dataclass(eq=False, repr=False)
class AttentionExecutor(PreparedAttention):
    """Attention under one plan and one mask, for ranks that have agreed on their parts and on what they are given.

    Attributes:
        kernels: The choice of its kernel.
        mask_mark: The mask's fingerprint where ranks compare masks; else 0.
    """

    kernels: KernelChoice
    mask_mark: int = 0

    @classmethod
    def of_part(
        cls: type[Executor],
        part: RankPlan,
        plan: Plan,
        mask: BlockMask,
        group: SequenceGroup,
        kernel: str,
        *,
        mark: bool,
    ) -> Executor:
        """Makes an executor with the kernel tables of a mask.

        Args:
            part: This rank's part, on the device of the calls to come.
            plan: The part's plan, or one with the same owners and chunks.
            mark: Whether ranks will compare masks, whose bits are read back for it.
        """
        if not plan.same_routes(part.plan):
            raise ValueError("this part of a plan was made for another plan")
        tables, head_tokens = _tables(part, plan, mask), part.head_tokens
        needs = KernelRequirements(
            (plan.grid.block_q, plan.grid.block_k),
            lse=plan.strategy.ring > 1,
            ragged_rows=head_tokens is None,
            tokens=head_tokens,
        )
        choice, mask_mark = KernelChoice(kernel, needs), mask.fingerprint if mark else 0
        return cls(part, plan, tables, group, choice, mask_mark, coarse=mask.coarse)

    def for_mask(self, plan: Plan, mask: BlockMask, *, mark: bool) -> AttentionExecutor:
        """The executor for another mask, under a plan with the same owners and chunks; see `of_part`."""
        tables, mask_mark = _tables(self.part, plan, mask), mask.fingerprint if mark else 0
        return replace(self, plan=plan, tables=tables, mask_mark=mask_mark, coarse=mask.coarse)

    @property
    def kernel(self) -> str:
        """Name of the kernel that was asked for, or "auto"."""
        return self.kernels.asked

    @property
    def route(self) -> Route:
        return self.part.route

    @property
    def device(self) -> torch.device:
        """The device of its tables."""
        return self.tables[0].kv_len.device

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        check_gradient: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Attention, [B, H, n_local, D], of q, k and v of that shape, which all ranks have checked. Collective.

        `check_gradient` is given the output's gradient before it is used.
        """
        if needs_gradients(q, k, v):
            if self.no_gradients is not None:
                raise UserError(self.no_gradients)
            return attention_with_gradients(self, q, k, v, scale, self.kernel_for(q, k, v), check_gradient)
        return forward(self, q, k, v, scale, self.kernel_for(q, k, v))

    def kernel_for(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Kernel:
        """Returns the kernel that computes this attention. Raises UserError if none supports it."""
        return self.kernels.kernel_for(q, backward=needs_gradients(q, k, v))

    def kernel_question(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> KernelQuestion:
        """Returns everything that `kernel_for` decides by, equal on all ranks that attend together."""
        return self.kernels.question(q, backward=needs_gradients(q, k, v))


def _tables(part: RankPlan, plan: Plan, mask: BlockMask) -> tuple[ChunkTable, ...]:
    """The kernel tables of a mask under a part's plan, one a chunk of keys."""
    plan.require_fit(mask)
    return build_tables(part.table_layout, mask, dense_spans_of(mask, part.table_layout.rows.device))
