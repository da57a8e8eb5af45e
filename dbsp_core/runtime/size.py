"""What is kept of one size of video: its layout, the slots of its attentions, and the masks that these share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial

import numpy as np
import torch

from dbsp_core.comm.consistency import QKV, CheckedInputs, InputKind, problem_of_inputs, run_consistently
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
"""Videos of a forward pass, and the fingerprint of the layout if one was given, else 0."""
PassMasks = tuple[KnownMask | None, ...]
"""The mask of each layer in a forward pass; None where it is predicted."""
LOOK_EVERY = 8
"""Steps of which one predicts a mask, while masks are too dense: they change in the course of a denoising."""
MOST_KEYED = 1024
"""Passes (steps, CFG passes, dense layers) whose masks are remembered. Ranks compare those of a new one."""


class Size:
    """One size of video. A layer has at most `MOST_PASSES` slots, and each has one plan and one set of tables.

    Args:
        session: The settings, and the group.
        provider: The session's masks, begun for this size.
        device: The device on which the group's collectives run.
        streams: See `AttentionSession.begin`.
        compare: True if plans are compared with the contiguous plan, for reports.
        statistics: Sums over the calls of all sizes.

    Raises:
        ValueError: For a size that the mask source rejects.
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
        # 1. Blocks and layout. Stripes for the longest ring fit shorter ones too: their ranks have adjacent stripes.
        self.grid, world = provider.grid(), self.group.size
        if isinstance(streams, SequenceLayout):
            self.layout = streams
        else:
            longest = self.strategy or Strategy(1, world)
            self.layout = SequenceLayout.named(self.config.layout, self.grid, longest, streams=streams)
        # 2. What chooses a strategy for each plan, if none is set; and the kernels, those measured here first.
        self.selector: StrategySelector | None = None
        self.hardware = 0  # equal on ranks that choose strategies by the same constants
        if self.strategy is None:
            hardware = hardware_for(self.config.machine, device.type, self.config.kernel)
            if self.group.rank == 0:
                log.info("cost model: %s", cost_basis(hardware))
            strategies = candidates(world, self.grid, supports(self.config.kernel, KernelRequirements(lse=True)))
            self.selector = StrategySelector(strategies, hardware, session.nodes, self.layout)
            self.hardware = 0 if hardware is None else hardware.fingerprint
        self._no_gradients = self.config.precision.no_gradients
        self.kernel = kernel_order(self.config.kernel, self.config.machine, device)
        # 3. State: slots by layer and CFG pass, the one used last at the end; known masks by the source's cache key;
        # masks of passes that ranks have compared, by `MaskProvider.pass_key`.
        self.slots: OrderedDict[tuple[int, int], Slot] = OrderedDict()
        self.masks: dict[Hashable, KnownMask] = {}
        self.passes: OrderedDict[Hashable, PassMasks] = OrderedDict()
        # 4. The mask that replaces predicted ones from a density on, which depends on the kind of q, k and v.
        self.dense = KnownMask((key[0], DENSE), 0, shares_plan=True, replaces=True)
        self.limits: dict[InputKind, float] = {}
        # 5. What ranks compare: kinds of q, k and v; calls with predicted masks, which differ if a rank left a pass.
        self.checked_inputs = CheckedInputs()
        self.predicted_calls = 0

    def new_masks(self, provider: MaskProvider) -> PassMasks:
        """Returns the masks of a pass that is not in `passes`.

        Those that are new are not kept before `keep_pass`: ranks of which one has failed must have equal numbers.
        """
        masks = dict(self.masks)
        keys = [provider.cache_key(layer) for layer in range(self.layers)]
        for key in keys:
            if key is not None and key not in masks:
                shares_plan = key == DENSE or provider.source.changes == "never"
                masks[key] = KnownMask((self.key[0], key), len(masks), shares_plan)
        return tuple(None if key is None else masks[key] for key in keys)

    def compared(self, given: object, moment: object, masks: PassMasks) -> dict[str, int]:
        """Returns fingerprints of what ranks compare of a pass, by message.

        Args:
            given: The arguments that the size was made from.
            moment: The denoising step and CFG pass.
        """
        what = {
            SIZES_DIFFER: given,
            STEPS_DIFFER: moment,
            GRIDS_DIFFER: self.grid,
            HARDWARE_DIFFERS: self.hardware,
            NEW_MASKS_DIFFER: [known and known.number for known in masks],
        }
        return {message: fingerprint_of(value) for message, value in what.items()}

    def keep_pass(self, pass_key: Hashable, masks: PassMasks) -> None:
        """Remembers the masks of a pass that ranks have compared."""
        self.passes[pass_key] = masks
        self.masks |= {known.key[1]: known for known in masks if known is not None}
        if len(self.passes) > MOST_KEYED:
            self.passes.popitem(last=False)

    def slot(self, layer: int, cfg_pass: int) -> Slot:
        """Returns an attention's slot, a new one at its first call."""
        slot = self.slots.get((layer, cfg_pass))
        if slot is not None:
            return slot
        lags = self.config.plan == "lagged"
        return Slot((self.key[0], layer, cfg_pass), self.config.reuse, lags, self.compare, self.statistics)

    def keep_slot(self, slot: Slot) -> None:
        """Remembers a slot after its call, and drops those that were used longest ago."""
        _, layer, cfg_pass = slot.key
        self.predicted_calls += slot.known is None
        self.slots[layer, cfg_pass] = slot
        self.slots.move_to_end((layer, cfg_pass))
        while len(self.slots) > self.layers * MOST_PASSES:
            self.slots.popitem(last=False)[1].close()

    def plan_known(self, mask: BlockMask, q: torch.Tensor, rows: np.ndarray, current: Plan | None) -> Plan:
        """Makes a plan for a mask that is known, by its own row counts; keys may be sent as its rows need them."""
        return self._plan(partial(make_plan, mask, keys=self.config.keys_sent), q, mask.heads, current)

    def plan_predicted(
        self, q: torch.Tensor, rows: np.ndarray, current: Plan | None, mask: BlockMask | None = None
    ) -> Plan:
        """Makes a plan by row counts int64[H, nq] of a predicted mask. Ranks agree on it; collective.

        Without the mask itself, which a plan by the counts before it does not know, all keys are sent, and the grid
        is that of the plan in use.
        """
        if mask is not None and self.config.keys_sent == NEEDED:
            by_mask = partial(make_plan, mask, keys=NEEDED)
        else:
            before = self.grid if current is None else current.grid
            by_mask = partial(plan_from_counts, rows, before if mask is None else mask.grid)
        make = partial(self._plan, by_mask, q, len(rows), current)
        return run_consistently(self.group.control(), make, lambda plan: plan.fingerprint, "the plan")

    def _plan(self, make: Callable[..., Plan], q: torch.Tensor, heads: int, current: Plan | None) -> Plan:
        """Makes a plan, of the strategy that is predicted to be fastest if none is set.

        Args:
            make: Takes a strategy, and the options of `make_plan`.
            heads: Those of the mask.
            current: The plan in use, if any.
        """
        config = self.config
        options = {"planner": config.planner, "layout": self.layout, "precision": config.precision}
        make = partial(make, **options, compare=self.compare, whole_heads=config.whole_heads)
        if self.selector is None:
            return make(self.strategy)
        return self.selector.choose(
            make, AttentionShape.from_q(q, heads), None if current is None else current.strategy
        )

    def route(self, slot: Slot, plan: Plan, device: torch.device, *, predicted: bool) -> PreparedAttention:
        """Returns an attention under a plan, before its mask: the last call's if that had the same route.

        Args:
            predicted: True if the mask is predicted. Then ranks agree here that each could make its route; collective.
        """
        before = slot.prepared
        if before is not None and before.device == device and plan.same_routes(before.plan):
            return before
        make = partial(PreparedAttention.from_plan, plan, self.layout, self.group, self.kernel, device=device)
        return run_consistently(self.group.control(), make) if predicted else make()

    def problem_of(self, qkv: QKV, tokens: int) -> UserError | None:
        """Returns what is wrong with this rank's q, k and v, of which each rank must have `tokens`; or None."""
        why = f"the model has {self.heads} heads, and the layout gives every rank {tokens} tokens"
        problem = problem_of_inputs(*qkv, self.heads, tokens, why, self._no_gradients)
        return None if problem is None else UserError(problem)

    def choose_kernel(self, kind: InputKind) -> Kernel:
        """Chooses a kernel for inputs of a kind before an attention is prepared. Raises UserError without one."""
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
        """Returns the density from which dense attention replaces predicted masks of inputs of a kind; None: never.

        None for training, for masks that a model may have been trained with or that have settings by step, and where
        rates are not known.
        """
        device, dtype, head_dim, gradients = kind
        replaceable = getattr(self.config.mask, "approximates_dense", False) and len(self.grid.sequences) == 1
        by_step = getattr(self.config.mask, "by_step", False)  # the last mask's density says nothing of this one's
        if gradients or by_step or not replaceable:
            return None
        kernel = self.choose_kernel(kind).name
        rates = rates_of(self.config.machine, device, kernel)
        if rates is None or rates.dtype != str(dtype).removeprefix("torch."):
            return None
        if device.type == "cuda" and fused_kernel(torch.empty(0, head_dim, dtype=dtype, device=device)) is None:
            return None  # the block kernel would compute the dense blocks, too
        if kernel not in rates.kernels or rates.kernels[kernel].head_dim != head_dim:
            return None  # not measured beside dense attention
        return rates.break_even(self.grid.block_q, self.grid.block_k, head_dim, self.grid.tokens)

    def replacement(self, slot: Slot, kind: InputKind, now: DenoisingStep) -> KnownMask | None:
        """Returns the dense mask if it is faster than one of the density of the attention's last predicted mask.

        A mask is predicted at each generation's first call, and at the first of every `LOOK_EVERY` steps. Its density
        decides for the others. Waits for its counts. Where steps are not known, a mask is predicted at every call.

        Args:
            now: The call's step and generation.
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
        """Remembers a kind of inputs, and its `limit`, which ranks have compared."""
        self.checked_inputs.is_new(kind, None)
        if limit is not None and kind not in self.limits:
            self.limits[kind] = limit
            if self.group.rank == 0:
                blocks = f"{self.choose_kernel(kind).name} on blocks of {self.grid.block_q}×{self.grid.block_k}"
                log.info("predicted masks of density %.2f and more: dense attention, faster than %s", limit, blocks)

    def settle(self) -> None:
        """Waits for counts under way, so that statistics cover every call."""
        for slot in self.slots.values():
            slot.counted()

    def restart(self) -> None:
        """Drops the plans of predicted masks: a rank has left a pass that others went on with."""
        self.predicted_calls, self.dense.plan, self.dense.prepared = 0, None, None
        for slot in self.slots.values():
            slot.restart()

    @property
    def records(self) -> dict[int, Plan]:
        """Each layer's plan, with the numbers of the mask that it was last used for. Waits for counts under way."""
        plans = {layer: slot.last_plan() for (layer, _), slot in self.slots.items()}  # the slot used last comes last
        return {layer: plan for layer, plan in sorted(plans.items()) if plan is not None}
