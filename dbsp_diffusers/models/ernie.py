"""ERNIE-Image."""

from __future__ import annotations

import math
from typing import Any

import torch

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import Cut, Cuts
from dbsp_diffusers.models.token_sequence import Inputs, TokenSequence, read_once, sample_grid, timestep_of

__all__ = ["ARCHITECTURES"]


def _ernie(transformer: Any, inputs: Inputs) -> TokenSequence:
    """The image and text, with its padding at the end, are packed; batches are along the second dimension."""
    lengths = set(_lengths(inputs))
    if len(lengths) > 1:
        raise UserError("the texts of one batch differ in length; run them one after the other")
    text, thw = lengths.pop(), sample_grid(transformer, inputs)
    tokens = math.prod(thw)
    packed = torch.cat([torch.arange(tokens, tokens + text, device="cpu"), torch.arange(tokens, device="cpu")])
    length = tokens + inputs["text_bth"].shape[1]
    return TokenSequence(thw, text, timestep_of(inputs), packed, length)


def _lengths(inputs: Inputs) -> list[int]:
    """Returns the tokens of each item's text."""
    lengths: list[int] = read_once(inputs["text_lens"], lambda lengths: lengths.tolist())
    return lengths


ARCHITECTURES = {
    "ErnieImageTransformer2DModel": Architecture(
        attention=("layers.*.self_attention",),
        sequence=_ernie,
        cuts=Cuts(
            inputs={
                "layers.0": {"x": Cut("packed", 0)},
                "layers.*": {"rotary_pos_emb": Cut("packed", 1), "temb": Cut("packed", 0)},
            },
            gathered={"final_linear": Cut("packed", 0)},
        ),
        sizes=_lengths,
        text="first",
        padded_text=True,
    ),
}
