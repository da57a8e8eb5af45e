"""CogVideoX."""

from __future__ import annotations

from typing import Any

from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import OUTPUT, Cut, Cuts
from dbsp_diffusers.models.token_sequence import Inputs, TokenSequence, sample_grid, timestep_of

__all__ = ["ARCHITECTURES"]


def _cogvideox(transformer: Any, inputs: Inputs) -> TokenSequence:
    text = inputs["encoder_hidden_states"].shape[1]
    return TokenSequence(sample_grid(transformer, inputs, frames_dim=1), text, timestep_of(inputs))


ARCHITECTURES = {
    "CogVideoXTransformer3DModel": Architecture(
        attention=("transformer_blocks.*.attn1",),
        sequence=_cogvideox,
        cuts=Cuts(
            inputs={
                "": {"image_rotary_emb": Cut("video", 0)},
                # Only there, as the embedding's output is cut by the length of all text.
                "transformer_blocks.0": {"encoder_hidden_states": Cut("text", 1)},
            },
            outputs={"patch_embed": {0: Cut("video", 1, after_text=True)}},
            gathered=OUTPUT,
        ),
        text="first",
        pipeline="CogVideoXPipeline",
    ),
}
