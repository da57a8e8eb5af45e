"""Krea 2."""

from __future__ import annotations

from typing import Any

import torch

from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import Cut, Cuts
from dbsp_diffusers.models.token_sequence import (
    Inputs,
    TokenSequence,
    no_grid,
    position_grid,
    read_once,
    timestep_of,
    valid_places,
)

__all__ = ["ARCHITECTURES"]


def _krea2(transformer: Any, inputs: Inputs) -> TokenSequence:
    """Text, of which any part may be padding, and the image are packed."""
    text, tokens = inputs["encoder_hidden_states"].shape[1], inputs["hidden_states"].shape[1]
    mask, positions = inputs.get("encoder_attention_mask"), inputs["position_ids"]
    thw = read_once(positions, lambda rows: position_grid(rows[text:], tokens))
    valid = torch.arange(text, device="cpu") if mask is None else valid_places(mask)
    return TokenSequence(
        thw or (1, 1, tokens),
        len(valid),
        timestep_of(inputs),
        packed=torch.cat([valid, torch.arange(text, text + tokens, device="cpu")]),
        packed_length=text + tokens,
        no_grid=no_grid("position_ids") if thw is None else None,
    )


ARCHITECTURES = {
    "Krea2Transformer2DModel": Architecture(
        attention=("transformer_blocks.*.attn",),
        sequence=_krea2,
        cuts=Cuts(
            inputs={
                "transformer_blocks.0": {"hidden_states": Cut("packed", 1)},
                "transformer_blocks.*": {"image_rotary_emb": Cut("packed", 0)},
            },
            # There, as text is then cut off.
            gathered_early={"transformer_blocks.-1": Cut("packed", 1)},
            whole=("final_layer",),
        ),
        text="first",
        padded_text=True,
    ),
}
