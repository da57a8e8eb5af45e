"""One rank's state of an attention apart from q, k and v, and masks shared by attentions."""

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
from dbsp_core.runtime.tables import ChunkTables, TableLayout, build_tables, dense_spans_of, table_layout
from dbsp_kernels import Kernel, KernelRequirements, PartialAttention, choose_kernel
from dbsp_kernels.exchange import rotated
from dbsp_kernels.segments import to_device


@dataclass(frozen=True, eq=False, repr=False)
class AbsentKeys:
    """Keys of known score and zero value of one rank's rows, attended to without exchange; see `BlockMask.absent`."""

    score: torch.Tensor  # float32[Rq], natural log of the sum of exp(score)
    head: torch.Tensor  # int64[Rq], head of each row

    def added_to(
        self, result: PartialAttention, rows: torch.Tensor, batch: int, scale: float, mean: torch.Tensor | None
    ) -> PartialAttention:
        """Adds the absent keys to a result: out · e^L / (e^L + e^a), log(e^L + e^a).

        Args:
            result: out [B·Rq, Bq, D], overwritten, and its log-sum-exp L [B·Rq, Bq].
            rows: Queries [B·Rq, Bq, D], rotated if there is a mean.
            mean: float32[B, H, D] subtracted from the sent keys (but not from absent keys), or None.
        """
        out, lse = result
        if mean is not None:
            of_rows = rotated(mean.to(lse.dtype)).index_select(1, self.head).flatten(0, 1)  # [B, H, D] → [B·Rq, D]
            lse = lse + (rows.to(lse.dtype) * of_rows[:, None]).sum(-1) * scale
        # Clamp −inf (no absent keys), so that rows without any keys give 0 instead of NaN.
        absent = self.score.repeat(batch)[:, None].clamp(min=torch.finfo(torch.float32).min)
        return out.mul_(torch.sigmoid(lse - absent)[..., None]), torch.logaddexp(lse, absent)


@dataclass(frozen=True, eq=False, repr=False)
class PreparedAttention:
    """One plan and one mask on one rank. Ranks must already have compared them and their inputs."""

    plan: Plan  # The plan, with statistics for the mask
    layout: SequenceLayout  # Layout of tokens outside attention
    group: SequenceGroup  # The ranks that share the sequence
    device: torch.device  # Device of q, k, v and the tables
    n_local: int  # Tokens on this rank outside attention
    route: Route  # The exchanges, which depend on the plan only
    table_layout: TableLayout  # Part of the kernel tables common to all masks
    tables: ChunkTables  # Kernel tables of the mask for all chunks of keys
    kernel: str  # Name of the requested kernel, or "auto"
    branch: Branch | None  # Branch that the model adds to the output, or None
    absent: AbsentKeys | None = None  # Absent keys of this rank's rows, or None
    mask_fingerprint: int = 0  # Fingerprint of the mask if ranks compare masks, else 0
    # The chosen kernel for each kind of inputs, oldest first
    kernels: dict[InputKind, Kernel] = field(default_factory=dict)
    # Kinds of inputs whose shapes and tables are already checked
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
        """Builds everything that does not depend on the mask; `for_mask` adds its tables. Not collective.

        `n_local` None: `layout.shard`, with padding at the end.
        """
        n_local = layout.shard if n_local is None else n_local
        route = build_route(plan, layout, group.rank, n_local).to(device)
        of_plan = table_layout(plan, group.rank).to(device)
        return cls(plan, layout, group, device, n_local, route, of_plan, ChunkTables.none(of_plan), kernel, None)

    def for_mask(self, plan: Plan, mask: BlockMask, *, fingerprint: bool = False) -> PreparedAttention:
        """Returns a copy with a mask's tables, for a plan with the same routes (`Plan.same_routes`) that fits it.

        Computing the mask's fingerprint reads its bits.
        """
        tables = build_tables(self.table_layout, mask, dense_spans_of(mask, self.device))
        made = replace(self, plan=plan, tables=tables, branch=mask.branch, absent=None)
        if mask.absent is not None:
            number = self.table_layout.number
            scores = to_device(mask.absent, self.device).flatten().index_select(0, number)
            made = replace(made, absent=AbsentKeys(scores, number // plan.grid.nq))
        # The choice of kernels depends on the need for log-sum-exp.
        kernels = self.kernels if (self.absent is None) == (made.absent is None) else {}
        return replace(made, kernels=kernels, mask_fingerprint=mask.fingerprint if fingerprint else 0)

    @property
    def no_gradients(self) -> str | None:
        """Error message if there are no gradients, else None."""
        if self.branch is None:
            return self.plan.comm_dtype.no_gradients
        return (
            f"a {self.branch.name} does not support gradients; set {self.branch.without} in the mask source, or call "
            "attention under torch.no_grad()"
        )

    def kernel_for(self, kind: InputKind) -> Kernel:
        """Returns the kernel for a kind of inputs, cached. Raises UserError if none supports them."""
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
        """Name of the kernel chosen last, or of the requested kernel before the first call."""
        return next(reversed(self.kernels.values())).name if self.kernels else self.kernel


@dataclass(eq=False)
class KnownMask:
    """A static mask, shared by all attentions of a video size that use it.

    Does not keep the bits, up to 57 MB (40 heads of a 720p video).
    """

    key: tuple[tuple[Video, ...], Hashable]  # The videos and the source's cache key
    number: int  # Index among the size's masks in order of first use, which ranks compare
    # True if its attentions share a plan; False if masks change by step and each attention has its own
    shares_plan: bool
    replaces: bool = False  # True if it replaces predicted masks that are too dense; see `Size.replacement`
    plan: Plan | None = None  # The shared plan
    # Route and tables while `users` attentions use them. Counted explicitly, since all ranks must drop them at the
    # same call.
    prepared: PreparedAttention | None = None
    users: int = 0

    def release(self) -> None:
        """Removes one user; drops the tables after the last."""
        self.users -= 1
        if self.users == 0:
            self.prepared = None
