"""One transformer's attentions: the mask, plan and kernel of each. All frameworks share it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from functools import partial

import torch

from dbsp_core.comm.consistency import QKV, ConcurrencyGuard, input_kind, raised_on_all
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.layout.sequence_layout import SequenceLayout, Streams
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.masks.steps import StepClock
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.chunk_attention import CheckGradient, attend
from dbsp_core.runtime.consistency_checks import (
    LAYERS_DIFFER,
    LAYOUTS_DIFFER,
    NEW_MASK_DIFFERS,
    check_attention,
    check_gradient,
    check_prepared,
    check_settings,
)
from dbsp_core.runtime.forward_passes import NOT_BEGUN, ForwardPass, ForwardPasses
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.pass_checks import Meeting, PassChecks
from dbsp_core.runtime.plan_keeper import PlanUse, ReuseStatistics
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.runtime.session_state import SessionObserver
from dbsp_core.runtime.size_context import SizeContext, SizeKey
from dbsp_core.sources import LocalQK
from dbsp_core.sources.spec import mask_in_words
from dbsp_core.utils.errors import in_number
from dbsp_core.utils.process import not_compiled, outside_inference

MOST_SIZES = 4
"""Sizes of video (with text) whose plans are kept: the passes of guidance may have texts of two lengths."""


@dataclass(repr=False)
class AttentionSession:
    """State of one transformer: `begin` at every forward pass, then `attend` once a layer.

    Raises UserError at construction, on all ranks, when strategy, group and kernel don't fit, or settings differ.

    Attributes:
        strategy: Strategy of the group's ranks; None: the one that is predicted to be fastest, for each attention.
        heads: Attention heads of every layer.
        steps: Returns the number of denoising steps, if the framework knows it.
        problem: Reason why this rank has no settings, which is raised on all ranks; the other arguments are then not
            used.
        check: False if whoever makes the session calls `check_settings`, before the first pass.
        passes: The forward pass that runs, and those whose backward is still to come.
        nodes: The node of each rank of the group.
        report: True if any rank's settings ask for a report.
        meeting: Checks of the next pass's inputs, which run with its first attention.
        first_layer: Number of the first layer to observers of the run, who may watch several transformers.
    """

    config: DbspConfig
    group: SequenceGroup
    strategy: Strategy | None
    heads: int
    layers: int
    steps: Callable[[], int | None] = lambda: None
    clock: StepClock = field(default_factory=StepClock)
    observers: list[SessionObserver] = field(default_factory=list)
    problem: InitVar[Exception | None] = None
    check: InitVar[bool] = True
    meeting: Meeting | None = None
    first_layer: int = 0
    passes: ForwardPasses = field(default_factory=ForwardPasses)
    nodes: tuple[int, ...] = field(init=False)
    report: bool = field(init=False)
    _mask_provider: MaskProvider = field(init=False)
    _statistics: ReuseStatistics = field(default_factory=ReuseStatistics)
    _raises_alone: bool = False
    _sizes: OrderedDict[SizeKey, SizeContext] = field(default_factory=OrderedDict)
    """What is known for each size of video; the one used last at the end."""
    _concurrency_guard: ConcurrencyGuard = field(init=False)
    _check_gradient: CheckGradient | None = field(init=False)

    def __post_init__(self, problem: Exception | None, check: bool) -> None:
        if check:
            check_settings(self.group, [self], problem)
        self._check_gradient = partial(check_gradient, self.group) if self.config.debug else None
        self._concurrency_guard = ConcurrencyGuard(self.group)
        count_steps = self.config.debug or any(observer.counts_steps for observer in self.observers)
        parts = self.config.mask, self.config.dense_schedule, self.heads, self.layers
        self._mask_provider = MaskProvider(*parts, self.steps, count_steps, self.clock)

    def __repr__(self) -> str:
        """Says what is known: counts under way are not waited for."""
        for size in self._sizes.values():
            size.sum_up()
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
        """Starts a forward pass over a video, or over several that are packed: then none attends to another.

        What is new in it is compared by all ranks at its first attention, or in `end` if there is none.

        Args:
            videos: The token grid of each, with its text.
            timestep: Timestep of the denoising, for masks that depend on the step.
            device: Device on which the group's collectives run.
            cfg_branch: CFG pass within the step, if the framework gives it. None: inferred from timesteps.
            streams: Order of a rank's text and video, in the layout that db-SP chooses; or this pass's
                layout.

        Returns:
            The layout in which the sequence must be sharded. What was made for the last `MOST_SIZES` sizes is kept.

        Raises:
            UserError: On all ranks, for a size that the mask source rejects, unless they raise it together elsewhere.
        """
        with self._concurrency_guard:
            forward_pass = self.passes.begin(torch.is_grad_enabled())
            key = videos, streams.fingerprint if isinstance(streams, SequenceLayout) else 0
            meeting, self.meeting = self.meeting, None
            meets = key not in self._sizes or meeting is not None or self.config.debug
            checks = PassChecks(self.group, meeting)
            try:
                first = self._mask_provider.begin(videos, timestep, cfg_branch)
                for observer in self.observers:
                    step = self.clock.progress().step_index
                    observer.begin(self._mask_provider.moment, timestep, cfg_branch, step)
                named = self._mask_provider.use_names()
                meets = meets or not named or (first and self._mask_provider.predicts)
                if meets:
                    forward_pass.checks = checks
                    forward_pass.size = self._take_up(checks, key, torch.device(device), streams, cfg_branch)
                else:
                    self._sizes.move_to_end(key)
                    forward_pass.size = self._sizes[key]
            except Exception as error:  # any error: this rank must not stop alone where others compare
                if meets and not self._raises_alone:
                    checks.check(error, {})
                raise
            return forward_pass.size.layout

    def within(self, group: SequenceGroup, strategy: Strategy | None) -> AttentionSession:
        """Creates a session of other ranks that counts calls and denoising steps with this one. Collective for them.

        It has no observers; errors in `begin` are raised on the failing rank only.
        """
        parts = self.config, group, strategy, self.heads, self.layers, self.steps, self.clock
        return AttentionSession(*parts, passes=self.passes, _statistics=self._statistics, _raises_alone=True)

    def end(self) -> frozenset[int]:
        """Returns the layers whose attention the forward pass has reached. Collective if there are none."""
        last = self.passes.last
        if last.checks is not None:
            with self._concurrency_guard:
                last.checks.check(None, {})
            self._keep_checked(last)
        return frozenset(last.reached)

    @property
    def layout(self) -> SequenceLayout:
        """The layout of the current forward pass."""
        return _size_of(self.passes.now).layout

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
        """Computes attention of one layer: q, k, v and the result are [B, H, shard, D], this rank's padded tokens.

        `gate`, of their shape, is what mask sources multiply a coarse branch by.
        """
        with self._concurrency_guard:
            qkv, scale = (q, k, v), max(1, *q.shape[-1:]) ** -0.5 if scale is None else scale
            recomputed = self.passes.recomputed(layer)
            if recomputed is not None:  # activation checkpointing, in backward
                with torch.no_grad():  # as in the pass: what is saved for backward must be the same
                    problem = _size_of(self.passes.now).problem_of(qkv, recomputed.n_local)
                    self._compare(layer, qkv, scale, problem, recomputed, {})
                return attend(recomputed, q, k, v, scale, self._check_gradient).view(q.shape)
            for observer in self.observers:
                observer.attention_begins(q.device)
            # 1. What does not depend on q and k, and what ranks compare of them, if it is new.
            with torch.no_grad():
                prepared, use, compared = self._prepare_known(layer, qkv, scale)
            # 2. Prediction and attention: done for the first time, they may fail on one rank alone.
            if not compared:
                return self._attend(layer, qkv, scale, gate, prepared, use, self.group)
            with raised_on_all(self.group) as group:
                return self._attend(layer, qkv, scale, gate, prepared, use, group)

    def _attend(
        self,
        layer: int,
        qkv: QKV,
        scale: float,
        gate: torch.Tensor | None,
        prepared: PreparedAttention | None,
        use: PlanUse | None,
        group: SequenceGroup,
    ) -> torch.Tensor:
        """Computes attention with what was prepared, or else with a predicted mask. Collective.

        Args:
            use: The first use of a new plan, if it is one.
            group: Carries the exchanges, and those of backward.
        """
        q, k, v = qkv
        with torch.no_grad():  # to backward, predicted masks are constants
            now = _size_of(self.passes.last)
            if prepared is not None:
                use = now.use_known(layer, prepared, use)
            else:
                prepared, use = now.prepare_predicted(layer, LocalQK(q, k, now.layout, group, scale, v, gate))
            run = prepared if group is self.group else replace(prepared, group=group)
            if self.config.debug and now.name_of(layer) is None:
                check_prepared(run, q, k, v)
        out = attend(run, q, k, v, scale, self._check_gradient)
        self.passes.last.keep(layer, prepared, out)
        for observer in self.observers:
            observer.attention_ends(self.first_layer + layer, prepared, q, use)
        return out.view(q.shape)

    def flush(self) -> None:
        """Waits for counts under way, so that a report covers every call."""
        for size in self._sizes.values():
            size.settle()

    @property
    def records(self) -> dict[int, Plan]:
        """Each layer's plan, with the numbers of the mask that it was last used for. Waits for counts under way."""
        return next(reversed(self._sizes.values())).records if self._sizes else {}

    @property
    def reuse(self) -> ReuseStatistics:
        """Sums over all calls so far. Waits for counts under way."""
        self.flush()
        return self._statistics

    def statistics(self) -> dict[str, float]:
        """Sums up the calls so far, over all sizes of video. Waits for counts under way.

        Returns:
            "calls", attentions computed; "plans", plans made for them; "mean_rho" and "worst_rho", the imbalance ρ_s
            (largest work of a rank over the mean) of their masks under the plans in use, 1.0 before any call.
        """
        statistics = self.reuse
        return {name: getattr(statistics, name) for name in ("calls", "plans", "mean_rho", "worst_rho")}

    @property
    def by_step(self) -> bool:
        """True if masks depend on the denoising step."""
        return self._mask_provider.by_step

    def _take_up(
        self,
        checks: PassChecks,
        key: SizeKey,
        device: torch.device,
        streams: Streams | SequenceLayout,
        cfg_branch: int | None,
    ) -> SizeContext:
        """Finds out what ranks have to compare of a pass that begins."""
        of_size = key[0], streams if isinstance(streams, (str, type(None))) else None
        of_debug = (of_size, (self._mask_provider.moment, cfg_branch)) if self.config.debug else None
        parts = self.config, self.group, self.strategy, self._mask_provider, self.observers, key
        size = self._sizes.get(key) or SizeContext.from_config(*parts, device, streams, self.nodes, self._statistics)
        checks.take(size, of_debug)
        return size

    def _keep_checked(self, forward_pass: ForwardPass) -> None:
        """Keeps what is known of a pass, once all ranks have compared it."""
        checks, forward_pass.checks = forward_pass.checks, None
        if checks is None or checks.size is None:
            return
        self._sizes[checks.size.key] = checks.size
        self._sizes.move_to_end(checks.size.key)
        self._mask_provider.keep_names(checks.names)
        if len(self._sizes) > MOST_SIZES:
            (videos, _), oldest = self._sizes.popitem(last=False)
            oldest.settle()
            if all(videos != others for others, _ in self._sizes):
                self._mask_provider.forget(videos)

    def _prepare_known(
        self, layer: int, qkv: QKV, scale: float
    ) -> tuple[PreparedAttention | None, PlanUse | None, bool]:
        """Returns what computes a layer's attention, once ranks have compared what is new. Collective then.

        Returns:
            The prepared attention, or None if the mask is predicted; the first use of a new plan, or None; True if
            ranks have compared anything.
        """
        now, q, use, mask = _size_of(self.passes.last), qkv[0], None, {}
        problem: Exception | None = now.problem_of(qkv, now.layout.shard)
        prepared = now.known(layer, q.device)
        if prepared is None and now.name_of(layer) is not None:
            try:
                prepared, use = now.prepare_known(layer, q) if problem is None else (None, None)
            except Exception as error:  # any error: this rank must not stop alone
                problem = error
            mask = {NEW_MASK_DIFFERS.format(layer): 0 if prepared is None else prepared.mask_fingerprint}
        return prepared, use, self._compare(layer, qkv, scale, problem, prepared, mask)

    def _compare(
        self,
        layer: int,
        qkv: QKV,
        scale: float,
        problem: Exception | None,
        prepared: PreparedAttention | None,
        mask: dict[str, int],
    ) -> bool:
        """Lets ranks compare q, k and v before a call: the first of a size and kind, under debug every one.

        Args:
            problem: Error found on this rank, if any.
            prepared: The prepared attention that will run, or None if it is still to be made.
            mask: Fingerprint of a new mask, by message, which ranks then compare too.

        Returns:
            True if they have compared them.
        """
        forward_pass = self.passes.now
        now, kind, checks = _size_of(forward_pass), input_kind(*qkv), forward_pass.checks
        new = not mask and now.checked_inputs.is_new(kind, None if problem is None else str(problem))
        if not (new or mask or checks or self.config.debug):
            if problem is not None:
                raise problem
            return False
        check_attention(
            self.group,
            *qkv,
            scale,
            problem,
            prepared=prepared if problem is None else None,
            choose=partial(now.choose_kernel, kind),
            debug=self.config.debug,
            more={LAYOUTS_DIFFER: now.layout.fingerprint, LAYERS_DIFFER: layer, **mask},
            check=None if checks is None else checks.check,
        )
        now.checked_inputs.is_new(kind, None)
        if checks is not None:
            self._keep_checked(forward_pass)
        return True


def _size_of(forward_pass: ForwardPass) -> SizeContext:
    """Returns what is known of a pass's size. Raises RuntimeError if it did not begin."""
    if forward_pass.size is None:
        raise RuntimeError(NOT_BEGUN)
    return forward_pass.size
