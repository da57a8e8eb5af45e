"""`AttentionSession`: masks, plans and kernels of one transformer's attentions, for all frameworks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field, replace
from functools import partial

import torch

from dbsp_core.comm.consistency import (
    QKV,
    ConcurrencyGuard,
    agree,
    attempt,
    input_kind,
    must_compare,
    raised_on_all,
)
from dbsp_core.comm.exchange import Dispatch
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.layout.sequence_layout import SequenceLayout, Streams
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import Video
from dbsp_core.masks.steps import StepClock
from dbsp_core.planning.plan import Plan
from dbsp_core.planning.reuse import PlanUse, ReuseStatistics
from dbsp_core.runtime.chunk_attention import CheckGradient, attend, start_dispatch
from dbsp_core.runtime.consistency_checks import (
    LAYERS_DIFFER,
    LAYOUTS_DIFFER,
    LIMITS_DIFFER,
    NEW_MASK_DIFFERS,
    check_attention,
    check_gradient,
    check_prepared,
    check_settings,
)
from dbsp_core.runtime.forward_passes import ForwardPass, ForwardPasses
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.prepared import KnownMask, PreparedAttention
from dbsp_core.runtime.session_observer import SessionObserver
from dbsp_core.runtime.size import Size, SizeKey
from dbsp_core.runtime.slot import Slot
from dbsp_core.sources import LocalQK
from dbsp_core.sources.spec import mask_in_words
from dbsp_core.utils.errors import fingerprint_of, in_number
from dbsp_core.utils.process import not_compiled, outside_inference

MOST_SIZES = 4
"""Number of video sizes (with text) whose plans are kept; guidance passes may have texts of two lengths."""


_Ready = tuple[PreparedAttention, PlanUse, Dispatch | None]
"""A prepared attention, its `PlanUse`, and q, k and v if they are already in flight."""


@dataclass(frozen=True, eq=False)
class _Call:
    """One attention of a forward pass: q, k, v are [B, H, shard, D]."""

    forward_pass: ForwardPass
    size: Size
    layer: int
    qkv: QKV
    scale: float


@dataclass(repr=False)
class AttentionSession:
    """State of one transformer: call `begin` at every forward pass, then `attend` once per layer.

    Raises UserError at construction on all ranks if strategy, group and kernel do not fit, or settings differ.
    """

    config: DbspConfig
    group: SequenceGroup
    strategy: Strategy | None  # Strategy of the group's ranks; None: the predicted fastest, for each attention
    heads: int  # Attention heads of every layer
    layers: int
    steps: Callable[[], int | None] = lambda: None  # Returns the number of denoising steps, or None if unknown
    clock: StepClock = field(default_factory=StepClock)
    observers: list[SessionObserver] = field(default_factory=list)
    # Error of this rank's settings, raised on all ranks; other arguments are then ignored
    problem: InitVar[Exception | None] = None
    check: InitVar[bool] = True  # False if the caller runs `check_settings` before the first pass
    first_layer: int = 0  # Index of the first layer for observers, which may watch several transformers
    # The current forward pass, and those that await backward
    passes: ForwardPasses = field(default_factory=ForwardPasses)
    nodes: tuple[int, ...] = field(init=False)  # Node of each rank of the group
    report: bool = field(init=False)  # True if any rank's settings ask for a report
    _provider: MaskProvider = field(init=False)
    _statistics: ReuseStatistics = field(default_factory=ReuseStatistics)
    _raises_alone: bool = False
    _sizes: OrderedDict[SizeKey, Size] = field(default_factory=OrderedDict)
    """The kept video sizes, least recently used first."""
    _concurrency_guard: ConcurrencyGuard = field(init=False)
    _check_gradient: CheckGradient | None = field(init=False)

    def __post_init__(self, problem: Exception | None, check: bool) -> None:
        if check:
            check_settings(self.group, [self], problem)
        self._check_gradient = partial(check_gradient, self.group) if self.config.debug else None
        self._concurrency_guard = ConcurrencyGuard(self.group)
        count_steps = self.config.debug or any(observer.counts_steps for observer in self.observers)
        self._provider = MaskProvider(
            self.config.mask,
            self.config.dense_schedule,
            self.heads,
            self.layers,
            steps=self.steps,
            count_steps=count_steps,
            clock=self.clock,
        )

    def __repr__(self) -> str:
        """Does not wait for counts in flight."""
        layers, ranks = in_number(self.layers, "layer"), in_number(self.group.size, "rank")
        use = f"strategy {self.strategy or 'auto'} on {ranks}, {mask_in_words(self.config.mask)}"
        return f"<db-SP session: {layers} of {self.heads} heads, {use}; {self._statistics}>"

    @not_compiled
    @outside_inference
    def begin(
        self,
        *videos: Video,
        timestep: torch.Tensor | float | None = None,
        device: torch.device | str = "cpu",
        cfg_branch: int | None = None,
        streams: Streams | SequenceLayout = "first",
    ) -> SequenceLayout:
        """Starts a forward pass over one video, or several packed ones, which do not attend to each other.

        Ranks compare new arguments at the first attention, or in `end` if there is none. State is kept for
        `MOST_SIZES` sizes.

        Args:
            videos: Token grid and text of each video.
            timestep: Timestep of the denoising, for masks that depend on the step.
            device: Device on which the group's collectives run.
            cfg_branch: CFG pass within the step. None: inferred from timesteps.
            streams: Order of a rank's text and video in db-SP's layout, or the layout of this pass.

        Returns:
            The layout in which to shard the sequence.

        Raises:
            UserError: The mask source rejects the size; raised on all ranks.
        """
        with self._concurrency_guard:
            # 1. Denoising step and CFG pass
            forward_pass, provider = self.passes.begin(torch.is_grad_enabled()), self._provider
            begins = provider.begin(videos, timestep, cfg_branch)
            for observer in self.observers:
                observer.begin(provider.moment, timestep, cfg_branch, self.clock.progress().step_index)
            # 2. State of this size, and masks of this pass; making new ones may fail on one rank
            key = videos, streams.fingerprint if isinstance(streams, SequenceLayout) else 0

            def find() -> Size:
                size = self._sizes.get(key) or Size(
                    key,
                    session=self,
                    provider=provider,
                    device=torch.device(device),
                    streams=streams,
                    compare=any(observer.compares for observer in self.observers),
                    statistics=self._statistics,
                )
                forward_pass.key = provider.pass_key()
                forward_pass.masks = size.passes.get(forward_pass.key) or size.new_masks(provider)
                return size

            forward_pass.size, problem = attempt(find)
            if problem is not None:
                if not self._raises_alone:
                    agree(self.group.control(), problem=problem)
                raise problem
            # 3. Fingerprints to compare at the first attention, if anything is new
            size = forward_pass.known_size
            if begins or self.config.debug or forward_pass.key not in size.passes:
                arguments = videos, None if isinstance(streams, SequenceLayout) else streams
                forward_pass.compared = size.compared(arguments, (provider.moment, cfg_branch), forward_pass.masks)
            else:
                self._sizes.move_to_end(key)
            return size.layout

    def within(self, group: SequenceGroup, strategy: Strategy | None) -> AttentionSession:
        """Creates a session for a part of the ranks, sharing this session's clock and statistics. Collective for them.

        It has no observers; errors in `begin` are raised on the failing rank only.
        """
        return AttentionSession(
            config=self.config,
            group=group,
            strategy=strategy,
            heads=self.heads,
            layers=self.layers,
            steps=self.steps,
            clock=self.clock,
            passes=self.passes,
            _statistics=self._statistics,
            _raises_alone=True,
        )

    def end(self) -> frozenset[int]:
        """Returns the layers whose attention ran in this forward pass. Collective if there are none."""
        last = self.passes.last
        if last.compared is not None:
            with self._concurrency_guard:
                calls = agree(self.group.control(), last.compared, numbers=[last.known_size.predicted_calls])
            self._keep_pass(last, calls)
        return frozenset(last.reached)

    @property
    def layout(self) -> SequenceLayout:
        """The layout of the current forward pass."""
        return self.passes.now.known_size.layout

    @not_compiled
    @outside_inference
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention of one layer; q, k, v and the result are [B, H, shard, D], this rank's padded tokens.

        `gate` is the model's input to the mask source's branch; see `LocalQK`. Collective.
        """
        with self._concurrency_guard:
            scale = max(1, *q.shape[-1:]) ** -0.5 if scale is None else scale
            recomputed = self.passes.recomputed(layer)
            if recomputed is not None:  # activation checkpointing, in backward
                forward_pass = self.passes.now
                call = _Call(forward_pass, forward_pass.known_size, layer, (q, k, v), scale)
                compared = self._compare(call, call.size.problem_of(call.qkv, recomputed.n_local), recomputed)
                # After a reentrant checkpoint gradients are new, so ranks meet as below.
                is_first = compared and input_kind(q, k, v) not in recomputed.attended
                with raised_on_all(self.group) if is_first else nullcontext(self.group) as group:
                    run = replace(recomputed, group=group)
                    return attend(run, q, k, v, scale, self._check_gradient).view(q.shape)
            for observer in self.observers:
                observer.attention_begins(q.device)
            # 1. Prepare static masks; compare anything new across ranks
            forward_pass = self.passes.last
            call = _Call(forward_pass, forward_pass.known_size, layer, (q, k, v), scale)
            slot = call.size.slot(layer, self._provider.moment.cfg_branch)
            known = forward_pass.masks[layer]
            if known is None and call.size.limits and not forward_pass.gradients:
                known = call.size.replacement(slot, input_kind(q, k, v), self._provider.moment)
            ready, compared = self._prepare_known(call, slot, known)
            # 2. Ranks meet before each exchange if this call may fail on one rank for the first time
            with raised_on_all(self.group) if compared else nullcontext(self.group) as group:
                prepared, use, dispatch = ready or self._prepare_predicted(call, slot, group, gate)
                for observer in self.observers:
                    observer.mask_used(layer, slot.key if known is None else known.key)
                # 3. Rows to their owners, y chunks of keys, the kernel, and the output back
                run = prepared if group is self.group else replace(prepared, group=group)
                if known is None and self.config.debug:
                    check_prepared(run, q, k, v)
                out = attend(run, q, k, v, scale, self._check_gradient, dispatch)
                forward_pass.keep(layer, prepared, out)
                for observer in self.observers:
                    observer.attention_ends(self.first_layer + layer, prepared, q, use)
            # 4. Keep plan and tables, on all ranks or on none
            slot.keep(known, prepared, use)
            call.size.keep_slot(slot)
            return out.view(q.shape)

    def flush(self) -> None:
        """Waits for counts in flight, so that a report covers every call."""
        for size in self._sizes.values():
            size.settle()

    @property
    def records(self) -> dict[int, Plan]:
        """Each layer's plan with statistics of its latest mask. Waits for counts in flight."""
        return next(reversed(self._sizes.values())).records if self._sizes else {}

    @property
    def reuse(self) -> ReuseStatistics:
        """Sums over all calls so far. Waits for counts in flight."""
        self.flush()
        return self._statistics

    def statistics(self) -> dict[str, float]:
        """Returns statistics of all calls so far. Waits for counts in flight.

        "calls": attentions; "plans": plans made; "mean_rho" and "worst_rho": imbalance ρ_s (slowest rank over mean)
        under the plans in use, 1.0 before any call.
        """
        statistics = self.reuse
        return {name: getattr(statistics, name) for name in ("calls", "plans", "mean_rho", "worst_rho")}

    @property
    def by_step(self) -> bool:
        """True if masks depend on the denoising step."""
        return self._provider.by_step

    def _prepare_known(self, call: _Call, slot: Slot, known: KnownMask | None) -> tuple[_Ready | None, bool]:
        """Prepares an attention with a static mask, if any; returns it, and True if ranks have compared anything.

        Stores no state, since after an error all ranks must have the same state.
        """
        ready: _Ready | None = None
        new, device = {}, call.qkv[0].device
        problem: Exception | None = call.size.problem_of(call.qkv, call.size.layout.shard)
        if known is not None and known.prepared is not None and known.prepared.device == device:
            ready = known.prepared, PlanUse(known.prepared.plan, False, known.prepared.plan), None
        elif known is not None:
            if problem is None:
                ready, problem = attempt(partial(self._prepare_new, call, slot, known))
            new = {NEW_MASK_DIFFERS.format(call.layer): ready[0].mask_fingerprint if ready else 0}
        return ready, self._compare(call, problem, ready and ready[0], new)

    @torch.no_grad()
    def _prepare_new(self, call: _Call, slot: Slot, known: KnownMask) -> _Ready:
        """Makes a static mask with its plan, routes and tables. Not collective."""
        size, q = call.size, call.qkv[0]
        mask = BlockMask.dense(self.heads, size.grid) if known.replaces else self._provider.mask(call.layer)
        for observer in self.observers:
            observer.mask_made(known.key, call.layer, mask, True)
        use = slot.plan_known(known, mask, partial(size.plan_known, mask, q))
        prepared = size.route(slot, use.plan, q.device, predicted=False).for_mask(use.plan, mask, fingerprint=True)
        return prepared, use, None

    @torch.no_grad()  # predicted masks are constants in backward
    def _prepare_predicted(self, call: _Call, slot: Slot, group: SequenceGroup, gate: torch.Tensor | None) -> _Ready:
        """Prepares an attention with a mask predicted from q and k, exchanged over `group`. Collective."""
        size, (q, k, v), debug = call.size, call.qkv, self.config.debug
        plan, now, dispatch = partial(size.plan_predicted, q), self._provider.moment, None
        # 1. Plan by the last call's counts, and its route, which may fail on one rank
        next_use = slot.next_use(q, now, plan)
        if next_use is not None:
            prepared = size.route(slot, next_use.plan, q.device, predicted=True)
            # 2. Send q, k and v while the mask is predicted, unless ranks meet or compare
            if group is self.group and not debug:
                dispatch = start_dispatch(prepared, q, k, v)
        # 3. Predict the mask, bitwise identical on all ranks; its counts are read at the next call
        mask = self._provider.mask(call.layer, LocalQK(q, k, size.layout, group, call.scale, v, gate))
        for observer in self.observers:
            observer.mask_made(slot.key, call.layer, mask, False)
        use = slot.use_predicted(mask, next_use, partial(plan, mask=mask), now)
        if use is not next_use:
            if dispatch is not None:  # q, k and v were sent under a plan that does not fit the mask
                dispatch.coming.pop().wait()
            prepared, dispatch = size.route(slot, use.plan, q.device, predicted=True), None
        # 4. Tables
        return prepared.for_mask(use.plan, mask, fingerprint=debug), use, dispatch

    def _compare(
        self,
        call: _Call,
        problem: Exception | None,
        prepared: PreparedAttention | None,
        new_mask: dict[str, int] | None = None,
    ) -> bool:
        """Compares q, k, v and a new mask's fingerprint, by message, across ranks; returns True if they did.

        Needed at the first call of a size and kind of inputs, for new masks, and under debug at every call.
        """
        size, kind, compared = call.size, input_kind(*call.qkv), call.forward_pass.compared
        new = {**(compared or {}), **(new_mask or {})}
        new_inputs = not new_mask and must_compare(kind, size.compared_kinds, problem)
        if not (new_inputs or new or self.config.debug):
            if problem is not None:
                raise problem
            return False
        limit, unfit = attempt(partial(size.limit, kind)) if problem is None else (None, None)
        calls = check_attention(
            self.group.control(),
            *call.qkv,
            call.scale,
            problem or unfit,
            prepared=prepared if (problem or unfit) is None else None,
            choose=partial(size.choose_kernel, kind),
            debug=self.config.debug,
            more={
                **(compared or {}),
                LAYOUTS_DIFFER: size.layout.fingerprint,
                LAYERS_DIFFER: call.layer,
                LIMITS_DIFFER: fingerprint_of(limit),
                **(new_mask or {}),
            },
            numbers=[size.predicted_calls],
        )
        size.keep_kind(kind, limit)
        if compared is not None:
            self._keep_pass(call.forward_pass, calls)
        return True

    def _keep_pass(self, forward_pass: ForwardPass, calls: Sequence[tuple[int, ...]]) -> None:
        """Stores a compared pass; drops the least recently used size. `calls`: each rank's with predicted masks."""
        forward_pass.compared, size = None, forward_pass.known_size
        if len(set(calls)) > 1:  # a rank aborted an earlier pass that others continued
            size.restart()
        size.keep_pass(forward_pass.key, forward_pass.masks)
        self._sizes[size.key] = size
        self._sizes.move_to_end(size.key)
        if len(self._sizes) > MOST_SIZES:
            self._sizes.popitem(last=False)[1].settle()
