"""Packed passes of models with text in self-attention's sequence: blocks of two streams, and blocks of both joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dbsp_diffusers.packed.modulation import modulated, scaled
from dbsp_diffusers.packed.placement import Placement
from dbsp_diffusers.packed.tokens import BlockForward, BlockPass, PackedCall, Packing
from dbsp_diffusers.packed_samples import SampleSpec, Size
from dbsp_kernels.exchange import to_device

__all__ = [
    "JointPass",
    "Rotary",
    "attention_of_streams",
    "double_block",
    "joint_packing",
    "joint_pass",
    "single_block",
    "stacked_conditions",
]

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [n, D]."""
Attend = Callable[[Any, torch.Tensor, torch.Tensor, Rotary], tuple[torch.Tensor, torch.Tensor]]
"""(attention module, video [1, v, C], text [1, t, C], rotary) -> the same tokens of video and of text, attended."""


class _Run(NamedTuple):
    """Tokens that one call of an attention module is given: all of this rank's, or those of one sequence.

    Attributes:
        video, text: Their places within their streams.
        rotary: Theirs.
    """

    video: slice
    text: slice
    rotary: Rotary


@dataclass(frozen=True, eq=False, repr=False)
class JointPass(BlockPass):
    """What blocks are given beside this rank's n tokens.

    Attributes:
        temb: float[R, C], the embedded conditions of the R sequences that are present.
        ids: int64[n], each token's row.
        here: Where each stream is.
        runs: What attends together.
    """

    temb: torch.Tensor
    ids: torch.Tensor
    here: Placement
    runs: Sequence[_Run]

    def attend(
        self, attention: Any, video: torch.Tensor, text: torch.Tensor, call: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The attended streams, from normalised ones."""
        found = [call(attention, video[:, run.video], text[:, run.text], run.rotary) for run in self.runs]
        if len(found) == 1:
            return found[0]
        videos, texts = zip(*found, strict=True)
        return torch.cat(videos, 1), torch.cat(texts, 1)

    def rows(self, norm: Any, count: int) -> tuple[torch.Tensor, ...]:
        """The modulations [R, C] that an adaptive norm makes for each sequence, in its order."""
        return norm.linear(norm.silu(self.temb)).chunk(count, 1)


def joint_pass(
    call: PackedCall,
    video: torch.Tensor,
    text: Callable[[int], torch.Tensor],
    temb: torch.Tensor,
    angles: Callable[[int], torch.Tensor],
    *,
    text_rotates: bool,
) -> tuple[torch.Tensor, JointPass]:
    """(this rank's tokens [1, n, C], what blocks are given).

    Args:
        video: [1, v, C], of this rank.
        text: Gives sequence s's embedded text, [1, m, C].
        temb: float[R, C] of the sequences that are present.
        angles: Gives sequence s's cosines and sines, [2, text and grid, D].
        text_rotates: Whether those of text are used.
    """
    here = call.here
    x = here.joined(here.by_token(text, 1, here.text).to(video.dtype), video, 1)
    rotary = here.by_token(angles, 1)
    of_text, of_video = rotary[:, here.text], rotary[:, here.video]

    def run(video: slice, text: slice) -> _Run:
        parts = of_video[:, video]
        cos, sin = (here.joined(of_text[:, text], parts, 1) if text_rotates else parts).unbind()
        return _Run(video, text, (cos, sin))

    if call.joint:
        runs = [run(slice(None), slice(None))]
    else:
        streams = zip(here.runs(here.video), here.runs(here.text), strict=True)
        runs = [run(slice(*one[1:]), slice(*other[1:])) for one, other in streams]
    ids = to_device(np.searchsorted(here.present, here.sequence), video.device)
    return x, JointPass(temb, ids, here, runs)


def stacked_conditions(call: PackedCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(timesteps [R], pooled text [R, p], guidance [R] or None) of the R sequences that are present."""
    given = [call.given[sequence] for sequence in call.here.present]
    pooled = torch.stack([one.pooled for one in given if one.pooled is not None])
    guidance = [one.guidance for one in given if one.guidance is not None]
    return torch.cat([one.timesteps for one in given]), pooled, torch.cat(guidance) if guidance else None


def attention_of_streams(
    attention: Any, video: torch.Tensor, text: torch.Tensor, rotary: Rotary
) -> tuple[torch.Tensor, torch.Tensor]:
    """An `Attend` for modules that are given the streams apart, and return them so."""
    attended: tuple[torch.Tensor, torch.Tensor] = attention(
        hidden_states=video, encoder_hidden_states=text, image_rotary_emb=rotary
    )
    return attended


def double_block(block: Any, x: torch.Tensor, given: JointPass) -> torch.Tensor:
    """A block whose streams have weights of their own, and attend together."""
    norms = (block.norm1, block.norm2, block.ff), (block.norm1_context, block.norm2_context, block.ff_context)
    places = given.here.video, given.here.text
    streams = [
        (x[:, part], given.ids[part], given.rows(norm, 6)) for part, (norm, *_) in zip(places, norms, strict=True)
    ]
    # 1. Attention over both.
    normed = [
        modulated(norm.norm(part), scale, shift, ids)
        for (part, ids, (shift, scale, *_)), (norm, *_) in zip(streams, norms, strict=True)
    ]
    attended = given.attend(block.attn, normed[0], normed[1], attention_of_streams)
    # 2. Feed-forward of each.
    found = []
    for (part, ids, rows), (_, norm, feed_forward), one in zip(streams, norms, attended, strict=True):
        _, _, gate, shift, scale, ff_gate = rows
        part = part + scaled(one, gate, ids)
        found.append(part + scaled(feed_forward(modulated(norm(part), scale, shift, ids)), ff_gate, ids))
    return given.here.joined(found[1], found[0], 1)


def single_block(block: Any, x: torch.Tensor, given: JointPass, call: Attend = attention_of_streams) -> torch.Tensor:
    """A block with the same weights for both streams, whose attention and feed-forward are side by side."""
    shift, scale, gate = given.rows(block.norm, 3)
    y = modulated(block.norm.norm(x), scale, shift, given.ids)
    video, text = given.attend(block.attn, y[:, given.here.video], y[:, given.here.text], call)
    both = torch.cat([given.here.joined(text, video, 1), block.act_mlp(block.proj_mlp(y))], 2)
    return x + scaled(block.proj_out(both), gate, given.ids)


def joint_output(transformer: Any, x: torch.Tensor, given: JointPass) -> torch.Tensor:
    """The values of this rank's tokens of video, [1, v, V]."""
    norm, video = transformer.norm_out, given.here.video
    x = x[:, video]
    scale, shift = norm.linear(norm.silu(given.temb).to(x.dtype)).chunk(2, 1)
    values: torch.Tensor = transformer.proj_out(modulated(norm.norm(x), scale, shift, given.ids[video]))
    return values


def from_patches(values: torch.Tensor, grid: Size, patch: Size) -> torch.Tensor:
    """[C, F, H, W] from one sequence's values [n, C · patch volume]."""
    apart = values.reshape(*grid, -1, *patch).permute(3, 0, 4, 1, 5, 2, 6)
    return apart.flatten(5, 6).flatten(3, 4).flatten(1, 2)


def joint_token_flops(transformer: Any) -> float:
    """Two for each weight that a token meets in a layer: of a double block those of its own stream, half of all.

    Norms' weights make modulations, once a sequence.
    """
    double, single = (
        sum(
            p.numel() for block in blocks for name, p in block.named_parameters() if p.ndim == 2 and _is_by_token(name)
        )
        for blocks in (transformer.transformer_blocks, transformer.single_transformer_blocks)
    )
    layers = len(transformer.transformer_blocks) + len(transformer.single_transformer_blocks)
    return (double + 2 * single) / layers


def joint_packing(
    spec: Callable[[Any], SampleSpec],
    embed: Callable[[Any, torch.Tensor], torch.Tensor],
    begin: Callable[[Any, torch.Tensor, PackedCall], tuple[torch.Tensor, JointPass]],
    double: BlockForward = double_block,
    single: BlockForward = single_block,
) -> Packing:
    """The packing of a model of blocks of two streams, then of both joined; see `Packing`."""

    def blocks(transformer: Any) -> list[tuple[nn.Module, BlockForward]]:
        of_both = (transformer.transformer_blocks, double), (transformer.single_transformer_blocks, single)
        return [(block, forward) for those, forward in of_both for block in those]

    return Packing(
        spec=spec,
        blocks=blocks,
        embedder="x_embedder",
        embed=embed,
        begin=begin,
        output=joint_output,
        unpatchified=from_patches,
        token_flops=joint_token_flops,
    )


def _is_by_token(name: str) -> bool:
    return not name.startswith("norm")
