"""Dual-balanced attention: the one place where the steps meet.

q, k, v at home → plan → route to owners → y periods of kernel beside rotation → route home.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch.distributed import ProcessGroup

from dbsp_core.comm.all_to_all import Route
from dbsp_core.comm.consistency import DEBUG_DIFFERS, check_consistent, run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.comm.inputs import DIMENSIONS, INPUTS_DIFFER, inputs_fingerprint, needs_gradients, problem_of_inputs
from dbsp_core.comm.transforms import outside_transforms
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask, require_mask
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.planning.planners import PlannerConfig
from dbsp_core.runtime.backward import attention_with_gradients
from dbsp_core.runtime.forward import PreparedAttention, forward
from dbsp_core.runtime.kernel_tables import RingStepTable, build_tables, dense_head_layout, dense_spans_of
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.utils.compiling import not_compiled
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.fingerprint import fingerprint_of
from dbsp_core.utils.packages import version_marks
from dbsp_kernels import Kernel, KernelRequirements, choose_kernel, require_supported

__all__ = [
    "LAYOUTS_DIFFER",
    "SCALES_DIFFER",
    "DualBalancedAttention",
    "dual_balanced_attention",
]

PLANS_DIFFER = "the plan differs on rank(s) {}; give all ranks one mask, strategy, planner and keys"
LAYOUTS_DIFFER = "the sequence layout differs on rank(s) {}; give all ranks one layout"
SCALES_DIFFER = "the scale of the scores differs on rank(s) {}; give all ranks one"
MASKS_DIFFER = "the mask differs on rank(s) {}; give all ranks one mask"
KERNELS_DIFFER = "another kernel serves on rank(s) {}; install the same there, or set kernel on all ranks"
KEYS_LEFT_OUT = "the mask needs keys that the plan does not send; make a plan for this mask"
INFERENCE_TENSORS = (
    "q, k or v was made under torch.inference_mode(), so that gradients cannot flow through it; make it under "
    "torch.no_grad(), or call attention under torch.inference_mode() too"
)
GRADIENTS_NOT_FINITE = "the gradient of attention's output has values that are not finite"


class _Calls:
    """What an executor, and those made from it for other masks, remember of their calls.

    pending: whether the first is still to come
    chosen:  the kernel that serves, after what it was chosen for
    """

    def __init__(self, pending: bool) -> None:
        self.pending = pending
        self.chosen: tuple[Hashable, Kernel] | None = None

    @property
    def name(self) -> str | None:
        """Of the kernel that serves."""
        return None if self.chosen is None else self.chosen[1].name


@dataclass(frozen=True, eq=False, repr=False)
class DualBalancedAttention(PreparedAttention):
    """Attention under one plan and one mask on one rank, ready to be called for many q, k, v; made by `prepare`.

    Attributes:
        part: This rank's part in the plan, with its tables on the device.
        plan: The same plan, with the numbers of the mask.
        tables: By period, those of the mask.
        group: The ranks that share the sequence.
        kernel: A name from `dbsp_kernels.KERNELS`, or "auto".
        debug: Whether all ranks compare inputs, masks, plans and kernels before every call.
        mask_mark: Under debug, what tells the mask from others.
    """

    kernel: str = "auto"
    debug: bool = False
    mask_mark: int = 0
    _calls: _Calls = field(default_factory=lambda: _Calls(pending=False))

    @classmethod
    @not_compiled
    def prepare(
        cls,
        plan: Plan,
        mask: BlockMask,
        layout: SequenceLayout,
        group: SequenceGroup | ProcessGroup | None,
        *,
        n_local: int | None = None,
        device: torch.device | str = "cpu",
        kernel: str = "auto",
        debug: bool = False,
    ) -> DualBalancedAttention:
        """Builds this rank's route and kernel tables. Collective: all ranks agree that their parts fit together.

        Args:
            plan: From `make_plan`, equal on all ranks, made for `layout`.
            mask: The plan's, or another one of the same grid and heads that needs no further keys.
            layout: Which rank holds which tokens before and after.
            group: The ranks that share the sequence. None: all ranks of torch.distributed.
            n_local: Places this rank has, with or without the padding at the end. Default: with.
            device: Where q, k and v will be.
            kernel: A name from `dbsp_kernels.KERNELS`, or "auto".
            debug: Whether before every call all ranks agree that inputs are finite, and that masks, plans, kernels and
                scales are equal, or raise together; and now that package versions are. Without it they agree at the
                first call only that shapes, plans and scales fit.

        Raises:
            UserError: On all ranks alike, when plan, mask, layout and group don't fit each other, plans differ, or the
                kernel can't serve the plan.
        """
        group = SequenceGroup.of(group)
        plan.strategy.require_world(group.size)
        device = torch.device(device)
        problem = None
        try:
            ragged = dense_head_layout(plan.assignment, group.rank) is None
            require_supported(kernel, KernelRequirements(lse=plan.strategy.ring > 1, ragged_rows=ragged))
            n_local = _require_places(layout, group.rank, n_local)
            if not plan.assignment.serves(mask):
                raise UserError(KEYS_LEFT_OUT)
        except UserError as error:
            problem = error
        marks = {
            DEBUG_DIFFERS: int(debug),
            **version_marks(debug),
            LAYOUTS_DIFFER: layout.fingerprint,
            MASKS_DIFFER: _mark_of(mask, debug),
            PLANS_DIFFER: plan.assignment.fingerprint,
        }
        check_consistent(group, problem, marks, device)
        part = RankPlan.of(plan.assignment, layout, group.rank, n_local).to(device)
        return cls.of_part(part, plan, mask, group, kernel=kernel, debug=debug, calls=_Calls(pending=True))

    @classmethod
    def of_part(
        cls,
        part: RankPlan,
        plan: Plan,
        mask: BlockMask,
        group: SequenceGroup,
        *,
        kernel: str = "auto",
        debug: bool = False,
        calls: _Calls | None = None,
    ) -> DualBalancedAttention:
        """For ranks that have agreed on their parts already.

        part: on the device of the calls to come;  plan: the part's, or one with the same owners and slots
        """
        if not plan.assignment.equals(part.assignment):
            raise ValueError("this part of a plan was made for another plan")
        tables, calls = _tables(part, plan, mask), calls or _Calls(pending=False)
        return cls(part, plan, tables, group, kernel, debug, _mark_of(mask, debug), calls)

    def for_mask(self, plan: Plan, mask: BlockMask) -> DualBalancedAttention:
        """The same part in a plan with another mask's tables.

        plan: with the same owners and slots as this one's;  mask: one that it fits
        """
        return replace(self, plan=plan, tables=_tables(self.part, plan, mask), mask_mark=_mark_of(mask, self.debug))

    def __repr__(self) -> str:
        kernel = self._calls.name or self.kernel
        return f"<DualBalancedAttention on rank {self.group.rank} of {self.group.size}, kernel {kernel}, {self.plan}>"

    @property
    def route(self) -> Route:
        return self.part.route

    @property
    def device(self) -> torch.device:
        """Where its tables are."""
        return self.tables[0].kv_len.device

    @not_compiled
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """Attention of this rank's tokens over all ranks' keys; called by every rank.

        Args:
            q: [B, H, n_local, D], this rank's tokens in the order of the layout.
            k: [B, H, n_local, D].
            v: [B, H, n_local, D].
            scale: Of the scores; default D^−1/2.

        Returns:
            [B, H, n_local, D], zero at padding and at queries whose row has no blocks.

        Raises:
            UserError: Before any collective, where shapes, dtypes or the kernel don't fit.
        """
        self._check(q, k, v, scale)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if needs_gradients(q, k, v):
            kernel = self.kernel_for(q, backward=True)
            return attention_with_gradients(self, q, k, v, scale, kernel, self._check_gradient)
        return forward(self, q, k, v, scale, self.kernel_for(q))

    def kernel_for(self, q: torch.Tensor, *, backward: bool = False) -> Kernel:
        """The kernel that serves inputs like q [..., D]: chosen once for a device, dtype and head size.

        backward: whether gradients will be asked for
        Raises UserError where none, or not the one asked for, can serve.
        """
        inputs = (q.device, q.dtype, q.shape[-1], backward)
        if self._calls.chosen is None or self._calls.chosen[0] != inputs:
            blocks, ragged = (self.plan.grid.block_q, self.plan.grid.block_k), self.part.head_layout is None
            lse = backward or len(self.tables) > 1
            tokens = self.part.head_layout.tokens if self.part.head_layout else None
            needs = KernelRequirements(blocks, q.shape[-1], lse, ragged, tokens, backward)
            self._calls.chosen = inputs, choose_kernel(self.kernel, q.device, q.dtype, needs)
        return self._calls.chosen[1]

    def _check_gradient(self, dout: torch.Tensor) -> None:
        """Under debug raises UserError, on all ranks together, for a gradient with values that are not finite."""
        if self.debug:
            finite = bool(dout.isfinite().all())
            check_consistent(self.group, None if finite else UserError(GRADIENTS_NOT_FINITE), {}, dout.device)

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> None:
        """Raises UserError for inputs that don't fit: on all ranks together at the first call, and under debug."""
        problem = self._problem(q, k, v)
        if self.debug or self._calls.pending:
            if self.debug and problem is None and not all(bool(t.isfinite().all()) for t in (q, k, v)):
                problem = "q, k or v has values that are not finite"
            error = None if problem is None else UserError(problem)
            marks = {
                INPUTS_DIFFER: inputs_fingerprint(q, k, v),
                SCALES_DIFFER: fingerprint_of(scale or (None if problem else q.shape[-1] ** -0.5)),
                MASKS_DIFFER: self.mask_mark,
                PLANS_DIFFER: self.plan.assignment.fingerprint,
                KERNELS_DIFFER: fingerprint_of(self._calls.name) if self.debug else 0,
            }
            check_consistent(self.group, error, marks, q.device)
            self._calls.pending = False
        if problem is not None:
            raise UserError(problem)

    def _problem(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        """What is wrong with the inputs, seen from this rank alone."""
        heads, tokens = self.plan.heads, self.part.n_local
        why = f"the plan has {heads} heads and rank {self.group.rank} holds {tokens} tokens"
        problem = problem_of_inputs(q, k, v, heads, tokens, why)
        if problem is not None:
            return problem
        gradients = needs_gradients(q, k, v)
        if gradients and any(t.is_inference() for t in (q, k, v)):
            return INFERENCE_TENSORS
        try:
            self.kernel_for(q, backward=gradients)
        except UserError as error:
            return str(error)
        return None


def _mark_of(mask: BlockMask, debug: bool) -> int:
    """What ranks compare masks by, under debug alone: its bits are read back for it."""
    return mask.fingerprint if debug else 0


def _tables(part: RankPlan, plan: Plan, mask: BlockMask) -> tuple[RingStepTable, ...]:
    """By period, those of a mask under a part's plan."""
    plan.assignment.require_fit(mask)
    return build_tables(part.table_layout, mask, dense_spans_of(mask, part.table_layout.rows.device))


def _require_places(layout: SequenceLayout, rank: int, n_local: int | None) -> int:
    """How many tokens a rank holds. Raises UserError for a number that doesn't hold its tokens."""
    n_local = layout.shard if n_local is None else n_local
    least = int(layout.tokens_at(rank)[1].max(initial=-1)) + 1
    if not least <= n_local <= layout.shard:
        raise UserError(
            f"rank {rank} holds {n_local} tokens, expected {least} ({layout.shard} with padding): "
            f"{layout.tokens} tokens are shared by {layout.world} ranks; {DIMENSIONS}"
        )
    return n_local


@not_compiled
def dual_balanced_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask,
    strategy: Strategy | str,
    *,
    planner: PlannerConfig | str = "dbsp",
    layout: SequenceLayout | None = None,
    group: SequenceGroup | ProcessGroup | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    debug: bool = False,
    keys: str = "ring",
) -> torch.Tensor:
    """Block-sparse attention over all ranks of `group`, called by every one of them.

    Plans again at every call: for many calls with one mask, keep a `DualBalancedAttention`.

    Args:
        q: [B, H, n_local, D], this rank's tokens under `layout`; float16, bfloat16, float32 or float64, as k and v.
        k: [B, H, n_local, D].
        v: [B, H, n_local, D].
        mask: Which blocks are dense; equal on all ranks.
        strategy: How many ranks share heads and how many form a ring, such as "U4R2".
        planner: See `make_plan`.
        layout: Which rank holds which tokens. Default: contiguous shards of ceil(tokens / P).
        group: Default: all ranks of torch.distributed.
        scale: Of the scores; default D^−1/2.
        kernel: A name from `dbsp_kernels.KERNELS`, or "auto".
        debug: See `DualBalancedAttention.prepare`.
        keys: "ring", or "needed": each rank is sent only the keys that its rows need; see `make_plan`.

    Returns:
        [B, H, n_local, D], zero at padding and at queries whose row has no blocks.

    Raises:
        UserError: On all ranks alike, before anything is exchanged, where arguments don't fit each other.
    """
    group = SequenceGroup.of(group)

    def made() -> tuple[Plan, SequenceLayout]:
        require_mask(mask)
        parsed = Strategy.parse(strategy)
        parsed.require_world(group.size)
        placed = layout or SequenceLayout.contiguous(mask.grid.tokens, parsed.world)
        return make_plan(mask, parsed, planner, layout=placed, keys=keys), placed

    with outside_transforms():  # planning is no part of what is differentiated
        plan, layout = run_consistently(
            group, made, q.device, lambda both: fingerprint_of(str(both[0].strategy)), "the strategy"
        )
        attend = DualBalancedAttention.prepare(
            plan, mask, layout, group, n_local=q.shape[-2], device=q.device, kernel=kernel, debug=debug
        )
    return attend(q, k, v, scale=scale)
