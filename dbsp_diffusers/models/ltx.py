"""LTX-Video, and LTX-2 with audio."""

from __future__ import annotations

from typing import Any

import torch

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import OUTPUT, Cut, Cuts, DerivedCuts
from dbsp_diffusers.models.token_sequence import (
    Inputs,
    TokenSequence,
    no_grid,
    position_grid,
    read_once,
    refuse_arguments,
    timestep_of,
)

__all__ = ["ARCHITECTURES"]


def _ltx(transformer: Any, inputs: Inputs) -> TokenSequence:
    tokens, coordinates = inputs["hidden_states"].shape[1], inputs.get("video_coords")
    if coordinates is not None:
        thw = read_once(coordinates, lambda rows: position_grid(_starts(rows[0]), tokens))
        problem = no_grid("video_coords") if thw is None else None
        return TokenSequence(thw or (1, 1, tokens), timestep=timestep_of(inputs), no_grid=problem)
    frames, height, width = (int(inputs.get(name) or 0) for name in ("num_frames", "height", "width"))
    if frames * height * width != tokens:
        raise UserError(
            f"num_frames, height and width must make the {tokens} tokens of hidden_states, got "
            f"{(frames, height, width)}"
        )
    return TokenSequence((frames, height, width), timestep=timestep_of(inputs))


def _starts(coordinates: torch.Tensor) -> torch.Tensor:
    """Positions [tokens, 3] of [3, tokens], or of [3, tokens, 2] where each token starts and ends."""
    return (coordinates if coordinates.ndim == 2 else coordinates[..., 0]).T


def _ltx2(transformer: Any, inputs: Inputs) -> TokenSequence:
    refuse_arguments(inputs, "video_self_attention_mask")
    return _ltx(transformer, inputs)


_ROPE = {0: Cut("video", -2), 1: Cut("video", -2)}
"""[B, tokens, D], or with rope_type "split" [B, H, tokens, D/2]."""

ARCHITECTURES = {
    "LTXVideoTransformer3DModel": Architecture(
        attention=("transformer_blocks.*.attn1",),
        sequence=_ltx,
        # Cross-attention looks at all of the text.
        cuts=DerivedCuts(
            {"encoder_hidden_states": None, "encoder_attention_mask": None},
            more=Cuts({"": {"timestep": Cut("video", 1, ndim=2)}}),
        ),
    ),
    # Not by its _cp_plan, which leaves out what audio's attention needs, and the tables of one of two rope types.
    "LTX2VideoTransformer3DModel": Architecture(
        attention=("transformer_blocks.*.attn1",),
        sequence=_ltx2,
        cuts=Cuts(
            inputs={
                "": {
                    "hidden_states": Cut("video", 1),
                    "timestep": Cut("video", 1, ndim=2),
                    "video_keyframes_mask": Cut("video", 1),
                }
            },
            outputs={"rope": _ROPE, "cross_attn_rope": _ROPE},
            gathered=OUTPUT,
            whole=("audio_proj_out",),
        ),
        attention_to_video=("transformer_blocks.*.video_to_audio_attn",),
        skipped_by="all_perturbed",
        skipped=lambda inputs: inputs.get("spatio_temporal_guidance_blocks") or (),
    ),
}
