"""Block-sparse attention in one process, without plans, routes or kernels: what parallel runs must equal."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dbsp_core.config import ConfigLike
from dbsp_core.layout.sequence_layout import Streams
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.steps import StepClock
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.sources import LocalQK
from dbsp_diffusers.models import TokenSequence, architecture_of, heads_of
from dbsp_diffusers.models.gates import branch_layer, branch_layers_in_checkpoint, gate_of
from dbsp_diffusers.patching import Arguments, PatchSet, current_cfg_pass, signature_of, without_argument
from dbsp_diffusers.resolve import resolve_config
from dbsp_diffusers.sharding.attention import intercept_attention


def attach_single_process(
    transformer: Any,
    config: ConfigLike = None,
    steps: Callable[[], int | None] = lambda: None,
    clock: StepClock | None = None,
) -> PatchSet:
    """Makes the self-attention of a stock diffusers transformer block-sparse, by a dense token mask.

    Meant for comparison: it costs as much as dense attention, and more memory. Undone by the result's `detach`.

    Args:
        config: A `DbspConfig`, a mapping, the path of a YAML file, or None for the settings shipped for the
            transformer's checkpoint, dense where none are shipped: as in the frameworks.
        steps: Returns the number of denoising steps, for dense_schedule.last_steps.
        clock: The counter of steps, which transformers that take turns share.
    """
    architecture = architecture_of(transformer)
    config = resolve_config(config, transformer)
    attentions = architecture.attentions_of(transformer)
    heads, own = heads_of(attentions[0]), architecture.own_mask
    provider = MaskProvider(
        config.mask, config.dense_schedule, heads, len(attentions), steps, clock=clock or StepClock()
    )
    layers, patches = branch_layers_in_checkpoint(transformer, config.mask), PatchSet()
    branch = current_cfg_pass(transformer, patches)
    cache: dict[Hashable, BlockMask] = {}
    sequence = TokenSequence((0, 0, 0))

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        nonlocal sequence
        sequence = architecture.sequence(module, signature_of(module).bind(*args, **kwargs).arguments)
        sequence.require_grid(config.mask)
        provider.begin([sequence.video], sequence.timestep, branch())
        cache.clear()
        return (args, kwargs) if own is None else without_argument(module, args, kwargs, own.argument)

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layer: int,
        scale: float | None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends in token order; padding of text, which a stock model would mask, gives zeros."""
        slots = slots_of(sequence, q.shape[2], architecture.text).to(q.device)
        key, (qs, ks, vs) = provider.cache_key(layer), (x.index_select(2, slots) for x in (q, k, v))
        mask = None if key is None else cache.get(key)
        if mask is None:
            gates = gate if gate is None or gate.ndim == 2 else gate.index_select(2, slots)
            mask = provider.mask(layer, LocalQK.alone(qs, ks, scale, vs, gates))
        if key is not None:
            cache[key] = mask
        return torch.zeros_like(q).index_copy_(2, slots, masked_attention(qs, ks, vs, mask, scale))

    patches.hook(transformer.register_forward_pre_hook, begin, with_kwargs=True)
    for attention, module in layers.items():
        patches.add_module(attention, branch_layer(config.mask), module)
    for layer, attention in enumerate(attentions):
        if own is not None and own.processor is not None:
            patches.set_attribute(attention, "processor", own.processor)
        intercept_attention(
            attention,
            functools.partial(attend, layer=layer),
            patches,
            any_mask=architecture.padded_text,
            skipped_by=architecture.skipped_by,
            gate=gate_of(attention, config.mask),
        )
    return patches


def slots_of(sequence: TokenSequence, attended: int, streams: Streams) -> torch.Tensor:
    """Returns int64[tokens]: slot of each token, text first, among all that a stock model attends over.

    attended: number of tokens of its attention, with text's padding at the end of text
    """
    if sequence.packed is not None:
        return sequence.packed
    count = sequence.video.grid_tokens
    text, video = torch.arange(sequence.text, device="cpu"), torch.arange(count, device="cpu")
    return torch.cat([text + count, video] if streams == "last" else [text, video + attended - count])


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float | None = None
) -> torch.Tensor:
    """Computes torch's attention under the mask of `token_mask`. Empty rows give zeros.

    Args:
        q, k, v: [B, H, tokens, D].
        mask: A mask of H heads, or of B·H where each item has masks of its own.
    """
    allowed = token_mask(mask).to(q.device)
    if mask.heads != q.shape[1]:
        allowed = allowed.unflatten(0, q.shape[:2])
    seen: torch.Tensor = allowed
    if mask.absent is not None:  # one more key, of zero value, whose score the row gives
        scores = absent_by_token(mask).to(q.device).unflatten(0, allowed.shape[:-2])
        seen = torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, -torch.inf)
        seen = torch.cat([seen, scores[..., None].to(q.dtype)], dim=-1)
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    out = out.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)
    if mask.branch is not None:
        mask.branch.add_to(out)
    return out


def absent_by_token(mask: BlockMask) -> torch.Tensor:
    """Returns float32[H, tokens] by canonical position: a mask's absent keys of each token's row."""
    assert mask.absent is not None
    block, scores = torch.from_numpy(mask.grid.q_axis.block_of), torch.empty(mask.heads, mask.grid.tokens)
    for order, heads in mask.grid.order_groups(mask.heads):
        scores[heads] = mask.absent.cpu()[heads][:, block[np.argsort(mask.grid.token_permutation(order))]]
    return scores


def token_mask(mask: BlockMask) -> torch.Tensor:
    """Returns bool[H, tokens, tokens] by canonical position: each block's bit for all of its tokens."""
    grid = mask.grid
    q_block, k_block = (torch.from_numpy(axis.block_of) for axis in (grid.q_axis, grid.k_axis))
    allowed = torch.empty(mask.heads, grid.tokens, grid.tokens, dtype=torch.bool, device=mask.bits.device)
    for order, heads in grid.order_groups(mask.heads):
        slot = torch.from_numpy(np.argsort(grid.token_permutation(order)))  # of each token
        rows, columns = q_block[slot].to(mask.bits.device), k_block[slot].to(mask.bits.device)
        allowed[heads] = mask.square(heads)[:, rows][:, :, columns]
    return allowed
