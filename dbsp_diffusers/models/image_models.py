"""Transformer classes for images: FLUX, Qwen-Image, Z-Image, Krea 2, ERNIE-Image."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import OUTPUT, PACKED, STREAMS, TEXT, VIDEO, Architecture, ShardPlan, ShardSpec
from dbsp_diffusers.models.token_sequence import (
    TEXTS_DIFFER,
    Inputs,
    TokenSequence,
    one_for_all,
    position_grid,
    read_once,
    reject_arguments,
    sample_grid,
    timestep_of,
    valid_slots,
    valid_tokens,
)


def _flux(transformer: Any, inputs: Inputs) -> TokenSequence:
    reject_arguments(inputs, "controlnet_block_samples", "controlnet_single_block_samples", "kv_cache_mode")
    ids, tokens = inputs["img_ids"], inputs["hidden_states"].shape[1]
    thw = read_once(ids, lambda rows: position_grid(rows[0] if rows.ndim == 3 else rows, tokens))
    text = inputs["encoder_hidden_states"].shape[1]
    return TokenSequence.on_grid(thw, tokens, "img_ids", text=text, timestep=timestep_of(inputs))


def _flux3(transformer: Any, inputs: Inputs) -> TokenSequence:
    """Reference images follow the generated image; joint blocks' rotary tables pack text and images."""
    sequence, references = _flux(transformer, inputs), inputs.get("image_cond_hidden_states")
    tokens = math.prod(sequence.thw) + (0 if references is None else references.shape[1])
    packed = torch.arange(sequence.text + tokens, device="cpu")
    if references is None:
        return replace(sequence, packed=packed)
    others: dict[str, Any] = {"text": sequence.text, "timestep": sequence.timestep, "packed": packed}
    return TokenSequence.on_grid(None, tokens, "image_cond_hidden_states", **others)


_FLUX = Architecture(
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    sequence=_flux,
    shard_plan=ShardPlan(
        # [tokens, 3], or batched
        inputs={"": {**STREAMS, "img_ids": ShardSpec("video", -2), "txt_ids": ShardSpec("text", -2)}},
        gathered=OUTPUT,
    ),
    text="first",
)


def _qwen(transformer: Any, inputs: Inputs) -> TokenSequence:
    reject_arguments(inputs, "controlnet_block_samples")
    shapes = (
        tuple(map(tuple, shapes_of_item)) if isinstance(shapes_of_item, list) else (tuple(shapes_of_item),)
        for shapes_of_item in inputs["img_shapes"]
    )
    images = one_for_all(shapes, "img_shapes must be the same for all items of a batch")
    mask = inputs.get("encoder_hidden_states_mask")
    text = inputs["encoder_hidden_states"].shape[1] if mask is None else valid_tokens(mask)
    thw = images[0] if len(images) == 1 else None  # otherwise layers, or images to edit
    tokens = sum(map(math.prod, images))
    return TokenSequence.on_grid(thw, tokens, "img_shapes", text=text, timestep=timestep_of(inputs))


def _z_image(transformer: Any, inputs: Inputs) -> TokenSequence:
    """Padding and caption count as text; the timestep rises."""
    reject_arguments(inputs, "controlnet_block_samples", "siglip_feats", "image_noise_mask")
    images, captions = inputs["x"], inputs["cap_feats"]
    if isinstance(images[0], list):
        raise UserError("db-SP does not support Z-Image with more images than the generated one; call `disable` first")
    one_for_all(_z_image_sizes(inputs), "the images or prompts of one batch differ in size")
    patch, patch_t = int(inputs.get("patch_size") or 2), int(inputs.get("f_patch_size") or 1)
    _, frames, height, width = images[0].shape
    thw = frames // patch_t, height // patch, width // patch
    tokens = thw[0] * thw[1] * thw[2]
    text = _filled(tokens) - tokens + _filled(len(captions[0]))
    packed = torch.cat([torch.arange(tokens, tokens + text, device="cpu"), torch.arange(tokens, device="cpu")])
    return TokenSequence(thw, text, (1 - inputs["t"].amin()).reshape(1), packed)


def _z_image_sizes(inputs: Inputs) -> list[Hashable]:
    """Returns each image's size and the length of its prompt, padded."""
    pairs = zip(inputs["x"], inputs["cap_feats"], strict=True)
    return [(getattr(image, "shape", None), _filled(len(caption))) for image, caption in pairs]


def _filled(tokens: int) -> int:
    """Returns the length of an image or caption with learned tokens as padding, which are attended to."""
    return -(-tokens // 32) * 32


def _krea2(transformer: Any, inputs: Inputs) -> TokenSequence:
    """Text (with padding anywhere) and image are packed."""
    text, tokens = inputs["encoder_hidden_states"].shape[1], inputs["hidden_states"].shape[1]
    mask, positions = inputs.get("encoder_attention_mask"), inputs["position_ids"]
    thw = read_once(positions, lambda rows: position_grid(rows[text:], tokens))
    valid = torch.arange(text, device="cpu") if mask is None else valid_slots(mask)
    return TokenSequence.on_grid(
        thw,
        tokens,
        "position_ids",
        text=len(valid),
        timestep=timestep_of(inputs),
        packed=torch.cat([valid, torch.arange(text, text + tokens, device="cpu")]),
        packed_length=text + tokens,
    )


def _ernie(transformer: Any, inputs: Inputs) -> TokenSequence:
    """Image and text are packed, with text padding at the end; the batch is the second dimension."""
    text, thw = one_for_all(_ernie_lengths(inputs), TEXTS_DIFFER), sample_grid(transformer, inputs)
    tokens = math.prod(thw)
    packed = torch.cat([torch.arange(tokens, tokens + text, device="cpu"), torch.arange(tokens, device="cpu")])
    length = tokens + inputs["text_bth"].shape[1]
    return TokenSequence(thw, text, timestep_of(inputs), packed, length)


def _ernie_lengths(inputs: Inputs) -> list[int]:
    """Returns the tokens of each item's text."""
    return read_once(inputs["text_lens"], lambda lengths: lengths.tolist())


IMAGE_MODELS = {
    "FluxTransformer2DModel": replace(_FLUX, guidance="calls"),
    "Flux2Transformer2DModel": replace(_FLUX, guidance="calls"),
    # Excludes the first layers, for one kind of token each, which every rank computes.
    "Flux3Transformer2DModel": replace(
        _FLUX,
        attention=("single_transformer_blocks.*.attn",),
        sequence=_flux3,
        shard_plan=ShardPlan(
            inputs={
                "single_transformer_blocks.0": STREAMS,
                "single_transformer_blocks.*": {
                    "temb_mod": VIDEO,
                    "temb_mod_context": TEXT,
                    "image_rotary_emb": ShardSpec("packed", 0),
                },
            },
            # Gathered there, because the model then slices the generated image's tokens.
            gathered_early={"single_transformer_blocks.-1": {1: VIDEO}},
            whole=("proj_out",),
        ),
    ),
    "LongCatImageTransformer2DModel": replace(_FLUX, guidance="calls"),
    "OvisImageTransformer2DModel": replace(_FLUX, guidance="calls"),
    "QwenImageTransformer2DModel": Architecture(
        attention=("transformer_blocks.*.attn",),
        sequence=_qwen,
        shard_plan=ShardPlan(
            inputs={
                "transformer_blocks.0": STREAMS,
                "transformer_blocks.*": {"modulate_index": VIDEO, "encoder_hidden_states_mask": TEXT},
            },
            outputs={"pos_embed": {0: ShardSpec("video", 0), 1: ShardSpec("text", 0)}},
            gathered=OUTPUT,
        ),
        text="first",
        padded_text=True,
        guidance="calls",
    ),
    # Excludes the refiners of image and caption, which every rank computes.
    "ZImageTransformer2DModel": Architecture(
        attention=("layers.*.attention",),
        sequence=_z_image,
        shard_plan=ShardPlan(
            inputs={"layers.0": {"x": PACKED}, "layers.*": {"freqs_cis": PACKED}},
            gathered={"all_final_layer.*": PACKED},
        ),
        sizes=_z_image_sizes,
        text="first",
    ),
    "Krea2Transformer2DModel": Architecture(
        attention=("transformer_blocks.*.attn",),
        sequence=_krea2,
        shard_plan=ShardPlan(
            inputs={
                "transformer_blocks.0": {"hidden_states": PACKED},
                "transformer_blocks.*": {"image_rotary_emb": ShardSpec("packed", 0)},
            },
            # Gathered there, because the model then cuts off text.
            gathered_early={"transformer_blocks.-1": {0: PACKED}},
            whole=("final_layer",),
        ),
        text="first",
        padded_text=True,
    ),
    "ErnieImageTransformer2DModel": Architecture(
        attention=("layers.*.self_attention",),
        sequence=_ernie,
        shard_plan=ShardPlan(
            inputs={
                "layers.0": {"x": ShardSpec("packed", 0)},
                "layers.*": {"rotary_pos_emb": PACKED, "temb": ShardSpec("packed", 0)},
            },
            gathered={"final_linear": ShardSpec("packed", 0)},
        ),
        sizes=_ernie_lengths,
        text="first",
        padded_text=True,
    ),
}
