"""db-SP in xfuser's Wan and VACE transformers, which cut the sequence into equal shards themselves."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from dbsp_core.runtime.session.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models import architecture_of
from dbsp_diffusers.models.gates import gate_by_head, gate_of
from dbsp_diffusers.patching import PatchSet, guidance_branch, signature_of
from dbsp_diffusers.sharding.step_caches import ForwardRanks, StepCaches
from dbsp_diffusers.sharding.stream_shards import StreamShards

__all__ = ["attach_wan"]


def attach_wan(transformer: Any, session: AttentionSession, patches: PatchSet) -> None:
    """Replaces xfuser's USP by db-SP, and shards the sequence in the order that the configuration asks for.

    Args:
        transformer: An xFuserWanTransformer3DWrapper or xFuserWanVACETransformer3DWrapper.

    Raises:
        UserError: Its self-attention is not xfuser's.
    """
    architecture = architecture_of(transformer)
    attentions, blocks = architecture.attentions_of(transformer), architecture.blocks_of(transformer)
    branch = guidance_branch(transformer, patches)
    caches = StepCaches(transformer, blocks, ForwardRanks(session.group, _Sharding(session)))
    caches.look()
    patches.on_detach(caches.release)

    @torch.compiler.disable
    def begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caches.look()
        inputs = signature_of(module).bind(*args, **kwargs).arguments
        sequence = architecture.sequence(module, inputs)
        device = inputs["hidden_states"].device
        session.begin(sequence.video, timestep=sequence.timestep, device=device, cfg_branch=branch())

    patches.hook(transformer.register_forward_pre_hook, begin, with_kwargs=True)
    for layer, attention in enumerate(attentions):
        processor: Any = attention.processor
        if "attention_function" not in vars(processor):
            raise UserError(
                f"self-attention of layer {layer} is computed by a {type(processor).__name__}, which is not xfuser's; "
                "load the transformer again"
            )
        attend, gate = functools.partial(_attend, session, layer), gate_of(attention, session.config.mask)
        if gate is None:
            patches.set_attribute(processor, "attention_function", attend)
        else:
            patches.set_attribute(attention, "processor", _gated(processor, attend, gate))
    strategy = session.strategy
    if session.config.effective_layout != "contiguous" and (strategy is None or strategy.ring > 1):
        _permute_sequence(transformer, session, patches)  # with Ulysses only, the order does not matter


class _Sharding:
    """The way that xfuser shards the video of the current forward pass, for step caches."""

    def __init__(self, session: AttentionSession) -> None:
        self._session = session

    @property
    def video(self) -> StreamShards:
        layout = self._session.layout
        return StreamShards(layout, self._session.group, 0, layout.tokens)

    def reached(self) -> Collection[int]:
        return self._session.end()


def _attend(
    session: AttentionSession,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attends to [B, H, shard, D]; ignores xfuser's options, which choose among backends that are not used.

    `gate` is [B, shard, H · D].
    """
    by_head = None if gate is None else gate_by_head(gate, query)
    return session.attend(layer, query, key, value, gate=by_head)


def _gated(processor: Any, attend: Callable[..., torch.Tensor], gate: nn.Module) -> Callable[..., torch.Tensor]:
    """A processor like xfuser's, whose attention is also given the gate of its hidden states [B, shard, C]."""

    def process(attention: nn.Module, hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        own = copy.copy(processor)  # which is given nothing but its own call's gate
        own.attention_function = functools.partial(attend, gate=gate(hidden_states))
        out: torch.Tensor = own(attention, hidden_states, *others, **named)
        return out

    return process


def _permute_sequence(transformer: Any, session: AttentionSession, patches: PatchSet) -> None:
    """Puts tokens and rotary table in the layout's order before the blocks, and the output back in token order.

    xfuser cuts the sequence into equal shards itself, so db-SP chooses only the order.
    """
    patch = transformer.config.patch_size

    def order(device: torch.device) -> torch.Tensor:
        return torch.from_numpy(session.layout.order).to(device)

    @torch.compiler.disable
    def permute_tokens(module: Any, args: tuple[Any, ...], embedded: torch.Tensor) -> torch.Tensor:
        return embedded.flatten(2)[:, :, order(embedded.device)].view_as(embedded)

    @torch.compiler.disable
    def permute_rope(module: Any, args: tuple[Any, ...], tables: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(table[:, order(table.device)] for table in tables)

    @torch.compiler.disable
    def permute_timesteps(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        inputs = signature_of(module).bind(*args, **kwargs).arguments
        timestep = inputs["timestep"]
        if timestep.ndim < 2:
            return None
        return (), inputs | {"timestep": timestep[:, order(timestep.device)]}  # of each token

    @torch.compiler.disable
    def restore(module: Any, args: tuple[Any, ...], output: Any) -> Any:
        sample = output[0]
        tokens = patch_tokens(sample, patch)
        restored = torch.empty_like(tokens)
        restored[:, order(tokens.device)] = tokens
        sample = unpatch_tokens(restored, sample, patch)
        return (sample,) if isinstance(output, tuple) else type(output)(sample=sample)

    patches.hook(transformer.register_forward_pre_hook, permute_timesteps, with_kwargs=True)
    patches.hook(transformer.patch_embedding.register_forward_hook, permute_tokens)
    if hasattr(transformer, "vace_patch_embedding"):
        patches.hook(transformer.vace_patch_embedding.register_forward_hook, permute_tokens)
    patches.hook(transformer.rope.register_forward_hook, permute_rope)
    patches.hook(transformer.register_forward_hook, restore)


def patch_tokens(sample: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """[B, C, F, H, W] → [B, tokens, C·patch], tokens in (t, h, w) order."""
    frames, height, width = patch
    batch, channels, f, h, w = sample.shape
    blocks = sample.reshape(batch, channels, f // frames, frames, h // height, height, w // width, width)
    return blocks.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, -1, channels * frames * height * width)


def unpatch_tokens(tokens: torch.Tensor, like: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """Inverts `patch_tokens`, to the shape of `like`."""
    batch, channels = like.shape[:2]
    counts = [size // p for size, p in zip(like.shape[2:], patch, strict=True)]
    blocks = tokens.reshape(batch, *counts, channels, *patch)
    return blocks.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(like.shape)
