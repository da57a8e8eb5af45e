"""One rank's part of an attention, apart from q, k and v; and a mask that attentions share."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch

from dbsp_core.comm.consistency import InputKind
from dbsp_core.comm.exchange import Route
from dbsp_core.comm.exchange_tables import build_route
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.branches import Branch
from dbsp_core.masks.grid import Video
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.absent_keys import AbsentKeys
from dbsp_core.runtime.tables import ChunkTables, TableLayout, build_tables, dense_spans_of, table_layout
from dbsp_kernels import Kernel, KernelRequirements, choose_kernel
from dbsp_kernels.segments import to_device


@dataclass(frozen=True, eq=False, repr=False)
class PreparedAttention:
    """One plan and one mask on one rank. Ranks must have agreed on them, and on what they attend with.

    Attributes:
        plan: The plan, with its numbers for the mask.
        layout: Layout of the tokens outside attention.
        group: The ranks that share the sequence.
        device: The device of q, k and v, and of the tables.
        n_local: Tokens that this rank holds outside attention.
        route: The exchanges, which depend on the plan only, with tables on the device.
        table_layout: Common part of all masks' kernel tables.
        tables: The kernel tables of the mask, of all chunks of keys.
        kernel: Name of the kernel that was asked for, or "auto".
        branch: What the model adds to the output, or None.
        absent: Absent keys of this rank's rows, or None.
        mask_fingerprint: Fingerprint of the mask if ranks compare masks, else 0.
        kernels: The kernel that was chosen for each kind of inputs, in the order of choice.
        attended: Kinds of inputs that were attended with, whose shapes and tables need no second check.
    """

    plan: Plan
    layout: SequenceLayout
    group: SequenceGroup
    device: torch.device
    n_local: int
    route: Route
    table_layout: TableLayout
    tables: ChunkTables
    kernel: str
    branch: Branch | None
    absent: AbsentKeys | None = None
    mask_fingerprint: int = 0
    kernels: dict[InputKind, Kernel] = field(default_factory=dict)
    attended: set[InputKind] = field(default_factory=set)

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        layout: SequenceLayout,
        group: SequenceGroup,
        kernel: str,
        *,
        device: torch.device,
        n_local: int | None = None,
    ) -> PreparedAttention:
        """Makes what does not depend on a mask, on the host, and copies it to the device. Not collective.

        `for_mask` adds the tables of a mask.

        Args:
            plan: Made for `layout`.
            n_local: Default: with the padding at the end.
        """
        n_local = layout.shard if n_local is None else n_local
        route = build_route(plan, layout, group.rank, n_local, torch.device("cpu")).to(device)
        of_plan = table_layout(plan, group.rank).to(device)
        return cls(plan, layout, group, device, n_local, route, of_plan, ChunkTables.none(of_plan), kernel, None)

    def for_mask(self, plan: Plan, mask: BlockMask, *, fingerprint: bool = False) -> PreparedAttention:
        """Returns the same for a mask, or for another one: only its tables are new.

        Args:
            plan: A plan with the same routes (`Plan.same_routes`), which the mask fits.
            fingerprint: True if ranks will compare masks, whose bits are read back for it.
        """
        tables = build_tables(self.table_layout, mask, dense_spans_of(mask, self.device))
        made = replace(self, plan=plan, tables=tables, branch=mask.branch, absent=None)
        if mask.absent is not None:
            number = self.table_layout.number
            scores = to_device(mask.absent, self.device).flatten().index_select(0, number)
            made = replace(made, absent=AbsentKeys(scores, number // plan.grid.nq))
        # Kernels were chosen for whether their log-sum-exp is needed.
        kernels = self.kernels if (self.absent is None) == (made.absent is None) else {}
        return replace(made, kernels=kernels, mask_fingerprint=mask.fingerprint if fingerprint else 0)

    @property
    def no_gradients(self) -> str | None:
        """Error message if there are no gradients, else None."""
        if self.branch is None:
            return self.plan.comm_dtype.no_gradients
        return (
            f"gradients do not flow through a {self.branch.name}; give the mask source {self.branch.without}, or call "
            "attention under torch.no_grad()"
        )

    def kernel_for(self, kind: InputKind) -> Kernel:
        """Returns the kernel for inputs of a kind, chosen once. Raises UserError if none supports them."""
        if kind not in self.kernels:
            device, dtype, head_dim, backward = kind
            grid, tokens = self.plan.grid, self.table_layout.head_tokens
            needs = KernelRequirements(
                (grid.block_q, grid.block_k),
                head_dim=head_dim,
                lse=backward or self.plan.strategy.ring > 1 or self.absent is not None,
                backward=backward,
                ragged_rows=tokens is None,
                tokens=tokens,
            )
            self.kernels[kind] = choose_kernel(self.kernel, device, dtype, needs)
        return self.kernels[kind]

    @property
    def kernel_name(self) -> str:
        """Name of the kernel that was chosen last, or what was asked for before the first call."""
        return next(reversed(self.kernels.values())).name if self.kernels else self.kernel


@dataclass(eq=False)
class KnownMask:
    """A mask that is known without q and k: one object for all attentions of a size that have it.

    Its bits are not kept, which may be 57 MB (40 heads of a 720p video).

    Attributes:
        key: The videos and the source's cache key.
        number: The order in which a size's masks were met, which ranks compare.
        shares_plan: True if its attentions share a plan; False where masks change by step, and each goes on with its
            own.
        replaces: True if it takes the place of predicted masks that are too dense; see `Size.replacement`.
        plan: The shared plan.
        prepared: Route and tables, while any of `users` attentions has them. Ranks compare a mask that is new, so all
            must drop it at the same call: a weak reference would not do.
    """

    key: tuple[tuple[Video, ...], Hashable]
    number: int
    shares_plan: bool
    replaces: bool = False
    plan: Plan | None = None
    prepared: PreparedAttention | None = None
    users: int = 0

    def release(self) -> None:
        """Takes one of its users away, and drops its tables after the last."""
        self.users -= 1
        if self.users == 0:
            self.prepared = None
