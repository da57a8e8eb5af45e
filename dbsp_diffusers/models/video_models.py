"""Transformer classes for videos: Wan, CogVideoX, HunyuanVideo, LTX, Cosmos, Kandinsky, MiniMax H3."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dbsp_core.masks.grid import video_order
from dbsp_core.sources import MaskSource, NablaSource
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import (
    BATCHED_ROTARY,
    OUTPUT,
    PACKED,
    ROTARY,
    STREAMS,
    TEXT,
    VIDEO,
    Architecture,
    OwnMask,
    ShardPlan,
    ShardSpec,
)
from dbsp_diffusers.models.token_sequence import (
    TEXTS_DIFFER,
    Inputs,
    TokenSequence,
    on_sample_grid,
    one_for_all,
    position_grid,
    read_once,
    reject_arguments,
    sample_grid,
    text_before_padding,
    text_length,
    timestep_of,
)

_wan = on_sample_grid(rejects=("enable_diffusion_forcing",))
_FRAMES_FIRST = partial(sample_grid, frames_dim=1)


def _vace(transformer: Any, inputs: Inputs) -> TokenSequence:
    control, sample = inputs["control_hidden_states"].shape[2:], inputs["hidden_states"].shape[2:]
    if control != sample:
        raise UserError(
            f"the control video has latents of {tuple(control)} (frames, height, width), the generated one of "
            f"{tuple(sample)}; give both the same size, with a frame for each reference image"
        )
    return _wan(transformer, inputs)


def _causal(transformer: Any) -> str | None:
    causal = getattr(transformer.config, "num_frame_per_block", 1) > 1
    return "its attention already has a causal mask (num_frame_per_block)" if causal else None


_WAN_ROPE = {"rope": BATCHED_ROTARY}
# Shard the video at its embedding, not at the first block, so that wrappers of all blocks (some step caches) see
# only shards.
_EMBEDDED = {0: ShardSpec("video", 2, grid=True)}
_WAN = Architecture(
    attention=("blocks.*.attn1",),
    sequence=_wan,
    shard_plan=ShardPlan(
        {"": {"timestep": ShardSpec("video", 1, ndim=2)}}, {"patch_embedding": _EMBEDDED, **_WAN_ROPE}, OUTPUT
    ),
    branch_layers={
        "to_gate_compress": ("attn1.to_gate_compress", "to_gate_compress"),  # FastWan2.2's; FastWan2.1's
        "proj_l": ("attn1.attn_op.local_attn.proj_l", "attn1.proj_l"),  # TurboWan's in diffusers' layout; as saved
    },
    guidance="calls",
)


def _easyanimate_text(inputs: Inputs) -> int:
    texts = (inputs.get(name) for name in ("encoder_hidden_states", "encoder_hidden_states_t5"))
    return sum(embeds.shape[1] for embeds in texts if embeds is not None)


_COGVIDEOX_SHARD_PLAN = ShardPlan(
    inputs={
        "": {"image_rotary_emb": ShardSpec("video", 0)},
        # Sharded there, because the model slices the embedding's output by the length of all text.
        "transformer_blocks.0": {"encoder_hidden_states": TEXT},
    },
    outputs={"patch_embed": {0: ShardSpec("video", 1, after_text=True)}},
    gathered=OUTPUT,
)
_COGVIDEOX = Architecture(
    attention=("transformer_blocks.*.attn1",),
    sequence=on_sample_grid(text_length, _FRAMES_FIRST),
    shard_plan=_COGVIDEOX_SHARD_PLAN,
    text="first",
)


def _hunyuan_15_text(inputs: Inputs) -> int:
    """Counts tokens of an image's embedding and of two prompts."""
    image = inputs["image_embeds"]
    is_given = not read_once(image, lambda image: bool((image == 0).all()))
    return _two_texts(inputs, image.shape[1] if is_given else 0)


def _framepack(transformer: Any, inputs: Inputs) -> TokenSequence:
    """Earlier frames, at three resolutions, precede the video; the image's embedding precedes text."""
    tokens = math.prod(sample_grid(transformer, inputs))
    history = {"latents_clean": (1, 2, 2), "latents_history_2x": (2, 4, 4), "latents_history_4x": (4, 8, 8)}
    for name, patch in history.items():
        if inputs.get(name) is not None:
            sizes = inputs[name].shape[2:]
            tokens += math.prod(-(-size // step) for size, step in zip(sizes, patch, strict=True))
    text = inputs["image_embeds"].shape[1] + text_before_padding(inputs)
    return TokenSequence.on_grid(None, tokens, "the video with its history", text=text, timestep=timestep_of(inputs))


def _hunyuan_image_text(inputs: Inputs) -> int:
    """Counts the tokens of two prompts; refiners take one."""
    return text_before_padding(inputs) if inputs.get("encoder_hidden_states_2") is None else _two_texts(inputs)


def _two_texts(inputs: Inputs, image: int = 0) -> int:
    """Counts tokens of two prompts and an image; the model itself moves valid tokens first."""
    masks = (inputs[name] for name in ("encoder_attention_mask", "encoder_attention_mask_2"))
    lengths = (read_once(mask, lambda mask: mask.bool().sum(dim=1).tolist()) for mask in masks)
    text = image + sum(one_for_all(of_items, TEXTS_DIFFER) for of_items in lengths)
    if text == 0:  # diffusers splits the sequence by text's length, from the end
        raise UserError("the prompt has no tokens: encoder_attention_mask and encoder_attention_mask_2 are all zero")
    return text


def _token_replace(transformer: Any) -> str | None:
    if getattr(getattr(transformer, "config", None), "image_condition_type", None) == "token_replace":
        return "with image_condition_type token_replace its norms treat the first frame's tokens differently"
    return None


_HUNYUAN_VIDEO = {"x_embedder": {0: VIDEO}, "rope": ROTARY}
_HUNYUAN = Architecture(
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    sequence=on_sample_grid(text_before_padding),
    shard_plan=ShardPlan(outputs={"context_embedder": {0: TEXT}, **_HUNYUAN_VIDEO}, gathered=OUTPUT),
    text="last",
    padded_text=True,
    unsupported=_token_replace,
)


def _ltx(transformer: Any, inputs: Inputs) -> TokenSequence:
    tokens, coordinates = inputs["hidden_states"].shape[1], inputs.get("video_coords")
    if coordinates is not None:
        thw = read_once(coordinates, lambda rows: position_grid(_starts(rows[0]), tokens))
        return TokenSequence.on_grid(thw, tokens, "video_coords", timestep=timestep_of(inputs))
    frames, height, width = (int(inputs.get(name) or 0) for name in ("num_frames", "height", "width"))
    if frames * height * width != tokens:
        raise UserError(
            f"num_frames, height and width must make the {tokens} tokens of hidden_states, got "
            f"{(frames, height, width)}"
        )
    return TokenSequence((frames, height, width), timestep=timestep_of(inputs))


def _starts(coordinates: torch.Tensor) -> torch.Tensor:
    """Returns positions [tokens, 3] from [3, tokens], or from [3, tokens, 2] with start and end of each token."""
    return (coordinates if coordinates.ndim == 2 else coordinates[..., 0]).T


def _ltx2(transformer: Any, inputs: Inputs) -> TokenSequence:
    reject_arguments(inputs, "video_self_attention_mask")
    return _ltx(transformer, inputs)


_LTX_ROPE = {0: ShardSpec("video", -2), 1: ShardSpec("video", -2)}
"""[B, tokens, D], or with rope_type "split" [B, H, tokens, D/2]."""


# [B, tokens, C] with timesteps per frame, else [B, C].
_COSMOS_TIMES = {"embedded_timestep": ShardSpec("video", 1, ndim=3), "temb": ShardSpec("video", 1, ndim=3)}


def _kandinsky_grid(transformer: Any, inputs: Inputs) -> tuple[int, int, int]:
    """Returns the grid of samples [B, F, H, W, C]."""
    sizes, patch = inputs["hidden_states"].shape[1:4], transformer.config.patch_size
    frames, height, width = (size // step for size, step in zip(sizes, patch, strict=True))
    return frames, height, width


def _nabla(transformer: Any) -> MaskSource | None:
    config = transformer.config
    if config.attention_type != "nabla":
        return None
    return NablaSource(cdf=config.attention_P, window=(config.attention_wT, config.attention_wH, config.attention_wW))


def _kandinsky_sr(transformer: Any, inputs: Inputs) -> TokenSequence:
    """Videos are [B, F, H, W, C]; blocks take their tokens in 8 × 8 tile order."""
    thw = _kandinsky_grid(transformer, inputs)
    return TokenSequence(thw, timestep=timestep_of(inputs), packed=_slots_in_tiles(thw))


@lru_cache(maxsize=8)
def _slots_in_tiles(thw: tuple[int, int, int]) -> torch.Tensor:
    """Returns the slot of each token in order "tile:1x8x8", int64[t·h·w]."""
    return torch.from_numpy(np.argsort(video_order("tile:1x8x8", thw)))


def _attend_without_nabla(
    attention: Any, hidden_states: torch.Tensor, rotary_emb: torch.Tensor, sparse_params: Any = None
) -> torch.Tensor:
    """Computes Kandinsky 6 SR's processor without its mask, for tokens [B, n, C]."""
    from diffusers.models.transformers.transformer_kandinsky6_sr import apply_rotary

    q, k, v = (
        layer(hidden_states).unflatten(-1, (attention.num_heads, -1))
        for layer in (attention.to_query, attention.to_key, attention.to_value)
    )
    q = apply_rotary(attention.query_norm(q.float()).type_as(q), rotary_emb)
    k = apply_rotary(attention.key_norm(k.float()).type_as(k), rotary_emb)
    out = F.scaled_dot_product_attention(*(tokens.transpose(1, 2) for tokens in (q, k, v)))
    return attention.out_layer(out.transpose(1, 2).flatten(2, 3))


def _minimax_h3(transformer: Any, inputs: Inputs) -> TokenSequence:
    """The generated video is the last run of video rows in the packed sequence; text, audio and input images count as
    text. Timesteps rise from 0 to 1, one per kind of rows."""
    video, positions = inputs["video_indices"], inputs["position_ids"]

    def order(video: torch.Tensor) -> tuple[torch.Tensor, int]:
        rows = video.cpu()
        gaps = (rows.diff() != 1).nonzero()
        generated = rows if len(gaps) == 0 else rows[int(gaps[-1]) + 1 :]
        others = torch.ones(len(positions), dtype=torch.bool, device="cpu")
        others[generated] = False
        return torch.cat([others.nonzero().squeeze(1), generated]), len(generated)

    packed, tokens = read_once(video, order)
    text = len(packed) - tokens
    thw = read_once(positions, lambda rows: position_grid(rows[packed[text:].to(rows.device)], tokens))
    timestep = inputs["timestep"][inputs["timestep_indices"][video[-1]]]
    others: dict[str, Any] = {"text": text, "timestep": (1 - timestep).reshape(1), "packed": packed}
    return TokenSequence.on_grid(thw, tokens, "position_ids", **others)


VIDEO_MODELS = {
    "WanTransformer3DModel": replace(_WAN, pipeline="WanPipeline"),
    "WanVACETransformer3DModel": replace(
        _WAN,
        attention=("vace_blocks.*.attn1", "blocks.*.attn1"),
        sequence=_vace,
        shard_plan=ShardPlan(
            outputs={"patch_embedding": _EMBEDDED, "vace_patch_embedding": _EMBEDDED, **_WAN_ROPE}, gathered=OUTPUT
        ),
        pipeline="WanVACEPipeline",
    ),
    "WanAnimateTransformer3DModel": replace(
        _WAN,
        shard_plan=ShardPlan(
            # The pose is added to the embedding by frame; the face adapter attends by frame.
            inputs={"blocks.0": {"hidden_states": VIDEO}},
            outputs={**_WAN_ROPE, "face_adapter.*": {0: VIDEO}},
            gathered=OUTPUT,
            gathered_inputs={"face_adapter.*": {"hidden_states": VIDEO}},
        ),
        pipeline="WanAnimatePipeline",
    ),
    "SkyReelsV2Transformer3DModel": replace(_WAN, unsupported=_causal),
    "ChronoEditTransformer3DModel": replace(_WAN, guidance=None),
    "AnyFlowTransformer3DModel": replace(
        _WAN,
        guidance=None,
        sequence=on_sample_grid(grid=_FRAMES_FIRST),
        shard_plan=ShardPlan(
            outputs={
                "patch_embedding": _EMBEDDED,
                "rope": {0: ShardSpec("video", 2)},
                "condition_embedder": {0: VIDEO, 1: VIDEO},
            },
            gathered=OUTPUT,
        ),
    ),
    "CogVideoXTransformer3DModel": replace(_COGVIDEOX, pipeline="CogVideoXPipeline", guidance="batch"),
    "ConsisIDTransformer3DModel": replace(
        _COGVIDEOX,
        # Gathered there, because the model then cuts off text by its full length.
        shard_plan=replace(
            _COGVIDEOX_SHARD_PLAN,
            gathered={},
            gathered_early={"transformer_blocks.-1": {0: VIDEO, 1: TEXT}},
            whole=("proj_out",),
        ),
    ),
    "EasyAnimateTransformer3DModel": replace(
        _COGVIDEOX,
        sequence=on_sample_grid(_easyanimate_text),
        shard_plan=ShardPlan(
            inputs={"transformer_blocks.0": STREAMS}, outputs={"rope_embedding": ROTARY}, gathered=OUTPUT
        ),
    ),
    "HunyuanVideoTransformer3DModel": replace(_HUNYUAN, pipeline="HunyuanVideoPipeline", guidance="calls"),
    "HunyuanVideo15Transformer3DModel": replace(
        _HUNYUAN,
        pipeline="HunyuanVideo15Pipeline",
        guidance="calls",
        attention=("transformer_blocks.*.attn",),
        sequence=on_sample_grid(_hunyuan_15_text),
        shard_plan=ShardPlan(
            inputs={
                "transformer_blocks.0": {"encoder_hidden_states": TEXT},
                "transformer_blocks.*": {"attention_mask": TEXT},
            },
            outputs=_HUNYUAN_VIDEO,
            gathered=OUTPUT,
        ),
    ),
    "HunyuanVideoFramepackTransformer3DModel": replace(
        _HUNYUAN,
        sequence=_framepack,
        shard_plan=ShardPlan(
            inputs={
                "transformer_blocks.0": STREAMS,
                "transformer_blocks.*": {"freqs_cis": ShardSpec("video", 0)},
                "single_transformer_blocks.*": {"image_rotary_emb": ShardSpec("video", 0)},
            },
            # Gathered there, because the model then slices the video's tokens from the end.
            gathered_early={"single_transformer_blocks.-1": {0: VIDEO}},
            whole=("proj_out",),
        ),
    ),
    "HunyuanImageTransformer2DModel": replace(
        _HUNYUAN,
        sequence=on_sample_grid(_hunyuan_image_text),
        shard_plan=ShardPlan(
            inputs={"transformer_blocks.0": {"encoder_hidden_states": TEXT}}, outputs=_HUNYUAN_VIDEO, gathered=OUTPUT
        ),
    ),
    "LTXVideoTransformer3DModel": Architecture(
        attention=("transformer_blocks.*.attn1",),
        sequence=_ltx,
        # Cross-attention uses all text.
        shard_plan=ShardPlan(
            inputs={"": {"hidden_states": VIDEO, "timestep": ShardSpec("video", 1, ndim=2)}},
            outputs={"rope": BATCHED_ROTARY},
            gathered=OUTPUT,
        ),
    ),
    "LTX2VideoTransformer3DModel": Architecture(
        attention=("transformer_blocks.*.attn1",),
        sequence=_ltx2,
        shard_plan=ShardPlan(
            inputs={
                "": {"hidden_states": VIDEO, "timestep": ShardSpec("video", 1, ndim=2), "video_keyframes_mask": VIDEO}
            },
            outputs={"rope": _LTX_ROPE, "cross_attn_rope": _LTX_ROPE},
            gathered=OUTPUT,
            whole=("audio_proj_out",),
        ),
        attention_to_video=("transformer_blocks.*.video_to_audio_attn",),
        pipeline="LTX2Pipeline",
        skipped_by="all_perturbed",
        skipped=lambda inputs: inputs.get("spatio_temporal_guidance_blocks") or (),
    ),
    "CosmosTransformer3DModel": Architecture(
        attention=("transformer_blocks.*.attn1",),
        sequence=on_sample_grid(rejects=("block_controlnet_hidden_states",)),
        shard_plan=ShardPlan(
            inputs={
                "transformer_blocks.0": {"hidden_states": VIDEO},
                "transformer_blocks.*": {"extra_pos_emb": VIDEO, **_COSMOS_TIMES},
                "norm_out": _COSMOS_TIMES,
            },
            outputs={"rope": ROTARY},
            gathered=OUTPUT,
        ),
    ),
    "Kandinsky5Transformer3DModel": Architecture(
        attention=("visual_transformer_blocks.*.self_attention",),
        sequence=on_sample_grid(grid=_kandinsky_grid),
        # The model reads the video's size from the embedding, and restores rows and columns after the last block.
        shard_plan=ShardPlan(
            inputs={"visual_transformer_blocks.0": {"visual_embed": VIDEO}},
            outputs={"visual_rope_embeddings": {0: ShardSpec("video", 1, grid=True)}},
            gathered_early={"visual_transformer_blocks.-1": {0: VIDEO}},
            whole=("out_layer",),
        ),
        own_mask=OwnMask("sparse_params", _nabla),
        pipeline="Kandinsky5T2VPipeline",
    ),
    "Kandinsky6SRTransformer3DModel": Architecture(
        attention=("visual_transformer_blocks.*.self_attention",),
        sequence=_kandinsky_sr,
        shard_plan=ShardPlan(
            inputs={
                "visual_transformer_blocks.0": {"hidden_states": PACKED},
                "visual_transformer_blocks.*": {"rotary_emb": ShardSpec("packed", 0)},
            },
            gathered_early={"visual_transformer_blocks.-1": {0: PACKED}},
            whole=("out_layer",),
        ),
        own_mask=OwnMask(
            "",
            lambda transformer: NablaSource(
                cdf=transformer.config.nabla_threshold, window=transformer.config.nabla_window
            ),
            _attend_without_nabla,
        ),
        pipeline="Kandinsky6SRPipeline",
    ),
    "MiniMaxH3Transformer3DModel": Architecture(
        attention=("transformer_blocks.*.attn",),
        sequence=_minimax_h3,
        shard_plan=ShardPlan(
            inputs={
                "transformer_blocks.0": {"hidden_states": PACKED},
                "transformer_blocks.*": {"adaln_indices": ShardSpec("packed", 0)},
                "norm_out": {"timestep_indices": ShardSpec("packed", 0)},
            },
            outputs={"rope": {0: ShardSpec("packed", 0), 1: ShardSpec("packed", 0)}},
            gathered={"proj_out": PACKED, "audio_proj_out": PACKED},
        ),
        text="first",
        pipeline="MiniMaxH3ModularPipeline",
    ),
}
