"""Sharding a stock diffusers transformer over ranks, its self-attention dual-balanced, by hooks that can be undone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.architectures import architecture_of
from dbsp_diffusers.batch_parallel import BatchSplit
from dbsp_diffusers.caching import ForwardRanks, StepCaches
from dbsp_diffusers.patching import PatchSet, guidance_branch, intercept_self_attention, signature_of
from dbsp_diffusers.stream_shards import StreamShards

__all__ = ["shard_transformer"]

_ALONE = SequenceGroup(0, 1)


def shard_transformer(
    transformer: nn.Module, session: AttentionSession, patches: PatchSet, batch: SequenceGroup | BatchSplit = _ALONE
) -> ForwardRanks:
    """Shards the sequence over the session's ranks between the embedding of its patches and their projection.

    batch: what `split_batch` returned, where a batch is split
    returns: the ranks that run a forward pass together
    Every rank is given the whole input and returns the whole output. Text, where it is in the sequence, is a stream of
    its own, sharded like video. Step caches, put on the transformer before or after, skip what they would skip in one
    process. Raises UserError for a transformer that db-SP does not know or cannot shard.
    """
    sharding = _SequenceSharding(transformer, session, batch)
    sharding.attach(patches)
    return sharding.together


class _SequenceSharding:
    """The hooks on one transformer."""

    def __init__(self, transformer: nn.Module, session: AttentionSession, batch: SequenceGroup | BatchSplit) -> None:
        self.together = ForwardRanks((session.group, batch), self)
        self._transformer = transformer
        self._architecture = architecture_of(transformer)
        self._session = session
        self._video: StreamShards | None = None
        self._text: StreamShards | None = None
        blocks = list(self._architecture.blocks_of(transformer))
        self._caches = StepCaches(transformer, blocks, self.together, shared_batch=batch.size > 1)

    def attach(self, patches: PatchSet) -> None:
        module = self._transformer.get_submodule
        blocks = self._architecture.blocks_of(self._transformer)
        self._caches.look()
        patches.on_detach(self._caches.release)
        self._branch = guidance_branch(self._transformer, patches)
        patches.hook(self._transformer.register_forward_pre_hook, self._begin, with_kwargs=True)
        # Video is sharded before the blocks, not at the first: what wraps the blocks as a whole, as first-block cache
        # does, then sees only shards. Text only there, as the embedding's output is cut by the length of all text.
        patches.hook(module(self._architecture.embedding).register_forward_hook, self._shard_embedded)
        if self._architecture.joint_text:
            _rewrite_input(blocks[0], "encoder_hidden_states", self._take_text, patches)
            for block in blocks:
                _rewrite_input(block, "image_rotary_emb", self._take_rotary, patches)
        else:
            patches.hook(module("rope").register_forward_hook, self._shard_rope)
        for layer, block in enumerate(blocks):
            attend = functools.partial(self._session.attend, layer)
            intercept_self_attention(block.get_submodule("attn1"), attend, patches)
        patches.hook(module("proj_out").register_forward_hook, self._gather)

    @property
    def video(self) -> StreamShards:
        """How the video of the current forward pass is sharded."""
        return _require(self._video)

    @torch.compiler.disable
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._caches.look()
        inputs = signature_of(module).bind(*args, **kwargs).arguments
        timestep = inputs.get("timestep")
        if isinstance(timestep, torch.Tensor) and timestep.ndim > 1:
            raise UserError("db-SP does not know models with a timestep for each frame or token (as Wan2.2-TI2V-5B)")
        thw, text_tokens = self._architecture.token_grid(module, inputs)
        device = inputs["hidden_states"].device
        layout = self._session.begin(thw, text_tokens, timestep, device, cfg_branch=self._branch())
        self._text = StreamShards(layout, self._session.group, 0, text_tokens)
        self._video = StreamShards(layout, self._session.group, text_tokens, layout.tokens)

    @torch.compiler.disable
    def _shard_embedded(self, module: nn.Module, args: tuple[Any, ...], embedded: torch.Tensor) -> torch.Tensor:
        """embedded: [B, C, t, h, w], or [B, text and video tokens, C] with text left as it is."""
        if embedded.ndim == 5:
            return self.video.take(embedded.flatten(2), dim=2)[..., None, None]
        text, video = embedded.split([_require(self._text).tokens, self.video.tokens], dim=1)
        return torch.cat([text, self.video.take(video, dim=1)], dim=1)

    @torch.compiler.disable
    def _take_text(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _require(self._text).take(hidden_states, dim=1)

    @torch.compiler.disable
    def _take_rotary(self, tables: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...] | None:
        """tables: cosines and sines, [video tokens, D] each, or None for a model without."""
        return None if tables is None else tuple(self.video.take(table, dim=0) for table in tables)

    @torch.compiler.disable
    def _shard_rope(
        self, module: nn.Module, args: tuple[Any, ...], tables: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """tables: cosines and sines, [1, video tokens, 1, D] each."""
        return tuple(self.video.take(table, dim=1) for table in tables)

    @torch.compiler.disable
    def _gather(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return self.video.gather(output, dim=1)


def _require(shards: StreamShards | None) -> StreamShards:
    if shards is None:
        raise RuntimeError("a part of the transformer was called outside its forward pass")
    return shards


def _rewrite_input(module: nn.Module, name: str, function: Callable[[Any], Any], patches: PatchSet) -> None:
    """Passes one argument of a module's forward through a function."""
    signature = signature_of(module)

    def rewrite(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = signature.bind(*args, **kwargs)
        call.arguments[name] = function(call.arguments.get(name))
        return call.args, call.kwargs

    patches.hook(module.register_forward_pre_hook, rewrite, with_kwargs=True)
