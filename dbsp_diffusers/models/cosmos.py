"""Cosmos, versions 1, 2 and 2.5."""

from __future__ import annotations

from typing import Any

from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import OUTPUT, Cut, Cuts
from dbsp_diffusers.models.token_sequence import Inputs, TokenSequence, refuse_arguments, sample_grid, timestep_of

__all__ = ["ARCHITECTURES"]


def _cosmos(transformer: Any, inputs: Inputs) -> TokenSequence:
    refuse_arguments(inputs, "block_controlnet_hidden_states")
    return TokenSequence(sample_grid(transformer, inputs), timestep=timestep_of(inputs))


# [B, tokens, C] where frames have timesteps of their own, else [B, C].
_TIMES = {"embedded_timestep": Cut("video", 1, ndim=3), "temb": Cut("video", 1, ndim=3)}

ARCHITECTURES = {
    "CosmosTransformer3DModel": Architecture(
        attention=("transformer_blocks.*.attn1",),
        sequence=_cosmos,
        cuts=Cuts(
            inputs={
                "transformer_blocks.0": {"hidden_states": Cut("video", 1)},
                "transformer_blocks.*": {"extra_pos_emb": Cut("video", 1), **_TIMES},
                "norm_out": _TIMES,
            },
            outputs={"rope": {0: Cut("video", 0), 1: Cut("video", 0)}},
            gathered=OUTPUT,
        ),
    ),
}
