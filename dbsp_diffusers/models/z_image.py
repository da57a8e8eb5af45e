"""Z-Image."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import Cut, Cuts
from dbsp_diffusers.models.token_sequence import Inputs, TokenSequence, refuse_arguments

__all__ = ["ARCHITECTURES"]

_MULTIPLE = 32
"""Image and caption are each filled up to a multiple of this with learned tokens, which are attended to."""


def _z_image(transformer: Any, inputs: Inputs) -> TokenSequence:
    """An image's tokens, what fills them up, and the caption: whatever is no image counts as text. Its time rises."""
    refuse_arguments(inputs, "controlnet_block_samples", "siglip_feats", "image_noise_mask")
    images, captions = inputs["x"], inputs["cap_feats"]
    if isinstance(images[0], list):
        raise UserError("db-SP does not run Z-Image with images beside the generated one; leave db-SP out (disable)")
    if len(set(_sizes(inputs))) > 1:
        raise UserError("the images or prompts of one batch differ in size; run them one after the other")
    patch, patch_t = int(inputs.get("patch_size") or 2), int(inputs.get("f_patch_size") or 1)
    _, frames, height, width = images[0].shape
    thw = frames // patch_t, height // patch, width // patch
    tokens = thw[0] * thw[1] * thw[2]
    text = _filled(tokens) - tokens + _filled(len(captions[0]))
    packed = torch.cat([torch.arange(tokens, tokens + text, device="cpu"), torch.arange(tokens, device="cpu")])
    return TokenSequence(thw, text, (1 - inputs["t"].amin()).reshape(1), packed)


def _sizes(inputs: Inputs) -> list[Hashable]:
    """Returns each image's size with the length of its prompt, both as they are filled up."""
    pairs = zip(inputs["x"], inputs["cap_feats"], strict=True)
    return [(getattr(image, "shape", None), _filled(len(caption))) for image, caption in pairs]


def _filled(tokens: int) -> int:
    return -(-tokens // _MULTIPLE) * _MULTIPLE


ARCHITECTURES = {
    # Not the refiners' few layers, of the image alone and of the caption alone: every rank computes them.
    "ZImageTransformer2DModel": Architecture(
        attention=("layers.*.attention",),
        sequence=_z_image,
        cuts=Cuts(
            inputs={"layers.0": {"x": Cut("packed", 1)}, "layers.*": {"freqs_cis": Cut("packed", 1)}},
            gathered={"all_final_layer.*": Cut("packed", 1)},
        ),
        sizes=_sizes,
        text="first",
    ),
}
