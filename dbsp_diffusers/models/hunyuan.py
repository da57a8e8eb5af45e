"""HunyuanVideo, 1.0 and 1.5, FramePack, and HunyuanImage 2.1."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import OUTPUT, Cut, Cuts
from dbsp_diffusers.models.token_sequence import (
    Inputs,
    TokenSequence,
    no_grid,
    read_once,
    sample_grid,
    timestep_of,
    valid_tokens,
)

__all__ = ["ARCHITECTURES"]


def _hunyuan(transformer: Any, inputs: Inputs) -> TokenSequence:
    text = valid_tokens(inputs["encoder_attention_mask"])
    return TokenSequence(sample_grid(transformer, inputs), text, timestep_of(inputs))


def _hunyuan_15(transformer: Any, inputs: Inputs) -> TokenSequence:
    """Text is an image's embedding, and two prompts'."""
    text, image = _two_texts(inputs), inputs["image_embeds"]
    if not read_once(image, lambda image: bool((image == 0).all())):
        text += image.shape[1]
    return TokenSequence(sample_grid(transformer, inputs), text, timestep_of(inputs))


def _framepack(transformer: Any, inputs: Inputs) -> TokenSequence:
    """Earlier frames, at three resolutions, come before the video's own; the image's embedding before text."""
    tokens = math.prod(sample_grid(transformer, inputs))
    history = {"latents_clean": (1, 2, 2), "latents_history_2x": (2, 4, 4), "latents_history_4x": (4, 8, 8)}
    for name, patch in history.items():
        if inputs.get(name) is not None:
            sizes = inputs[name].shape[2:]
            tokens += math.prod(-(-size // step) for size, step in zip(sizes, patch, strict=True))
    text = inputs["image_embeds"].shape[1] + valid_tokens(inputs["encoder_attention_mask"])
    return TokenSequence((1, 1, tokens), text, timestep_of(inputs), no_grid=no_grid("the video with its history"))


def _hunyuan_image(transformer: Any, inputs: Inputs) -> TokenSequence:
    two = transformer.context_embedder_2 is not None and inputs.get("encoder_hidden_states_2") is not None
    text = _two_texts(inputs) if two else valid_tokens(inputs["encoder_attention_mask"])
    return TokenSequence(sample_grid(transformer, inputs), text, timestep_of(inputs))


def _two_texts(inputs: Inputs) -> int:
    """Tokens of two prompts, of which the model itself puts the valid ones first."""
    text = 0
    for name in ("encoder_attention_mask", "encoder_attention_mask_2"):
        lengths = set(read_once(inputs[name], lambda mask: mask.bool().sum(dim=1).tolist()))
        if len(lengths) > 1:
            raise UserError("the texts of one batch differ in length; run them one after the other")
        text += lengths.pop()
    return text


def _token_replace(transformer: Any) -> str | None:
    if getattr(getattr(transformer, "config", None), "image_condition_type", None) == "token_replace":
        return "with image_condition_type token_replace its norms treat the first frame's tokens by their position"
    return None


_HUNYUAN = Architecture(
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    sequence=_hunyuan,
    cuts=Cuts(
        outputs={
            "x_embedder": {0: Cut("video", 1)},
            "context_embedder": {0: Cut("text", 1)},
            "rope": {0: Cut("video", 0), 1: Cut("video", 0)},
        },
        gathered=OUTPUT,
    ),
    text="last",
    padded_text=True,
    refused=_token_replace,
)

ARCHITECTURES = {
    "HunyuanVideoTransformer3DModel": replace(_HUNYUAN, guidance="calls"),
    "HunyuanVideo15Transformer3DModel": replace(
        _HUNYUAN,
        attention=("transformer_blocks.*.attn",),
        sequence=_hunyuan_15,
        cuts=Cuts(
            inputs={
                "transformer_blocks.0": {"encoder_hidden_states": Cut("text", 1)},
                "transformer_blocks.*": {"attention_mask": Cut("text", 1)},
            },
            outputs={"x_embedder": {0: Cut("video", 1)}, "rope": {0: Cut("video", 0), 1: Cut("video", 0)}},
            gathered=OUTPUT,
        ),
    ),
    "HunyuanVideoFramepackTransformer3DModel": replace(
        _HUNYUAN,
        sequence=_framepack,
        cuts=Cuts(
            inputs={
                "transformer_blocks.0": {"hidden_states": Cut("video", 1), "encoder_hidden_states": Cut("text", 1)},
                "transformer_blocks.*": {"freqs_cis": Cut("video", 0)},
                "single_transformer_blocks.*": {"image_rotary_emb": Cut("video", 0)},
            },
            # There, as the video's own tokens are then taken from the end.
            gathered_early={"single_transformer_blocks.-1": {0: Cut("video", 1)}},
            whole=("proj_out",),
        ),
    ),
    "HunyuanImageTransformer2DModel": replace(
        _HUNYUAN,
        sequence=_hunyuan_image,
        cuts=Cuts(
            inputs={"transformer_blocks.0": {"encoder_hidden_states": Cut("text", 1)}},
            outputs={"x_embedder": {0: Cut("video", 1)}, "rope": {0: Cut("video", 0), 1: Cut("video", 0)}},
            gathered=OUTPUT,
        ),
    ),
}
