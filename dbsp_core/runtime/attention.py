"""Dual-balanced attention, the public entry points.

local q, k, v → plan → rows to their owners → kernel on y chunks of keys, each sent during the previous → local output
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.distributed import ProcessGroup

from dbsp_core.comm.consistency import (
    DEBUG_DIFFERS,
    ConcurrencyGuard,
    InputKind,
    agree,
    attempt,
    input_kind,
    must_compare,
    outside_transforms,
    problem_of_inputs,
    raised_on_all,
    run_consistently,
)
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask, require_mask
from dbsp_core.planning.chunks import ALL
from dbsp_core.planning.comm_dtype import MODEL, PrecisionLike
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.planning.planner_config import PlannerLike
from dbsp_core.runtime.chunk_attention import attend
from dbsp_core.runtime.consistency_checks import (
    LAYOUTS_DIFFER,
    MASKS_DIFFER,
    PLANS_DIFFER,
    check_attention,
    check_gradient,
)
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.runtime.tables import whole_head_tokens
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.process import not_compiled, outside_inference, version_fingerprints
from dbsp_kernels import KernelRequirements, require_supported
from dbsp_kernels.kernel import supports


@dataclass(frozen=True, eq=False, repr=False)
class DualBalancedAttention:
    """Attention under one plan and mask on one rank, callable for many q, k, v; made by `prepare`.

    Ranks compare inputs and check kernel support at the first call for each device, dtype, head size and need for
    gradients, and under debug at every call.

    Attributes:
        prepared: This rank's plan, routes and kernel tables.
        debug: True to compare inputs, masks, plans and kernels across ranks before every call.
    """

    prepared: PreparedAttention
    debug: bool = False
    _compared: set[InputKind] = field(default_factory=set, init=False)

    @classmethod
    @not_compiled
    @outside_inference
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
        """Builds this rank's route and kernel tables. Collective.

        Args:
            plan: From `make_plan`, equal on all ranks, made for `layout`.
            mask: The plan's mask, or another of the same grid and heads that needs no other keys.
            layout: Layout of tokens outside attention.
            group: The ranks that share the sequence. None: all ranks of torch.distributed.
            n_local: This rank's slots, with or without padding at the end. None: with.
            device: Device of q, k and v.
            kernel: A name from `dbsp_kernels.KERNELS`, or "auto".
            debug: True to check before every call that inputs are finite and that masks, plans, kernels and scales are
                equal on all ranks, and now that package versions are. False: compare shapes, plans and scales at the
                first call only.

        Raises:
            UserError: On all ranks, if plan, mask, layout and group do not fit together, plans differ, or the
                kernel does not support the plan.
        """
        group = SequenceGroup.from_group(group)
        plan.strategy.require_world(group.size)

        def prepare() -> PreparedAttention:
            ragged = whole_head_tokens(plan) is None
            lse = plan.strategy.ring > 1 or mask.absent is not None
            require_supported(kernel, KernelRequirements(lse=lse, ragged_rows=ragged))
            slots = layout.slots_of(group.rank, n_local)
            plan.require_fit(mask)
            if not plan.fits(mask):
                raise UserError("the mask needs keys that the plan does not send; make a plan for this mask")
            made = PreparedAttention.from_plan(plan, layout, group, kernel, device=torch.device(device), n_local=slots)
            return made.for_mask(plan, mask, fingerprint=debug)

        prepared, problem = attempt(prepare)
        fingerprints = {
            DEBUG_DIFFERS: int(debug),
            **version_fingerprints(debug),
            LAYOUTS_DIFFER: layout.fingerprint,
            MASKS_DIFFER: mask.fingerprint if debug else 0,
            PLANS_DIFFER: plan.fingerprint,
        }
        with ConcurrencyGuard(group):
            agree(group, fingerprints, problem=problem)
        if prepared is None:
            raise RuntimeError("the attention is not prepared, but no rank raised an error")
        return cls(prepared, debug)

    def __repr__(self) -> str:
        prepared, group = self.prepared, self.prepared.group
        kernel = prepared.kernel_name
        return f"<DualBalancedAttention on rank {group.rank} of {group.size}, kernel {kernel}, {prepared.plan}>"

    @not_compiled
    @outside_inference
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """Computes attention of this rank's tokens over all ranks' keys. Collective.

        Args:
            q: [B, H, n_local, D], this rank's tokens in layout order.
            k: [B, H, n_local, D].
            v: [B, H, n_local, D].
            scale: Softmax scale. None: D^−1/2.

        Returns:
            [B, H, n_local, D], zero at padding and at queries whose row has no blocks.

        Raises:
            UserError: Shapes, dtypes or the kernel do not fit; raised before any collective.
        """
        prepared, group = self.prepared, self.prepared.group
        heads, tokens = prepared.plan.heads, prepared.n_local
        why = f"the plan has {heads} heads and rank {group.rank} holds {tokens} tokens"
        problem = problem_of_inputs(q, k, v, heads, tokens, why, prepared.no_gradients)
        check = partial(check_gradient, group) if self.debug else None
        scale_or_usual = max(1, *q.shape[-1:]) ** -0.5 if scale is None else scale
        with ConcurrencyGuard(group):
            if self.debug or must_compare(input_kind(q, k, v), self._compared, problem):
                error = None if problem is None else UserError(problem)
                check_attention(group, q, k, v, scale_or_usual, error, prepared=prepared, debug=self.debug)
                with raised_on_all(group) as meeting:  # the first call may fail on one rank
                    return attend(replace(prepared, group=meeting), q, k, v, scale_or_usual, check)
            if problem is not None:
                raise UserError(problem)
            return attend(prepared, q, k, v, scale_or_usual, check)


@not_compiled
def dual_balanced_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask,
    strategy: Strategy | str,
    *,
    planner: PlannerLike = "dbsp",
    layout: SequenceLayout | None = None,
    group: SequenceGroup | ProcessGroup | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    debug: bool = False,
    keys: str = ALL,
    precision: PrecisionLike = MODEL,
) -> torch.Tensor:
    """Computes block-sparse attention over all ranks of `group`. Collective.

    Plans at every call; for many calls with one mask, use `DualBalancedAttention`.

    Args:
        q: [B, H, n_local, D], this rank's tokens under `layout`; float16, bfloat16, float32 or float64, like k and v.
        k: [B, H, n_local, D].
        v: [B, H, n_local, D].
        mask: The block mask, equal on all ranks.
        strategy: Ulysses and ring degrees, such as "U4R2".
        planner: See `make_plan`.
        layout: Layout of tokens. None: contiguous shards of ceil(tokens / P).
        group: The ranks. None: all ranks of torch.distributed.
        scale: Softmax scale. None: D^−1/2.
        kernel: A name from `dbsp_kernels.KERNELS`, or "auto".
        debug: See `DualBalancedAttention.prepare`.
        keys: "all" or "needed": keys and values to send; see `make_plan`.
        precision: "model", "int8" or {"qkv": "int8", "out": "int8"}; see `make_plan`.

    Returns:
        [B, H, n_local, D], zero at padding and at queries whose row has no blocks.

    Raises:
        UserError: The arguments do not fit together; raised on all ranks before any exchange.
    """
    group = SequenceGroup.from_group(group)

    def made() -> tuple[Plan, SequenceLayout]:
        require_mask(mask)
        parsed = Strategy.parse(strategy)
        parsed.require_world(group.size)
        whole_heads = not supports(kernel, KernelRequirements(ragged_rows=True))
        own_layout = layout or SequenceLayout.contiguous(mask.grid.tokens, parsed.world)
        plan = make_plan(
            mask, parsed, planner, layout=own_layout, keys=keys, precision=precision, whole_heads=whole_heads
        )
        return plan, own_layout

    with ConcurrencyGuard(group):
        with outside_transforms():  # planning is not differentiated
            plan, layout = run_consistently(
                group, made, lambda both: fingerprint_of(str(both[0].strategy)), "the strategy"
            )
            attention = DualBalancedAttention.prepare(
                plan, mask, layout, group, n_local=q.shape[-2], device=q.device, kernel=kernel, debug=debug
            )
        return attention(q, k, v, scale=scale)
