"""MiniMax H3."""

from __future__ import annotations

from typing import Any

import torch

from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import DerivedCuts
from dbsp_diffusers.models.token_sequence import Inputs, TokenSequence, read_once, require_position_grid

__all__ = ["ARCHITECTURES"]


def _minimax_h3(transformer: Any, inputs: Inputs) -> TokenSequence:
    """The generated video is the last run of the packed sequence's video rows; text, audio and what is given of
    images count as text. Its timestep rises from 0 to 1, another one for each kind of rows."""
    video, positions = inputs["video_indices"], inputs["position_ids"]

    def order(video: torch.Tensor) -> tuple[torch.Tensor, int]:
        rows = video.cpu()
        gaps = (rows.diff() != 1).nonzero()
        generated = rows if len(gaps) == 0 else rows[int(gaps[-1]) + 1 :]
        others = torch.ones(len(positions), dtype=torch.bool, device="cpu")
        others[generated] = False
        return torch.cat([others.nonzero().squeeze(1), generated]), len(generated)

    packed, tokens = read_once(video, order)
    text = len(packed) - tokens
    thw = read_once(
        positions, lambda rows: require_position_grid(rows[packed[text:].to(rows.device)], tokens, "position_ids")
    )
    timestep = inputs["timestep"][inputs["timestep_indices"][video[-1]]]
    return TokenSequence(thw, text, (1 - timestep).reshape(1), packed)


ARCHITECTURES = {
    "MiniMaxH3Transformer3DModel": Architecture(
        attention=("transformer_blocks.*.attn",),
        sequence=_minimax_h3,
        cuts=DerivedCuts(stream="packed"),
        text="first",
    ),
}
