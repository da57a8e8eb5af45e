"""FLUX.1 and FLUX.2."""

from __future__ import annotations

from typing import Any

from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import DerivedCuts
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


_FLUX = Architecture(
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    sequence=_flux,
    cuts=DerivedCuts({"encoder_hidden_states": "text", "txt_ids": "text"}),
    text="first",
)

ARCHITECTURES = {
    "FluxTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX,
}
