"""db-SP in xfuser's Wan transformer, which cuts the sequence into equal shards itself."""

from __future__ import annotations

import functools
from typing import Any

import torch

from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.architectures import architecture_of
from dbsp_diffusers.caching import refuse_step_caches
from dbsp_diffusers.patching import PatchSet, guidance_branch, signature_of

__all__ = ["attach_wan"]


def attach_wan(transformer: Any, session: AttentionSession, patches: PatchSet) -> None:
    """Replaces xfuser's USP by db-SP, and shards the sequence in the order that the configuration asks for.

    transformer: an xFuserWanTransformer3DWrapper
    Raises UserError when its self-attention is not xfuser's.
    """
    branch, layers = guidance_branch(transformer, patches), len(transformer.blocks)

    @torch.compiler.disable
    def begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_step_caches(module, module.blocks)
        inputs = signature_of(module).bind(*args, **kwargs).arguments
        sequence = architecture_of(module).sequence(module, inputs)
        session.begin(sequence.thw, 0, sequence.timestep, inputs["hidden_states"].device, cfg_branch=branch())

    @torch.compiler.disable
    def end(module: Any, args: tuple[Any, ...], output: Any) -> None:
        missed = layers - session.end()
        if missed:
            raise RuntimeError(
                f"{missed} of {layers} self-attentions did not reach db-SP; something replaced their processors"
            )

    patches.hook(transformer.register_forward_pre_hook, begin, with_kwargs=True)
    for layer, block in enumerate(transformer.blocks):
        processor = block.attn1.processor
        if "attention_function" not in vars(processor):
            raise UserError(
                f"self-attention of layer {layer} is computed by a {type(processor).__name__}, which is not xfuser's; "
                "load the transformer again"
            )
        patches.set_attribute(processor, "attention_function", functools.partial(_attend, session, layer))
    strategy = session.strategy
    if session.config.effective_layout != "contiguous" and (strategy is None or strategy.ring > 1):
        _permute_sequence(transformer, session, patches)  # with Ulysses only, the order does not matter
    patches.hook(transformer.register_forward_hook, end)


def _attend(
    session: AttentionSession, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> torch.Tensor:
    """query, key, value: [B, H, shard, D]; xfuser's options choose among backends that are not used here."""
    return session.attend(layer, query, key, value)


def _permute_sequence(transformer: Any, session: AttentionSession, patches: PatchSet) -> None:
    """Puts tokens and rotary table in the layout's order before the blocks, and the output back in token order.

    xfuser cuts the sequence into equal shards itself, so only the order is ours to choose.
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
    def restore(module: Any, args: tuple[Any, ...], output: Any) -> Any:
        sample = output[0]
        tokens = patch_tokens(sample, patch)
        restored = torch.empty_like(tokens)
        restored[:, order(tokens.device)] = tokens
        sample = unpatch_tokens(restored, sample, patch)
        return (sample,) if isinstance(output, tuple) else type(output)(sample=sample)

    patches.hook(transformer.patch_embedding.register_forward_hook, permute_tokens)
    patches.hook(transformer.rope.register_forward_hook, permute_rope)
    patches.hook(transformer.register_forward_hook, restore)


def patch_tokens(sample: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """[B, C, F, H, W] → [B, tokens, C·patch], tokens in (t, h, w) order."""
    frames, height, width = patch
    batch, channels, f, h, w = sample.shape
    blocks = sample.reshape(batch, channels, f // frames, frames, h // height, height, w // width, width)
    return blocks.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, -1, channels * frames * height * width)


def unpatch_tokens(tokens: torch.Tensor, like: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """The inverse of `patch_tokens`, to the shape of `like`."""
    batch, channels = like.shape[:2]
    counts = [size // p for size, p in zip(like.shape[2:], patch, strict=True)]
    blocks = tokens.reshape(batch, *counts, channels, *patch)
    return blocks.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(like.shape)
