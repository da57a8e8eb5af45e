"""State of one video size: its layout, the slots of its attentions, and the masks that they share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial

import numpy as np
import torch

from dbsp_core.comm.consistency import QKV, InputKind, problem_of_inputs, run_consistently
from dbsp_core.cost.machine import cost_basis, hardware_for, kernel_order, rates_of
from dbsp_core.cost.prediction import AttentionShape, StrategySelector, candidates
from dbsp_core.layout.sequence_layout import SequenceLayout, Streams
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import Video
from dbsp_core.masks.steps import MOST_PASSES, DenoisingStep
from dbsp_core.planning.chunks import NEEDED
from dbsp_core.planning.plan import Plan, make_plan, plan_from_counts
from dbsp_core.planning.reuse import ReuseStatistics
from dbsp_core.runtime.consistency_checks import (
    GRIDS_DIFFER,
    HARDWARE_DIFFERS,
    NEW_MASKS_DIFFER,
    SIZES_DIFFER,
    STEPS_DIFFER,
    HasSettings,
)
from dbsp_core.runtime.mask_provider import DENSE, MaskProvider
from dbsp_core.runtime.prepared import KnownMask, PreparedAttention
from dbsp_core.runtime.slot import Slot
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.process import log
from dbsp_kernels import Kernel, KernelRequirements, choose_kernel, fused_kernel
from dbsp_kernels.kernel import supports

SizeKey = tuple[tuple[Video, ...], int]
"""Videos of a forward pass, and the fingerprint of the caller's layout, or 0."""
PassMasks = tuple[KnownMask | None, ...]
"""Mask of each layer in a forward pass; None if predicted."""
LOOK_EVERY = 8
"""While masks are too dense, one step in this many predicts a mask, since density changes during a denoising."""
MOST_KEYED = 1024
"""Passes (step, CFG pass, dense layers) whose masks are cached; ranks compare the masks of a new pass."""


class Size:
    """One video size. A layer has at most `MOST_PASSES` slots, each with one plan and one set of tables.

    Args:
        session: The settings, and the group.
        provider: The session's masks, after `begin` for this size.
        device: Device on which the group's collectives run.
        streams: See `AttentionSession.begin`.
        compare: True to compare plans with the contiguous plan, for reports.
        statistics: Sums over the calls of all sizes.

    Raises:
        ValueError: The mask source rejects the size.
    """

    def __init__(
        self,
        key: SizeKey,
        *,
        session: HasSettings,
        provider: MaskProvider,
        device: torch.device,
        streams: Streams | SequenceLayout,
        compare: bool,
        statistics: ReuseStatistics,
    ) -> None:
        self.key, self.config, self.group = key, session.config, session.group
        self.heads, self.layers, self.strategy = session.heads, session.layers, session.strategy
        self.compare, self.statistics = compare, statistics
        # 1. Blocks and layout; stripes for the longest ring also fit shorter rings, whose ranks get adjacent stripes
        self.grid, world = provider.grid(), self.group.size
        if isinstance(streams, SequenceLayout):
            self.layout = streams
        else:
            longest = self.strategy or Strategy(1, world)
            self.layout = SequenceLayout.named(self.config.layout, self.grid, longest, streams=streams)
        # 2. Selector of strategies if none is set; kernels, those measured on this device first
        self.selector: StrategySelector | None = None
        self.hardware = 0  # fingerprint of the constants that choose strategies
        if self.strategy is None:
            hardware = hardware_for(self.config.machine, device.type, self.config.kernel)
            if self.group.rank == 0:
                log.info("cost model: %s", cost_basis(hardware))
            strategies = candidates(world, self.grid, supports(self.config.kernel, KernelRequirements(lse=True)))
            self.selector = StrategySelector(strategies, hardware, session.nodes, self.layout)
            self.hardware = 0 if hardware is None else hardware.fingerprint
        self._no_gradients = self.config.precision.no_gradients
        self.kernel = kernel_order(self.config.kernel, self.config.machine, device)
        # 3. State: slots by (layer, CFG pass), least recently used first; static masks by the source's cache key;
        # masks of compared passes by `MaskProvider.pass_key`
        self.slots: OrderedDict[tuple[int, int], Slot] = OrderedDict()
        self.masks: dict[Hashable, KnownMask] = {}
        self.passes: OrderedDict[Hashable, PassMasks] = OrderedDict()
        # 4. Dense mask that replaces predicted masks above a density limit, which depends on the kind of inputs
        self.dense = KnownMask((key[0], DENSE), 0, shares_plan=True, replaces=True)
        self.limits: dict[InputKind, float] = {}
        # 5. Compared across ranks: kinds of inputs, and calls with predicted masks (differ if a rank aborted)
        self.compared_kinds: set[InputKind] = set()
        self.predicted_calls = 0

    def new_masks(self, provider: MaskProvider) -> PassMasks:
        """Returns the masks of a pass that is not in `passes`.

        New masks are stored by `keep_pass` only, so that mask numbers stay equal if one rank fails.
        """
        masks = dict(self.masks)
        keys = [provider.cache_key(layer) for layer in range(self.layers)]
        for key in keys:
            if key is not None and key not in masks:
                shares_plan = key == DENSE or provider.source.changes == "never"
                masks[key] = KnownMask((self.key[0], key), len(masks), shares_plan)
        return tuple(None if key is None else masks[key] for key in keys)

    def compared(self, arguments: object, moment: object, masks: PassMasks) -> dict[str, int]:
        """Returns the fingerprints of a pass to compare across ranks, by error message.

        `arguments` are those that the size was made from, `moment` the denoising step and CFG pass.
        """
        values = {
            SIZES_DIFFER: arguments,
            STEPS_DIFFER: moment,
            GRIDS_DIFFER: self.grid,
            HARDWARE_DIFFERS: self.hardware,
            NEW_MASKS_DIFFER: [known and known.number for known in masks],
        }
        return {message: fingerprint_of(value) for message, value in values.items()}

    def keep_pass(self, pass_key: Hashable, masks: PassMasks) -> None:
        """Stores the masks of a compared pass."""
        self.passes[pass_key] = masks
        self.masks |= {known.key[1]: known for known in masks if known is not None}
        if len(self.passes) > MOST_KEYED:
            self.passes.popitem(last=False)

    def slot(self, layer: int, cfg_pass: int) -> Slot:
        """Returns an attention's slot, or a new one at its first call."""
        slot = self.slots.get((layer, cfg_pass))
        if slot is not None:
            return slot
        lags = self.config.plan == "lagged"
        return Slot((self.key[0], layer, cfg_pass), self.config.reuse, lags, self.compare, self.statistics)

    def keep_slot(self, slot: Slot) -> None:
        """Stores a slot after its call, and drops the least recently used ones."""
        _, layer, cfg_pass = slot.key
        self.predicted_calls += slot.known is None
        self.slots[layer, cfg_pass] = slot
        self.slots.move_to_end((layer, cfg_pass))
        while len(self.slots) > self.layers * MOST_PASSES:
            self.slots.popitem(last=False)[1].close()

    def plan_known(self, mask: BlockMask, q: torch.Tensor, rows: np.ndarray, current: Plan | None) -> Plan:
        """Makes a plan for a static mask."""
        return self._plan(partial(make_plan, mask, keys=self.config.keys_sent), q, mask.heads, current)

    def plan_predicted(
        self, q: torch.Tensor, rows: np.ndarray, current: Plan | None, mask: BlockMask | None = None
    ) -> Plan:
        """Makes a plan by row counts int64[H, nq] of predicted masks. Collective.

        Without `mask` (lagged plans), all keys are sent and the grid is that of the current plan.
        """
        if mask is not None and self.config.keys_sent == NEEDED:
            by_mask = partial(make_plan, mask, keys=NEEDED)
        else:
            before = self.grid if current is None else current.grid
            by_mask = partial(plan_from_counts, rows, before if mask is None else mask.grid)
        make = partial(self._plan, by_mask, q, len(rows), current)
        return run_consistently(self.group.control(), make, lambda plan: plan.fingerprint, "the plan")

    def _plan(self, make: Callable[..., Plan], q: torch.Tensor, heads: int, current: Plan | None) -> Plan:
        """Makes a plan, with the predicted fastest strategy if none is set; `heads` are the mask's."""
        config = self.config
        options = {"planner": config.planner, "layout": self.layout, "precision": config.precision}
        make = partial(make, **options, compare=self.compare, whole_heads=config.whole_heads)
        if self.selector is None:
            return make(self.strategy)
        in_use = None if current is None else current.strategy
        return self.selector.choose(make, AttentionShape.from_q(q, heads), in_use)

    def route(self, slot: Slot, plan: Plan, device: torch.device, *, predicted: bool) -> PreparedAttention:
        """Returns an attention prepared for a plan, without mask; reuses the last call's route if equal.

        For predicted masks, ranks agree that all could build their routes (collective).
        """
        before = slot.prepared
        if before is not None and before.device == device and plan.same_routes(before.plan):
            return before
        make = partial(PreparedAttention.from_plan, plan, self.layout, self.group, self.kernel, device=device)
        return run_consistently(self.group.control(), make) if predicted else make()

    def problem_of(self, qkv: QKV, tokens: int) -> UserError | None:
        """Returns what is wrong with this rank's q, k and v of `tokens` tokens, or None."""
        why = f"the model has {self.heads} heads, and the layout gives every rank {tokens} tokens"
        problem = problem_of_inputs(*qkv, self.heads, tokens, why, self._no_gradients)
        return None if problem is None else UserError(problem)

    def choose_kernel(self, kind: InputKind) -> Kernel:
        """Chooses a kernel for a kind of inputs before an attention is prepared. Raises UserError if there is none."""
        device, dtype, head_dim, gradients = kind
        merged = self.config.absent_keys or (self.strategy is not None and self.strategy.ring > 1)
        needs = KernelRequirements(
            (self.grid.block_q, self.grid.block_k),
            head_dim=head_dim,
            lse=merged or gradients,
            ragged_rows=not self.grid.only_last_is_short,
            tokens=self.grid.tokens,
            backward=gradients,
        )
        return choose_kernel(self.kernel, device, dtype, needs)

    def limit(self, kind: InputKind) -> float | None:
        """Returns the density above which dense attention replaces predicted masks for a kind of inputs, or None.

        None in training, for masks that a model may be trained with or that have settings by step, and if rates are
        unknown.
        """
        device, dtype, head_dim, gradients = kind
        replaceable = getattr(self.config.mask, "approximates_dense", False) and len(self.grid.sequences) == 1
        by_step = getattr(self.config.mask, "by_step", False)  # density changes by step
        if gradients or by_step or not replaceable:
            return None
        kernel = self.choose_kernel(kind).name
        rates = rates_of(self.config.machine, device, kernel)
        if rates is None or rates.dtype != str(dtype).removeprefix("torch."):
            return None
        if device.type == "cuda" and fused_kernel(torch.empty(0, head_dim, dtype=dtype, device=device)) is None:
            return None  # dense blocks would run on the block kernel, too
        if kernel not in rates.kernels or rates.kernels[kernel].head_dim != head_dim:
            return None  # not measured beside dense attention
        return rates.break_even(self.grid.block_q, self.grid.block_k, head_dim, self.grid.tokens)

    def replacement(self, slot: Slot, kind: InputKind, now: DenoisingStep) -> KnownMask | None:
        """Returns the dense mask if it is faster at the density of the attention's last predicted mask, else None.

        A mask is predicted at each generation's first call and at the first of every `LOOK_EVERY` steps, and its
        density decides for the other steps. Waits for its counts. If steps are unknown, every call predicts.
        """
        use, limit = slot.use, self.limits.get(kind)
        if limit is None or use is None or use.counts is None:
            return None
        last = use.moment
        if (last.generation, last.step // LOOK_EVERY) != (now.generation, now.step // LOOK_EVERY) or last == now:
            return None
        counted = slot.counted()
        return self.dense if counted is not None and counted.density >= limit else None

    def keep_kind(self, kind: InputKind, limit: float | None) -> None:
        """Stores a kind of inputs and its `limit`, compared across ranks."""
        self.compared_kinds.add(kind)
        if limit is not None and kind not in self.limits:
            self.limits[kind] = limit
            if self.group.rank == 0:
                blocks = f"{self.choose_kernel(kind).name} on blocks of {self.grid.block_q}×{self.grid.block_k}"
                log.info("predicted masks of density %.2f or more: dense attention, faster than %s", limit, blocks)

    def settle(self) -> None:
        """Waits for counts in flight, so that statistics cover every call."""
        for slot in self.slots.values():
            slot.counted()

    def restart(self) -> None:
        """Drops the plans of predicted masks, after a rank aborted a pass that others continued."""
        self.predicted_calls, self.dense.plan, self.dense.prepared = 0, None, None
        for slot in self.slots.values():
            slot.restart()

    @property
    def records(self) -> dict[int, Plan]:
        """Each layer's plan with statistics of its latest mask. Waits for counts in flight."""
        plans = {layer: slot.last_plan() for (layer, _), slot in self.slots.items()}  # latest last
        return {layer: plan for layer, plan in sorted(plans.items()) if plan is not None}
