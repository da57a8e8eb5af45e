"""LTX-Video."""

from __future__ import annotations

from typing import Any

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import Cut, Cuts, DerivedCuts
from dbsp_diffusers.models.token_sequence import Inputs, TokenSequence, read_once, require_position_grid, timestep_of

__all__ = ["ARCHITECTURES"]


def _ltx(transformer: Any, inputs: Inputs) -> TokenSequence:
    tokens = inputs["hidden_states"].shape[1]
    coordinates = inputs.get("video_coords")
    if coordinates is not None:
        thw = read_once(coordinates, lambda rows: require_position_grid(rows[0].T, tokens, "video_coords"))
    else:
        frames, height, width = (int(inputs.get(name) or 0) for name in ("num_frames", "height", "width"))
        thw = (frames, height, width)
        if frames * height * width != tokens:
            raise UserError(f"num_frames, height and width must make the {tokens} tokens of hidden_states, got {thw}")
    return TokenSequence(thw, timestep=timestep_of(inputs))


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
}
