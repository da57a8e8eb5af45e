"""FLUX.1, FLUX.2 and FLUX.3, and what is built like the first: Ovis-Image, LongCat-Image."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

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


def _flux(transformer: Any, inputs: Inputs) -> TokenSequence:
    refuse_arguments(inputs, "controlnet_block_samples", "controlnet_single_block_samples", "kv_cache_mode")
    ids, tokens = inputs["img_ids"], inputs["hidden_states"].shape[1]
    thw = read_once(ids, lambda rows: position_grid(rows[0] if rows.ndim == 3 else rows, tokens))
    problem = no_grid("img_ids") if thw is None else None
    text = inputs["encoder_hidden_states"].shape[1]
    return TokenSequence(thw or (1, 1, tokens), text, timestep_of(inputs), no_grid=problem)


def _flux3(transformer: Any, inputs: Inputs) -> TokenSequence:
    """Reference images follow the generated one. Joint blocks' rotary tables are those of text and images packed."""
    sequence, references = _flux(transformer, inputs), inputs.get("image_cond_hidden_states")
    if references is not None:
        tokens = math.prod(sequence.thw) + references.shape[1]
        sequence = replace(sequence, thw=(1, 1, tokens), no_grid=no_grid("image_cond_hidden_states"))
    return replace(sequence, packed=torch.arange(sequence.text + math.prod(sequence.thw), device="cpu"))


_FLUX = Architecture(
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    sequence=_flux,
    cuts=DerivedCuts({"encoder_hidden_states": "text", "txt_ids": "text"}),
    text="first",
)

_WITHOUT_PLAN = replace(
    _FLUX,
    cuts=Cuts(
        inputs={
            "": {
                "hidden_states": Cut("video", 1),
                "encoder_hidden_states": Cut("text", 1),
                "img_ids": Cut("video", 0),
                "txt_ids": Cut("text", 0),
            }
        },
        gathered=OUTPUT,
    ),
)

ARCHITECTURES = {
    "FluxTransformer2DModel": replace(_FLUX, guidance="calls"),
    "Flux2Transformer2DModel": replace(_FLUX, guidance="calls"),
    # Not the first few layers, of each kind of token alone: every rank computes them.
    "Flux3Transformer2DModel": replace(
        _FLUX,
        attention=("single_transformer_blocks.*.attn",),
        sequence=_flux3,
        cuts=Cuts(
            inputs={
                "single_transformer_blocks.0": {
                    "hidden_states": Cut("video", 1),
                    "encoder_hidden_states": Cut("text", 1),
                },
                "single_transformer_blocks.*": {
                    "temb_mod": Cut("video", 1),
                    "temb_mod_context": Cut("text", 1),
                    "image_rotary_emb": Cut("packed", 0),
                },
            },
            # There, as the generated image's tokens are then taken from all images'.
            gathered_early={"single_transformer_blocks.-1": {1: Cut("video", 1)}},
            whole=("proj_out",),
        ),
    ),
    "LongCatImageTransformer2DModel": replace(_WITHOUT_PLAN, guidance="calls"),
    "OvisImageTransformer2DModel": replace(_WITHOUT_PLAN, guidance="calls"),
}
