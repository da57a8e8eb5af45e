"""One transformer's attentions: which mask, plan and executor each gets. Both hosts share it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from dbsp_core.comm.consistency import problem_of_inputs
from dbsp_core.comm.devices import gather_nodes
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.cost.machine import Hardware
from dbsp_core.layout.sequence_layout import SequenceLayout, Streams
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.masks.steps import StepClock
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.agreement import (
    LAYERS_DIFFER,
    LAYOUTS_DIFFER,
    agree_on_attention,
    agree_on_executor,
    agree_on_gradient,
    agree_on_kernel,
    agree_on_pass,
    agree_on_settings,
)
from dbsp_core.runtime.chunk_attention import attend
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.plan_cache import ReuseCounters
from dbsp_core.runtime.prepared import KernelQuestion, PreparedAttention
from dbsp_core.runtime.session_state import AttentionEnded, OneThread, Recomputation, SessionObserver
from dbsp_core.runtime.size_context import SessionParts, SizeContext, agree_on_constants, new_size
from dbsp_core.sources import LocalQK
from dbsp_core.sources.spec import mask_in_words
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import not_compiled, outside_inference

__all__ = ["MOST_SIZES", "AttentionSession"]

MOST_SIZES = 4
"""Sizes of video (with text) whose plans are kept: the passes of guidance may have texts of two lengths."""


@dataclass(repr=False)
class AttentionSession:
    """State of one transformer: `begin` at every forward pass, then `attend` once a layer.

    Raises UserError at construction, on all ranks, when strategy, group and kernel don't fit.

    Attributes:
        strategy: How the group's ranks are used; None: as is predicted to be fastest, for each attention.
        heads: Attention heads of every layer.
        steps: Tells how many denoising steps there will be, where the host knows.
    """

    config: DbspConfig
    group: SequenceGroup
    strategy: Strategy | None
    heads: int
    layers: int
    steps: Callable[[], int | None] = lambda: None
    clock: StepClock = field(default_factory=StepClock)
    observers: Sequence[SessionObserver] = ()
    _mask_provider: MaskProvider = field(init=False)
    _parts: SessionParts = field(init=False)
    _hardware: tuple[Hardware | None] | None = None
    """The constants that ranks agreed on at the first size; None before it."""
    _counters: ReuseCounters = field(default_factory=ReuseCounters)
    _sizes: OrderedDict[tuple[tuple[Video, ...], int], SizeContext] = field(default_factory=OrderedDict)
    """What is kept for each size of video, and for the layout where one was given; the one used last at the end."""
    _reached: set[int] = field(default_factory=set)
    _recomputation: Recomputation = field(default_factory=Recomputation)
    _kernels_agreed: set[KernelQuestion] = field(default_factory=set)
    """What all ranks are known to have a kernel for."""
    _one_thread: OneThread = field(init=False)

    def __post_init__(self) -> None:
        self._one_thread = OneThread(self.group)

        def settings() -> object:
            return replace(self.config, strategy=self.strategy).fingerprint, self.heads, self.layers

        agree_on_settings(self.group, self.strategy, self.config.kernel, settings, self.config.debug)
        nodes = gather_nodes(self.group)
        self._mask_provider = MaskProvider(
            self.config.mask,
            self.config.dense_schedule,
            self.heads,
            self.layers,
            self.group,
            self.steps,
            count_steps=self.config.debug or any(observer.counts_steps for observer in self.observers),
            clock=self.clock,
        )
        compare = any(observer.compares for observer in self.observers)
        self._parts = SessionParts(
            self.config, self.group, nodes, self.strategy, self._mask_provider, self._counters, compare
        )
        if self.config.effective_planning == "async":
            self.group.auxiliary("planning")  # while no rank can have failed yet: making a group is a collective

    def __repr__(self) -> str:
        """Says what is known: plans that are pending are not waited for."""
        counters = self._counters
        rho = f", ρ_s {counters.mean_rho:.3f}" if counters.evaluated else ""
        ranks = _counted(self.group.size, "rank")
        use = f"strategy {self.strategy or 'auto'} on {ranks}, {mask_in_words(self.config.mask)}"
        done = f"{_counted(counters.calls, 'call')}, {_counted(counters.replans, 'plan')}{rho}"
        return f"<db-SP session: {_counted(self.layers, 'layer')} of {self.heads} heads, {use}; {done}>"

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
            self._mask_provider.begin(videos, timestep, cfg_branch)
            for observer in self.observers:
                observer.begin(self._mask_provider.moment, timestep, cfg_branch, self.clock.progress().step_index)
            place = torch.device(device)
            if self.config.debug:
                of_streams = streams if isinstance(streams, (str, type(None))) else None
                size, step = (videos, of_streams), (self._mask_provider.moment, cfg_branch)
                agree_on_pass(self.group, size, step)
            size_key = videos, streams.fingerprint if isinstance(streams, SequenceLayout) else 0
            if size_key not in self._sizes:
                if self._hardware is None:
                    self._hardware = (agree_on_constants(self.config, self.group, self.strategy, place),)
                self._sizes[size_key] = new_size(self._parts, self._hardware[0], videos, place, streams)
                if len(self._sizes) > MOST_SIZES:
                    self._drop_oldest_size()
            self._sizes.move_to_end(size_key)
            self._mask_provider.name_masks()
            return self.layout

    def within(self, group: SequenceGroup, strategy: Strategy | None) -> AttentionSession:
        """A session of other ranks, which counts its calls and denoising steps with this one's. Collective for them.

        It is observed by none.
        """
        parts = self.config, group, strategy, self.heads, self.layers, self.steps, self.clock
        return AttentionSession(*parts, _counters=self._counters)

    def end(self) -> frozenset[int]:
        """Returns the layers whose attention the forward pass has reached."""
        return frozenset(self._reached)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank of the group."""
        return self._parts.nodes

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
            scale = max(1, q.shape[-1]) ** -0.5 if scale is None else scale
            if layer in self._reached and torch.is_grad_enabled():  # activation checkpointing, in backward
                executor = self._recomputation.take(layer)
                self._agree(layer, q, k, v, scale, executor)
                return self._run(executor, q, k, v, scale).view(q.shape)
            known = self._agree(layer, q, k, v, scale)
            for observer in self.observers:
                observer.attention_begins(q.device)
            with torch.no_grad():  # to backward, predicted masks are constants
                tokens = LocalQK(q, k, self.layout, self.group, scale, v, gate)
                executor = self._now.executor(layer, tokens, self.observers)
            if self.config.debug and executor is not known:
                agree_on_executor(executor, q, k, v)
            self._reached.add(layer)
            out = self._run(executor, q, k, v, scale)
            self._recomputation.keep(layer, executor, out)
            self._now.plans.start()
            key, latest = self._now.plan_keys[layer], self._now.plans.latest
            ended = AttentionEnded(layer, key, executor, q, latest, self.config.effective_planning == "async")
            for observer in self.observers:
                observer.attention_ends(ended)
            return out.view(q.shape)

    def _run(
        self, executor: PreparedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Runs the attention of a layer on q, k, v [B, H, shard, D].

        Folds the batch into heads if each item has its own mask: the result is then [1, B · H, shard, D]. Ranks check
        once for each kind of inputs and plan that all of them have a kernel.
        """
        question = executor.kernel_question(q, k, v)
        if not self.config.debug and question not in self._kernels_agreed:  # debug compares kernels at every call
            agree_on_kernel(executor, q, k, v)
            self._kernels_agreed.add(question)
        check_gradient = partial(agree_on_gradient, self.group) if self.config.debug else None
        if executor.plan.heads == q.shape[1]:
            return attend(executor, q, k, v, scale, check_gradient)
        of_heads = [t.flatten(0, 1).unsqueeze(0) for t in (q, k, v)]  # B·H of them
        return attend(executor, of_heads[0], of_heads[1], of_heads[2], scale, check_gradient)

    def flush(self) -> None:
        """Waits for pending plans, so that whatever is read covers every call."""
        for context in self._sizes.values():
            context.flush(self.observers)

    @property
    def records(self) -> dict[int, Plan]:
        """Each layer's plan, with the numbers of the mask that it was last used for. Waits for pending plans."""
        return self._now.records if self._sizes else {}

    @property
    def reuse(self) -> ReuseCounters:
        """How often plans were kept."""
        self.flush()
        return self._counters

    def statistics(self) -> dict[str, float]:
        """Sums up the calls so far, over all sizes of video. Waits for pending plans.

        Returns:
            "calls", attentions computed; "plans", plans made for them; "mean_rho" and "worst_rho", the imbalance ρ_s
            (largest work of a rank over the mean) of their masks under the plans in use, 1.0 before any call.
        """
        mean, worst = self.reuse.mean_rho, self.reuse.worst_used
        return {"calls": self.reuse.calls, "plans": self.reuse.replans, "mean_rho": mean, "worst_rho": worst}

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

    def _agree(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        executor: PreparedAttention | None = None,
    ) -> PreparedAttention | None:
        """Lets ranks agree before any collective of a call: at the first of a size and kind, under debug at every one.

        Args:
            executor: What computes it, where that is known: of a forward pass that may have been over another size.

        Returns:
            Under debug, the executor that ranks have agreed on too, where one was made before.
        """
        now, tokens = self._now, self._now.layout.shard if executor is None else executor.n_local
        why = f"the model has {self.heads} heads, and the layout gives every rank {tokens} tokens"
        refusal, debug = self.config.wire.no_gradients, self.config.debug
        problem = problem_of_inputs(q, k, v, self.heads, tokens, why, refusal)
        if debug or now.inputs_agreed.is_new(q, k, v, problem):
            if debug and problem is None and executor is None:
                executor = now.known_executor(layer, q)
            more = {LAYOUTS_DIFFER: now.layout.fingerprint, LAYERS_DIFFER: layer}
            agree_on_attention(self.group, q, k, v, scale, problem, executor=executor, debug=debug, more=more)
        elif problem is not None:
            raise UserError(problem)
        return executor

    def _drop_oldest_size(self) -> None:
        """Drops a size once what is being planned for it is done: on all ranks alike."""
        (videos, _), oldest = self._sizes.popitem(last=False)
        oldest.flush(self.observers)
        if all(videos != others for others, _ in self._sizes):
            self._mask_provider.forget(videos)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
