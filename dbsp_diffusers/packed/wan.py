"""Wan's packed pass, with diffusers' modules and modulation per sequence; text is not in self-attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dbsp_diffusers.packed.passes import BlockPass, PackedCall, Packing, modulated, scaled
from dbsp_diffusers.packed.samples import SampleSpec, Size
from dbsp_kernels.segments import to_device


def _spec(config: Any) -> SampleSpec:
    patch: Size = tuple(config.patch_size)
    return SampleSpec(config.in_channels, patch, config.text_dim, config.image_dim, token_timesteps=True)


def _token_flops(transformer: Any) -> float:
    """Counts two FLOP per weight of a block, neglecting that some weights are for text."""
    return 2 * sum(p.numel() for p in transformer.blocks.parameters() if p.ndim == 2) / len(transformer.blocks)


@dataclass(frozen=True, eq=False, repr=False)
class _Pass(BlockPass):
    """Inputs of blocks besides this rank's n tokens."""

    temb: torch.Tensor  # float[R, C], time embeddings of the rows
    rows: torch.Tensor  # float[R, 6, C], modulations: one row per sequence, or one per timestep of a sequence
    ids: torch.Tensor  # int64[n], row of each token
    prompts: Sequence[torch.Tensor]  # float[1, m, C] each, text (and image) of the present sequences
    runs: Sequence[tuple[int, int, int]]  # (index in `prompts`, first token, end token) of one sequence's tokens
    rotary: tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [1, n, 1, D]


def _embedded(transformer: Any, latents: torch.Tensor) -> torch.Tensor:
    return transformer.patch_embedding(latents[None]).flatten(2).transpose(1, 2)


def _begin(transformer: Any, x: torch.Tensor, call: PackedCall) -> tuple[torch.Tensor, _Pass]:
    embedded, modulations, prompts, here = [], [], [], call.here
    ids, first = torch.empty(len(here.sequence), dtype=torch.int64, device=x.device), 0
    for sequence in here.present:
        condition = call.conditions[sequence]
        times, row = condition.timesteps, None
        if len(times) > 1 and times.stride(0) == 0:  # one timestep, expanded to all tokens
            times = times[:1]
        elif len(times) > 1:
            times, row = times.unique(return_inverse=True)
        image = None if condition.image is None else condition.image[None]
        temb, modulation, text, image = transformer.condition_embedder(times, condition.text[None], image)
        embedded.append(temb)
        modulations.append(modulation.unflatten(1, (6, -1)))
        prompts.append(text if image is None else torch.cat([image, text], 1))
        slots = np.flatnonzero(here.sequence == sequence)
        of_tokens = to_device(here.position[slots], x.device)
        of_tokens = torch.zeros_like(of_tokens) if row is None else row.index_select(0, of_tokens)
        ids.index_copy_(0, to_device(slots, x.device), of_tokens + first)
        first += len(times)

    def angles(sequence: int) -> torch.Tensor:
        """Returns [1, tokens, 2, D]: cosines and sines."""
        shaped = torch.empty(1, 1, *call.sizes[sequence], device="meta")  # only its shape is read
        return torch.cat(transformer.rope(shaped), 2)

    rotary = here.by_token(angles, 1)
    cos, sin = rotary.split(1, 2)
    return x, _Pass(torch.cat(embedded), torch.cat(modulations), ids, prompts, here.runs(), (cos, sin))


def _output(transformer: Any, x: torch.Tensor, here: _Pass) -> torch.Tensor:
    shift, scale = (transformer.scale_shift_table + here.temb.unsqueeze(1)).unbind(1)
    return transformer.proj_out(modulated(transformer.norm_out(x.float()), scale, shift, here.ids).type_as(x))


def _block(block: Any, x: torch.Tensor, here: _Pass) -> torch.Tensor:
    """Runs one block on tokens [1, n, C] of several sequences, in float32 where its own forward is."""
    # 1. Modulations of this block, [R, C] each
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (block.scale_shift_table + here.rows.float()).unbind(1)
    # 2. Self-attention within each sequence
    y = modulated(block.norm1(x.float()), scale, shift, here.ids).type_as(x)
    y = block.attn1(y, None, None, here.rotary)
    x = (x.float() + scaled(y, gate, here.ids)).type_as(x)
    # 3. Cross-attention of each sequence to its prompt
    y = block.norm2(x.float()).type_as(x)
    runs = [block.attn2(y[:, first:end], here.prompts[index], None, None) for index, first, end in here.runs]
    x = x + torch.cat(runs, 1)
    # 4. Feed-forward
    y = modulated(block.norm3(x.float()), ffn_scale, ffn_shift, here.ids).type_as(x)
    return (x.float() + scaled(block.ffn(y).float(), ffn_gate, here.ids)).type_as(x)


def _unpatchified(tokens: torch.Tensor, grid: Size, patch: Size) -> torch.Tensor:
    """Returns [C, F, H, W] from one sequence's tokens [n, patch volume · C]."""
    apart = tokens.reshape(*grid, *patch, -1).permute(6, 0, 3, 1, 4, 2, 5)
    return apart.flatten(5, 6).flatten(3, 4).flatten(1, 2)


WAN = Packing(
    spec=_spec,
    blocks=lambda transformer: [(block, _block) for block in transformer.blocks],
    embedder="patch_embedding",
    embed=_embedded,
    begin=_begin,
    output=_output,
    unpatchified=_unpatchified,
    token_flops=_token_flops,
)
