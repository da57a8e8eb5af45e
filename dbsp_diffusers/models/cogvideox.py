"""CogVideoX, and what is built like it: ConsisID, EasyAnimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import OUTPUT, Cut, Cuts
from dbsp_diffusers.models.token_sequence import Inputs, TokenSequence, sample_grid, timestep_of

__all__ = ["ARCHITECTURES"]


def _cogvideox(transformer: Any, inputs: Inputs) -> TokenSequence:
    text = inputs["encoder_hidden_states"].shape[1]
    return TokenSequence(sample_grid(transformer, inputs, frames_dim=1), text, timestep_of(inputs))


def _easyanimate(transformer: Any, inputs: Inputs) -> TokenSequence:
    texts = (inputs.get(name) for name in ("encoder_hidden_states", "encoder_hidden_states_t5"))
    text = sum(one.shape[1] for one in texts if one is not None)
    return TokenSequence(sample_grid(transformer, inputs), text, timestep_of(inputs))


_CUTS = Cuts(
    inputs={
        "": {"image_rotary_emb": Cut("video", 0)},
        # Only there, as the embedding's output is cut by the length of all text.
        "transformer_blocks.0": {"encoder_hidden_states": Cut("text", 1)},
    },
    outputs={"patch_embed": {0: Cut("video", 1, after_text=True)}},
    gathered=OUTPUT,
)
_COGVIDEOX = Architecture(
    attention=("transformer_blocks.*.attn1",),
    sequence=_cogvideox,
    cuts=_CUTS,
    text="first",
)

ARCHITECTURES = {
    "CogVideoXTransformer3DModel": replace(_COGVIDEOX, pipeline="CogVideoXPipeline", guidance="batch"),
    "ConsisIDTransformer3DModel": replace(
        _COGVIDEOX,
        # There, as text is then cut off by the length of all of it.
        cuts=replace(
            _CUTS,
            gathered={},
            gathered_early={"transformer_blocks.-1": {0: Cut("video", 1), 1: Cut("text", 1)}},
            whole=("proj_out",),
        ),
    ),
    "EasyAnimateTransformer3DModel": replace(
        _COGVIDEOX,
        sequence=_easyanimate,
        cuts=Cuts(
            inputs={
                "transformer_blocks.0": {"hidden_states": Cut("video", 1), "encoder_hidden_states": Cut("text", 1)}
            },
            outputs={"rope_embedding": {0: Cut("video", 0), 1: Cut("video", 0)}},
            gathered=OUTPUT,
        ),
    ),
}
