"""Shards a diffusers transformer over ranks, with dual-balanced self-attention, by reversible hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.runtime.whole_tensors import attend_shared_keys, count_gradient_once, sum_gradient
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models import ShardSpec, TokenSequence, architecture_of
from dbsp_diffusers.models.architecture import modules_at
from dbsp_diffusers.models.gates import gate_of
from dbsp_diffusers.packed.bags import BagSessions
from dbsp_diffusers.packed.samples import PackedBatch, Sharing
from dbsp_diffusers.patching import Arguments, PatchSet, current_cfg_pass, signature_of, without_argument
from dbsp_diffusers.sharding.attention import intercept_attention
from dbsp_diffusers.sharding.checkpoints import Checkpoints
from dbsp_diffusers.sharding.hooks_by_path import Args, HooksByPath, Kwargs, changing_arguments
from dbsp_diffusers.sharding.pass_inputs import join_parts, part_of, parts_by_size
from dbsp_diffusers.sharding.step_caches import ForwardRanks, StepCaches, names_of_caches
from dbsp_diffusers.sharding.stream_shards import PackedShards, StreamShards

ShardsByStream = Mapping[str, Any]
"""`StreamShards` of "text" and "video", and `PackedShards` of both as "packed" for models with packed sequences."""


@dataclass(frozen=True)
class _PassSharding:
    attention: AttentionSession | Sharing  # computes the pass's attention
    streams: ShardsByStream | None  # its shards; None: several samples, which `dbsp_diffusers.packed` shards


class SequenceSharding:
    """Shards a transformer's sequence over the session's ranks by its architecture.

    Every rank takes the whole input and returns the whole output. Text in the sequence is a separate stream, sharded
    like video. Step caches, enabled before or after, skip the same layers as in one process. Raises UserError for an
    unsupported transformer.
    """

    def __init__(self, transformer: nn.Module, session: AttentionSession, patches: PatchSet) -> None:
        self.together = ForwardRanks(session.group, lambda: self._shards("video"), self._reached)
        self._transformer, self._session, self._patches = transformer, session, patches
        self._architecture = architecture_of(transformer)
        self._bags = BagSessions(session)
        self._checkpoints: Checkpoints | None = None  # from the first pass with gradients
        self._parts: list[tuple[int, ...]] = []  # items of each size in the current batch
        self._hooks = HooksByPath(transformer)
        self._made: WeakKeyDictionary[SequenceLayout, ShardsByStream] = WeakKeyDictionary()
        self._caches = StepCaches(transformer, self._architecture.blocks_of(transformer), self.together)
        self._caches.attach(patches)
        self._branch = current_cfg_pass(transformer, patches)
        self._attach()

    def _attach(self) -> None:
        patches, hooks, shard_plan = self._patches, self._hooks, self._architecture.shard_plan
        attentions = self._architecture.attentions_of(self._transformer)
        paths = self._architecture.attention_to_video
        to_video = [module for path in paths for module in modules_at(self._transformer, path)]
        self._shard_own = changing_arguments(self._transformer, shard_plan.inputs.get("", {}), self._shard)
        patches.hook(self._transformer.register_forward_pre_hook, self._begin, with_kwargs=True)
        patches.on_detach(hooks.remove)
        for path, arguments in shard_plan.inputs.items():  # the transformer's arguments are sharded in _begin
            hooks.before(path, arguments, self._shard)
        for path, arguments in shard_plan.gathered_inputs.items():
            hooks.before(path, arguments, self._gather_for_all)
        for path, outputs in shard_plan.outputs.items():
            hooks.after(path, outputs, self._shard)
        for path, spec in shard_plan.gathered.items():
            hooks.after(path, {0: spec}, self._gather)
        for path, early in shard_plan.gathered_early.items():
            hooks.after(path, early, self._gather_for_all)
        for path in shard_plan.whole:
            hooks.after(path, {0: None}, self._count_gradient_once)
        for attention in (*attentions, *to_video):
            hooks.claim(attention)
        hooks.follow()
        own_mask = self._architecture.own_mask
        for layer, attention in enumerate(attentions):
            if own_mask is not None and own_mask.processor is not None:
                patches.set_attribute(attention, "processor", own_mask.processor)
            intercept_attention(
                attention,
                functools.partial(self._attend, layer),
                patches,
                any_mask=self._architecture.padded_text,
                skipped_by=self._architecture.skipped_by,
                gate=gate_of(attention, self._session.config.mask),
            )
        if self._architecture.sizes is not None:
            patches.replace_forward(self._transformer, self._by_size)
        for attention in to_video:
            intercept_attention(attention, self._attend_to_video, patches, other_keys=True)

    def _reached(self) -> Collection[int]:
        """Returns the layers whose attention db-SP has computed in the current forward pass."""
        attention = self._now.attention
        session = attention.session if isinstance(attention, Sharing) else attention
        if session is None or session.passes.recomputing:  # recomputing a complete pass
            return range(self._session.layers)
        return session.end()

    @property
    def _now(self) -> _PassSharding:
        """Sharding of the current pass, or of the pass being recomputed."""
        sharding: _PassSharding | None = self._session.passes.now.sharding
        if sharding is None:
            raise RuntimeError("a part of the transformer was called outside its forward pass")
        return sharding

    @torch.compiler.disable
    def _begin(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Arguments:
        self._caches.look()
        self._hooks.follow()
        if torch.is_grad_enabled():
            self._checkpoints = self._checkpoints or Checkpoints(module, self._session.passes, self._patches)
            self._checkpoints.follow()
        if getattr(module, "_parallel_config", None) is not None:
            raise UserError(
                "enable_parallelism was called on a transformer that db-SP shards; load the transformer again, and "
                "enable db-SP alone"
            )
        if args and isinstance(args[0], PackedBatch):
            return (self._begin_packed(module, args[0]),), kwargs
        inputs, sizes = signature_of(module).bind(*args, **kwargs).arguments, self._architecture.sizes
        self._parts = [] if sizes is None else parts_by_size(sizes(inputs))
        if len(self._parts) < 2:
            return self._begin_video(module, args, kwargs)
        if names_of_caches(module, self._architecture.blocks_of(module)):
            raise UserError(
                "with a step cache, items of one batch must have equal sizes and prompt lengths; run them one "
                "by one, or disable the cache (transformer.disable_cache())"
            )
        return args, kwargs  # each part begins separately

    @torch.compiler.disable
    def _begin_video(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Arguments:
        """Begins a pass of videos of one size, and returns this rank's shards."""
        inputs = signature_of(module).bind(*args, **kwargs).arguments
        sequence = self._architecture.sequence(module, inputs)
        sequence.require_grid(self._session.config.mask)
        sample = next(iter(inputs.values()))  # latents, the first argument of all diffusers transformers
        device = (sample[0] if isinstance(sample, list) else sample).device
        layout = self._session.begin(
            sequence.video,
            timestep=self._step_of(module, sequence.timestep),
            device=device,
            cfg_branch=self._branch(),
            streams=self._architecture.text,
        )
        streams = self._streams_of(layout, sequence, device)
        self._session.passes.last.sharding = _PassSharding(self._session, streams)
        if self._architecture.own_mask is not None:
            args, kwargs = without_argument(module, args, kwargs, self._architecture.own_mask.argument)
        return self._shard_own(module, args, kwargs)

    def _by_size(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parts = self._parts
        if len(parts) < 2:
            return forward(*args, **kwargs)
        outputs = []
        for items in parts:
            own_args, own_kwargs = self._begin_part(items, sum(map(len, parts)), args, kwargs)
            outputs.append(forward(*own_args, **own_kwargs))
        return join_parts(outputs, parts)

    @torch.compiler.disable
    def _begin_part(self, items: tuple[int, ...], batch: int, args: Args, kwargs: Kwargs) -> Arguments:
        inputs = signature_of(self._transformer).bind(*args, **kwargs).arguments
        return self._begin_video(self._transformer, (), part_of(inputs, items, batch))

    def _begin_packed(self, module: nn.Module, batch: PackedBatch) -> PackedBatch:
        """Begins a packed pass, in this rank's bag or on all ranks."""
        session, videos = self._session, batch.videos
        step: dict[str, Any] = {"timestep": self._step_of(module, batch.timestep), "cfg_branch": self._branch()}
        streams = self._architecture.text
        if batch.bags is not None and batch.layer is not None:
            sharing = self._bags.begin(batch, batch.bags, batch.layer, streams, **step)
        else:
            layout = session.begin(*videos, device=batch.device, streams=streams, **step)
            text, grids = sum(video.text for video in videos), sum(video.grid_tokens for video in videos)
            first = {None: 0, "first": text, "last": grids}[streams]
            first = -(-first // session.group.size)  # streams are cut into equal shards
            sharing = Sharing(session.group, layout, layout.shard, first, session)
        if sharing.session is None:  # this rank's bag is empty
            session.passes.begin(torch.is_grad_enabled())
        session.passes.last.sharding = _PassSharding(sharing, None)
        return replace(batch, sharing=sharing)

    @torch.compiler.disable
    def _attend(self, layer: int, *qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        return self._now.attention.attend(layer, *qkv, **options)

    @torch.compiler.disable
    def _attend_to_video(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """Attends from replicated q [B, H, n, D] to k and v [B, H, shard, D] of the video's tokens."""
        here, scale = self._shards("video").tokens_here, q.shape[-1] ** -0.5 if scale is None else scale
        return attend_shared_keys(q, k[:, :, :here], v[:, :, :here], scale, self._session.group)

    def _step_of(self, module: nn.Module, timestep: torch.Tensor | float | None) -> torch.Tensor | float | None:
        """Returns the timestep that distinguishes denoising steps; None in training, where it is random."""
        if not (module.training and torch.is_grad_enabled()):
            return timestep
        if self._session.by_step:
            raise UserError(
                "masks or dense_schedule depend on the denoising step, but training draws timesteps at random; "
                "choose masks that don't, and leave dense_schedule.first_steps and last_steps at 0"
            )
        return None

    def _streams_of(self, layout: SequenceLayout, sequence: TokenSequence, device: torch.device) -> ShardsByStream:
        """Returns the shards of a sequence, cached for each layout that the session keeps."""
        if layout not in self._made:
            group, first = self._session.group, sequence.text
            self._made[layout] = {
                "text": StreamShards(layout, group, 0, first, device),
                "video": StreamShards(layout, group, first, layout.tokens, device),
            }
        streams = self._made[layout]
        if sequence.packed is None:
            return streams
        length = sequence.packed_length or len(sequence.packed)
        packed = PackedShards(streams["text"], streams["video"], sequence.packed.to(device), length)
        return {**streams, "packed": packed}

    def _shards(self, stream: str) -> Any:
        streams = self._now.streams
        if streams is None:
            raise RuntimeError("a packed pass has no shards of one video")
        return streams[stream]

    def _shard(self, value: Any, spec: ShardSpec) -> Any:
        """Returns this rank's shard of a tensor, or of each tensor in a list or mapping. torch.compile compiles it."""
        if self._now.streams is None:
            return value
        if isinstance(value, Mapping):
            return {name: self._shard(element, spec) for name, element in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._shard(element, spec) for element in value)
        if not isinstance(value, torch.Tensor) or spec.ndim not in (None, value.ndim):
            return value
        shards, dim = self._shards(spec.stream), spec.dim
        if spec.grid:
            return shards.take(value.flatten(dim, dim + 2), dim).unflatten(dim, (-1, 1, 1))
        if spec.after_text:
            text, video = value.tensor_split([value.shape[dim] - shards.tokens], dim)
            return torch.cat([text, shards.take(video, dim)], dim)
        if spec.stream == "text":
            value = value.narrow(dim, 0, min(shards.tokens, value.shape[dim]))
        return shards.take(value, dim)

    def _gather(self, value: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
        """Gathers all ranks' shards of an output. Collective."""
        if self._now.streams is None:
            return value
        return self._shards(spec.stream).gather(value, spec.dim)

    @torch.compiler.disable
    def _gather_for_all(self, value: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
        """Gathers a tensor for computation that is identical on all ranks; its gradient is summed over ranks."""
        return sum_gradient(self._gather(value, spec), self._session.group)

    @torch.compiler.disable
    def _count_gradient_once(self, output: torch.Tensor, _: None) -> torch.Tensor:
        return count_gradient_once(output, self._session.group)
