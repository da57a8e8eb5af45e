"""One transformer's attentions: which mask, plan and kernel each gets. All hosts share it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from functools import partial

import torch

from dbsp_core.comm.consistency import check_consistent, needs_gradients, problem_of_inputs
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.cost.machine import cost_basis, hardware_for
from dbsp_core.cost.prediction import StrategySelector, candidates
from dbsp_core.layout.sequence_layout import SequenceLayout, Streams
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.masks.steps import StepClock
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.agreement import (
    LAYERS_DIFFER,
    LAYOUTS_DIFFER,
    NEW_MASK_DIFFERS,
    PASS_MARKS,
    agree_on_attention,
    agree_on_gradient,
    agree_on_prepared,
    agree_on_settings,
)
from dbsp_core.runtime.chunk_attention import attend
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.plan_keeper import PlanKeeper, PlanUse, ReuseStatistics
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_core.runtime.session_state import OneThread, Recomputation, SessionObserver
from dbsp_core.runtime.size_context import SizeContext
from dbsp_core.sources import LocalQK
from dbsp_core.sources.spec import mask_in_words
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.process import log, not_compiled, outside_inference
from dbsp_kernels import KernelRequirements, choose_kernel
from dbsp_kernels.kernel import supports

__all__ = ["MOST_SIZES", "AttentionSession"]

MOST_SIZES = 4
"""Sizes of video (with text) whose plans are kept: the passes of guidance may have texts of two lengths."""

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, [B, H, shard, D] each."""

SizeKey = tuple[tuple[Video, ...], int]
"""Videos of a forward pass, and the fingerprint of the layout if one was given, else 0."""


@dataclass(repr=False)
class AttentionSession:
    """State of one transformer: `begin` at every forward pass, then `attend` once a layer.

    Raises UserError at construction, on all ranks, when strategy, group and kernel don't fit, or settings differ.

    Attributes:
        strategy: How the group's ranks are used; None: as is predicted to be fastest, for each attention.
        heads: Attention heads of every layer.
        steps: Tells how many denoising steps there will be, where the host knows.
        problem: Why this rank has no settings, which is raised on all ranks; the other arguments are then not used.
        nodes: The node of each rank of the group.
        report: Whether any rank's settings ask for a report.
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
    nodes: tuple[int, ...] = field(init=False)
    report: bool = field(init=False)
    _mask_provider: MaskProvider = field(init=False)
    _statistics: ReuseStatistics = field(default_factory=ReuseStatistics)
    _sizes: OrderedDict[SizeKey, SizeContext] = field(default_factory=OrderedDict)
    """What is known for each size of video; the one used last at the end."""
    _reached: set[int] = field(default_factory=set)
    _recomputation: Recomputation = field(default_factory=Recomputation)
    _one_thread: OneThread = field(init=False)

    def __post_init__(self, problem: Exception | None) -> None:
        config, debug = self.config, self.config.debug
        settings = replace(config, strategy=self.strategy).fingerprint, self.heads, self.layers
        wanted = config.report is not None
        self.nodes, self.report = agree_on_settings(
            self.group, self.strategy, config.kernel, settings, problem, report=wanted, debug=debug
        )
        self._one_thread = OneThread(self.group)
        count_steps = debug or any(observer.counts_steps for observer in self.observers)
        self._mask_provider = MaskProvider(
            config.mask, config.dense_schedule, self.heads, self.layers, self.steps, count_steps, self.clock
        )

    def __repr__(self) -> str:
        """Says what is known: counts under way are not waited for."""
        done = self._statistics
        rho = f", ρ_s {done.mean_rho:.3f}" if done.counted else ""
        ranks = _counted(self.group.size, "rank")
        use = f"strategy {self.strategy or 'auto'} on {ranks}, {mask_in_words(self.config.mask)}"
        calls = f"{_counted(done.calls, 'call')}, {_counted(done.plans, 'plan')}{rho}"
        return f"<db-SP session: {_counted(self.layers, 'layer')} of {self.heads} heads, {use}; {calls}>"

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

        Args:
            videos: The token grid of each, with its text.
            timestep: Of the denoising, for masks that depend on the step.
            device: Where the group's collectives run.
            cfg_branch: Of the step's guidance passes, where the host says which one this is. None: told by timesteps.
            streams: How a rank's text and video follow one another, in the layout that db-SP chooses; or this pass's
                layout.

        Returns:
            The layout in which the sequence must be sharded. What was made for the last `MOST_SIZES` sizes is kept.

        Raises:
            UserError: On all ranks, for a size that the mask source refuses.
        """
        with self._one_thread.inside():
            self._reached.clear()
            self._recomputation.begin(torch.is_grad_enabled())
            first = self._mask_provider.begin(videos, timestep, cfg_branch)
            for observer in self.observers:
                observer.begin(self._mask_provider.moment, timestep, cfg_branch, self.clock.progress().step_index)
            size_key = videos, streams.fingerprint if isinstance(streams, SequenceLayout) else 0
            named = self._mask_provider.use_names()
            new = size_key not in self._sizes or not named or (first and self._mask_provider.predicts)
            if new or self.config.debug:
                size = self._agree_on_pass(size_key, torch.device(device), cfg_branch, streams, named)
                self._sizes[size_key] = size
            self._sizes.move_to_end(size_key)
            if len(self._sizes) > MOST_SIZES:
                self._drop_oldest_size()
            return self.layout

    def within(self, group: SequenceGroup, strategy: Strategy | None) -> AttentionSession:
        """A session of other ranks, which counts its calls and denoising steps with this one's. Collective for them.

        It is observed by none.
        """
        parts = self.config, group, strategy, self.heads, self.layers, self.steps, self.clock
        return AttentionSession(*parts, _statistics=self._statistics)

    def end(self) -> frozenset[int]:
        """Returns the layers whose attention the forward pass has reached."""
        return frozenset(self._reached)

    @property
    def layout(self) -> SequenceLayout:
        """The layout of the current forward pass."""
        return self._now.layout

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
        """Attention of one layer: q, k, v and the result are [B, H, shard, D], this rank's tokens with padding.

        `gate`, of their shape, is what mask sources multiply a coarse branch by.
        """
        with self._one_thread.inside():
            qkv, scale = (q, k, v), max(1, q.shape[-1]) ** -0.5 if scale is None else scale
            if layer in self._reached and torch.is_grad_enabled():  # activation checkpointing, in backward
                prepared = self._recomputation.take(layer)
                with torch.no_grad():  # as in the pass: what is saved for backward must be the same
                    self._compare(layer, qkv, scale, prepared.n_local, prepared)
                return self._run(prepared, qkv, scale).view(q.shape)
            for observer in self.observers:
                observer.attention_begins(q.device)
            with torch.no_grad():  # to backward, predicted masks are constants
                prepared, use = self._prepare(layer, qkv, scale, gate)
            self._reached.add(layer)
            out = self._run(prepared, qkv, scale)
            self._recomputation.keep(layer, prepared, out)
            for observer in self.observers:
                observer.attention_ends(layer, prepared, q, use)
            return out.view(q.shape)

    def flush(self) -> None:
        """Waits for counts under way, so that whatever is read covers every call."""
        for size in self._sizes.values():
            size.keeper.settle()

    @property
    def records(self) -> dict[int, Plan]:
        """Each layer's plan, with the numbers of the mask that it was last used for. Waits for counts under way."""
        return self._now.records if self._sizes else {}

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
        found = self.reuse
        worst = found.worst_rho
        return {"calls": found.calls, "plans": found.plans, "mean_rho": found.mean_rho, "worst_rho": worst}

    @property
    def by_step(self) -> bool:
        """Whether masks depend on the denoising step."""
        return self._mask_provider.by_step

    @property
    def _now(self) -> SizeContext:
        """What was made for the size of the current forward pass."""
        if not self._sizes:
            raise RuntimeError("attention was reached before the forward pass began; attach db-SP to the transformer")
        return next(reversed(self._sizes.values()))

    def _agree_on_pass(
        self,
        size_key: SizeKey,
        device: torch.device,
        cfg_branch: int | None,
        streams: Streams | SequenceLayout,
        named: bool,
    ) -> SizeContext:
        """Returns what is known for the size of a pass, once all ranks have compared it. Collective.

        Args:
            named: Whether the cache keys of the pass's masks are known.
        """
        size, names, problem, marks = self._sizes.get(size_key), {}, None, dict.fromkeys(PASS_MARKS, 0)
        try:
            size = size or self._new_size(size_key[0], device, streams)
            names = {} if named else self._mask_provider.ask_names()
            of_size = size_key[0], streams if isinstance(streams, (str, type(None))) else None
            of_debug = of_size, (self._mask_provider.moment, cfg_branch)
            compared = [fingerprint_of(one) if self.config.debug else 0 for one in of_debug]
            compared += [fingerprint_of(size.grid), size.hardware_mark, self._mask_provider.mark_of(names)]
            marks = dict(zip(PASS_MARKS, compared, strict=True))
        except Exception as error:  # any error: this rank must not stop alone
            problem = error
        calls = check_consistent(self.group.control(), problem, marks, told=[size.keeper.calls if size else 0])
        if size is None:
            raise RuntimeError("a size without a layout, and no rank has said why")
        if len({number for (number,) in calls}) > 1:  # a rank has left a pass that others went on with
            size.keeper.restart()
        if not named:
            self._mask_provider.keep_names(names)
        return size

    def _new_size(
        self, videos: tuple[Video, ...], device: torch.device, streams: Streams | SequenceLayout
    ) -> SizeContext:
        """Returns the context of a new size. Raises ValueError for one that the mask source refuses."""
        config, grid = self.config, self._mask_provider.grid()
        layout, selector = streams, None
        if not isinstance(layout, SequenceLayout):
            # Stripes for the longest ring serve shorter ones as well: each of their ranks has stripes side by side.
            longest = self.strategy or Strategy(1, self.group.size)
            layout = SequenceLayout.named(config.layout, grid, longest, streams=layout)
        if self.strategy is None:
            hardware = hardware_for(config.machine, device.type, config.kernel)
            if self.group.rank == 0:
                log.info("costs are estimated by %s", cost_basis(hardware))
            strategies = candidates(self.group.size, grid, supports(config.kernel, KernelRequirements(lse=True)))
            selector = StrategySelector(strategies, hardware, self.nodes, layout)
        compare = any(observer.compares for observer in self.observers)
        keeper = PlanKeeper(config.reuse, compare, self._statistics)
        parts = config, self.group, self.strategy, self._mask_provider, self.observers
        return SizeContext(*parts, videos, grid, layout, selector, keeper)

    def _prepare(
        self, layer: int, qkv: QKV, scale: float, gate: torch.Tensor | None
    ) -> tuple[PreparedAttention, PlanUse]:
        """Returns what computes a layer's attention now, once ranks have compared what is new. Collective then."""
        now, (q, k, v) = self._now, qkv
        prepared, predicted = now.known(layer, q.device), self._mask_provider.cache_key(layer) is None
        if prepared is None and not predicted:
            return self._new_known(layer, qkv, scale)
        compared = self._compare(layer, qkv, scale, now.layout.shard, prepared)
        if prepared is not None:
            return prepared, now.use_known(layer, prepared)
        tokens = LocalQK(q, k, now.layout, self.group, scale, v, gate)
        prepared, use = now.prepare_predicted(layer, tokens, compare=not compared)
        if self.config.debug:
            agree_on_prepared(prepared, q, k, v)
        return prepared, use

    def _new_known(self, layer: int, qkv: QKV, scale: float) -> tuple[PreparedAttention, PlanUse]:
        """Prepares an attention for a mask that is known beforehand and new: on all ranks. Collective."""
        now, prepared, use = self._now, None, None
        problem: Exception | None = self._problem_of(qkv, now.layout.shard)
        if problem is None:
            try:
                prepared, use = now.prepare_known(layer, qkv[0])
            except Exception as error:  # any error: this rank must not stop alone
                problem = error
        mask = {NEW_MASK_DIFFERS.format(layer): 0 if prepared is None else prepared.mask_mark}
        self._agree(layer, qkv, scale, problem, prepared, mask)
        now.inputs_agreed.is_new(*qkv, None)
        if prepared is None:
            raise RuntimeError("nothing is prepared for an attention, and no rank has said why")
        return prepared, now.use_known(layer, prepared, use)

    def _compare(self, layer: int, qkv: QKV, scale: float, tokens: int, prepared: PreparedAttention | None) -> bool:
        """Lets ranks compare q, k and v before a call: the first of a size and kind, under debug every one.

        Args:
            tokens: Tokens that each rank must have.
            prepared: What computes the attention, or None if it is still to be made.

        Returns:
            True if they have compared them.
        """
        problem = self._problem_of(qkv, tokens)
        if self.config.debug or self._now.inputs_agreed.is_new(*qkv, None if problem is None else str(problem)):
            self._agree(layer, qkv, scale, problem, prepared if problem is None else None, {})
            return True
        if problem is not None:
            raise problem
        return False

    def _problem_of(self, qkv: QKV, tokens: int) -> UserError | None:
        """Returns what is wrong with this rank's q, k and v, or None."""
        why = f"the model has {self.heads} heads, and the layout gives every rank {tokens} tokens"
        problem = problem_of_inputs(*qkv, self.heads, tokens, why, self.config.wire.no_gradients)
        return None if problem is None else UserError(problem)

    def _agree(
        self,
        layer: int,
        qkv: QKV,
        scale: float,
        problem: Exception | None,
        prepared: PreparedAttention | None,
        mask: dict[str, int],
    ) -> None:
        """Lets ranks compare what they are about to attend with. Collective."""
        now, q, gradients = self._now, qkv[0], needs_gradients(*qkv)
        merged = self.strategy is not None and self.strategy.ring > 1
        blocks = now.grid.block_q, now.grid.block_k
        needs = KernelRequirements(blocks, q.shape[-1], lse=merged or gradients, backward=gradients)
        agree_on_attention(
            self.group,
            *qkv,
            scale,
            problem,
            prepared=prepared,
            choose=partial(choose_kernel, self.config.kernel, q.device, q.dtype, needs),
            debug=self.config.debug,
            more={LAYOUTS_DIFFER: now.layout.fingerprint, LAYERS_DIFFER: layer, **mask},
        )

    def _run(self, prepared: PreparedAttention, qkv: QKV, scale: float) -> torch.Tensor:
        """Runs the attention of a layer on q, k, v [B, H, shard, D].

        Folds the batch into heads if each item has its own mask: the result is then [1, B · H, shard, D].
        """
        check_gradient = partial(agree_on_gradient, self.group) if self.config.debug else None
        q, k, v = qkv
        if prepared.plan.heads != q.shape[1]:  # B·H of them
            q, k, v = (one.flatten(0, 1).unsqueeze(0) for one in qkv)
        return attend(prepared, q, k, v, scale, check_gradient)

    def _drop_oldest_size(self) -> None:
        """Drops a size, on all ranks alike."""
        (videos, _), oldest = self._sizes.popitem(last=False)
        oldest.keeper.settle()
        if all(videos != others for others, _ in self._sizes):
            self._mask_provider.forget(videos)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
