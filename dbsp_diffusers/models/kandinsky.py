"""Kandinsky 5."""

from __future__ import annotations

from typing import Any

from dbsp_core.sources import MaskSource, NablaSource
from dbsp_diffusers.models.architecture import Architecture, OwnMask
from dbsp_diffusers.models.cuts import Cut, Cuts
from dbsp_diffusers.models.token_sequence import Inputs, TokenSequence, timestep_of

__all__ = ["ARCHITECTURES"]


def _kandinsky(transformer: Any, inputs: Inputs) -> TokenSequence:
    """Samples are [B, F, H, W, C]."""
    frames, height, width = (
        size // patch
        for size, patch in zip(inputs["hidden_states"].shape[1:4], transformer.config.patch_size, strict=True)
    )
    return TokenSequence((frames, height, width), timestep=timestep_of(inputs))


def _nabla(transformer: Any) -> MaskSource | None:
    """What its pipelines read from its configuration, where it is one with NABLA."""
    config = transformer.config
    if config.attention_type != "nabla":
        return None
    return NablaSource(cdf=config.attention_P, window=(config.attention_wT, config.attention_wH, config.attention_wW))


ARCHITECTURES = {
    "Kandinsky5Transformer3DModel": Architecture(
        attention=("visual_transformer_blocks.*.self_attention",),
        sequence=_kandinsky,
        # The model reads the video's size from what it embeds, and makes rows and columns again after the last block.
        cuts=Cuts(
            inputs={"visual_transformer_blocks.0": {"visual_embed": Cut("video", 1)}},
            outputs={"visual_rope_embeddings": {0: Cut("video", 1, grid=True)}},
            gathered_early={"visual_transformer_blocks.-1": Cut("video", 1)},
            whole=("out_layer",),
        ),
        own_mask=OwnMask("sparse_params", _nabla),
        pipeline="Kandinsky5T2VPipeline",
    ),
}
