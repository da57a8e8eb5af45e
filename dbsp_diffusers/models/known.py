"""The transformer classes that db-SP knows, those it refuses with a reason, and how others are made known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import Architecture, Packing
from dbsp_diffusers.models.cuts import Cut, Cuts, DerivedCuts
from dbsp_diffusers.models.token_sequence import (
    TokenSequence,
    no_grid,
    position_grid,
    read_once,
    require_position_grid,
    sample_grid,
    valid_tokens,
)
from dbsp_diffusers.packed.wan import attach_packed_wan, wan_alone

__all__ = ["ARCHITECTURES", "REFUSED", "architecture_of", "register_architecture"]

Inputs = Mapping[str, Any]


def _timestep(inputs: Inputs) -> torch.Tensor | float | None:
    """The latest of those of an image's or a video's tokens: what is given already, as a first frame, is at 0."""
    timestep = inputs.get("timestep")
    return timestep.amax().reshape(1) if isinstance(timestep, torch.Tensor) else timestep


def _refuse(inputs: Inputs, *names: str) -> None:
    """Raises UserError where one of these arguments is given: tensors of all tokens that db-SP does not cut."""
    for name in names:
        if not (inputs.get(name) is None or inputs[name] is False):
            raise UserError(f"db-SP does not run this model with {name}; leave it out, or leave db-SP out (disable)")


def _wan(transformer: Any, inputs: Inputs) -> TokenSequence:
    _refuse(inputs, "enable_diffusion_forcing")
    return TokenSequence(sample_grid(transformer, inputs), timestep=_timestep(inputs))


def _vace(transformer: Any, inputs: Inputs) -> TokenSequence:
    control, sample = inputs["control_hidden_states"].shape[2:], inputs["hidden_states"].shape[2:]
    if control != sample:
        raise UserError(
            f"the control video has latents of {tuple(control)} (frames, height, width), the generated one of "
            f"{tuple(sample)}; give both the same size, with a frame for each reference image"
        )
    return _wan(transformer, inputs)


def _cogvideox(transformer: Any, inputs: Inputs) -> TokenSequence:
    text = inputs["encoder_hidden_states"].shape[1]
    return TokenSequence(sample_grid(transformer, inputs, frames_dim=1), text, _timestep(inputs))


def _hunyuan(transformer: Any, inputs: Inputs) -> TokenSequence:
    text = valid_tokens(inputs["encoder_attention_mask"])
    return TokenSequence(sample_grid(transformer, inputs), text, _timestep(inputs))


def _hunyuan_15(transformer: Any, inputs: Inputs) -> TokenSequence:
    """Text is an image's embedding, and two prompts', of which the model itself puts the valid tokens first."""
    text = 0
    for name in ("encoder_attention_mask", "encoder_attention_mask_2"):
        lengths = set(read_once(inputs[name], lambda mask: mask.bool().sum(dim=1).tolist()))
        if len(lengths) > 1:
            raise UserError("the texts of one batch differ in length; run them one after the other")
        text += lengths.pop()
    image = inputs["image_embeds"]
    if not read_once(image, lambda image: bool((image == 0).all())):
        text += image.shape[1]
    return TokenSequence(sample_grid(transformer, inputs), text, _timestep(inputs))


def _ltx(transformer: Any, inputs: Inputs) -> TokenSequence:
    tokens = inputs["hidden_states"].shape[1]
    coordinates = inputs.get("video_coords")
    if coordinates is not None:
        thw = read_once(coordinates, lambda rows: require_position_grid(rows[0].T, tokens, "video_coords"))
    else:
        frames, height, width = (int(inputs.get(name) or 0) for name in ("num_frames", "height", "width"))
        thw = (frames, height, width)
        if frames * height * width != tokens:
            raise UserError(f"num_frames, height and width must make the {tokens} tokens of hidden_states, got {thw}")
    return TokenSequence(thw, timestep=_timestep(inputs))


def _flux(transformer: Any, inputs: Inputs) -> TokenSequence:
    _refuse(inputs, "controlnet_block_samples", "controlnet_single_block_samples", "kv_cache_mode")
    ids, tokens = inputs["img_ids"], inputs["hidden_states"].shape[1]
    thw = read_once(ids, lambda rows: position_grid(rows[0] if rows.ndim == 3 else rows, tokens))
    problem = no_grid("img_ids") if thw is None else None
    text = inputs["encoder_hidden_states"].shape[1]
    return TokenSequence(thw or (1, 1, tokens), text, _timestep(inputs), no_grid=problem)


def _qwen(transformer: Any, inputs: Inputs) -> TokenSequence:
    _refuse(inputs, "controlnet_block_samples")
    shapes = {tuple(map(tuple, one)) if isinstance(one, list) else (tuple(one),) for one in inputs["img_shapes"]}
    if len(shapes) > 1 or len(only := shapes.pop()) > 1:
        raise UserError(
            "img_shapes must be one shape, the same for all items: db-SP does not know edits of images yet"
        )
    mask = inputs.get("encoder_hidden_states_mask")
    text = inputs["encoder_hidden_states"].shape[1] if mask is None else valid_tokens(mask)
    return TokenSequence(only[0], text, _timestep(inputs))


def _minimax_h3(transformer: Any, inputs: Inputs) -> TokenSequence:
    """The generated video is the last run of the packed sequence's video rows; text, audio and what is given of
    images count as text. Its timestep rises from 0 to 1, another one for each kind of rows."""
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
    thw = read_once(
        positions, lambda rows: require_position_grid(rows[packed[text:].to(rows.device)], tokens, "position_ids")
    )
    timestep = inputs["timestep"][inputs["timestep_indices"][video[-1]]]
    return TokenSequence(thw, text, (1 - timestep).reshape(1), packed)


def _token_replace(transformer: Any) -> str | None:
    if getattr(transformer.config, "image_condition_type", None) == "token_replace":
        return "with image_condition_type token_replace its norms treat the first frame's tokens by their position"
    return None


def _causal(transformer: Any) -> str | None:
    causal = getattr(transformer.config, "num_frame_per_block", 1) > 1
    return "its attention has a causal mask of its own (num_frame_per_block)" if causal else None


_OUTPUT = {"proj_out": Cut("video", 1)}
_ROPE = {"rope": {0: Cut("video", 1), 1: Cut("video", 1)}}
# Video is cut where it is embedded, not at the first block: what wraps the blocks as a whole, as some step caches do,
# then sees only shares.
_EMBEDDED = {0: Cut("video", 2, grid=True)}
_WAN = Architecture(
    attention=("blocks.*.attn1",),
    sequence=_wan,
    cuts=Cuts({"": {"timestep": Cut("video", 1, ndim=2)}}, {"patch_embedding": _EMBEDDED, **_ROPE}, _OUTPUT),
)
_TWO_KINDS = ("transformer_blocks.*.attn", "single_transformer_blocks.*.attn")
_HUNYUAN = Architecture(
    attention=_TWO_KINDS,
    sequence=_hunyuan,
    cuts=Cuts(
        outputs={
            "x_embedder": {0: Cut("video", 1)},
            "context_embedder": {0: Cut("text", 1)},
            "rope": {0: Cut("video", 0), 1: Cut("video", 0)},
        },
        gathered=_OUTPUT,
    ),
    text="last",
    padded_text=True,
    refused=_token_replace,
)
_FLUX = Architecture(
    attention=_TWO_KINDS,
    sequence=_flux,
    cuts=DerivedCuts({"encoder_hidden_states": "text", "txt_ids": "text"}),
    text="first",
)

ARCHITECTURES = {
    "WanTransformer3DModel": replace(_WAN, pipeline="WanPipeline", packing=Packing(wan_alone, attach_packed_wan)),
    "WanVACETransformer3DModel": replace(
        _WAN,
        attention=("vace_blocks.*.attn1", "blocks.*.attn1"),
        sequence=_vace,
        cuts=Cuts(
            outputs={"patch_embedding": _EMBEDDED, "vace_patch_embedding": _EMBEDDED, **_ROPE}, gathered=_OUTPUT
        ),
        pipeline="WanVACEPipeline",
    ),
    "SkyReelsV2Transformer3DModel": replace(_WAN, refused=_causal),
    "ChronoEditTransformer3DModel": _WAN,
    "CogVideoXTransformer3DModel": Architecture(
        attention=("transformer_blocks.*.attn1",),
        sequence=_cogvideox,
        cuts=Cuts(
            inputs={
                "": {"image_rotary_emb": Cut("video", 0)},
                # Only there, as the embedding's output is cut by the length of all text.
                "transformer_blocks.0": {"encoder_hidden_states": Cut("text", 1)},
            },
            outputs={"patch_embed": {0: Cut("video", 1, after_text=True)}},
            gathered=_OUTPUT,
        ),
        text="first",
        pipeline="CogVideoXPipeline",
    ),
    "HunyuanVideoTransformer3DModel": _HUNYUAN,
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
            gathered=_OUTPUT,
        ),
    ),
    "LTXVideoTransformer3DModel": Architecture(
        attention=("transformer_blocks.*.attn1",),
        sequence=_ltx,
        # Cross-attention looks at all of the text.
        cuts=DerivedCuts(
            {"encoder_hidden_states": None, "encoder_attention_mask": None},
            beside=Cuts({"": {"timestep": Cut("video", 1, ndim=2)}}),
        ),
    ),
    "FluxTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX,
    "QwenImageTransformer2DModel": Architecture(
        attention=("transformer_blocks.*.attn",),
        sequence=_qwen,
        cuts=DerivedCuts(
            {"encoder_hidden_states": "text", "encoder_hidden_states_mask": "text", "pos_embed.1": "text"}
        ),
        text="first",
        padded_text=True,
    ),
    "MiniMaxH3Transformer3DModel": Architecture(
        attention=("transformer_blocks.*.attn",),
        sequence=_minimax_h3,
        cuts=DerivedCuts(stream="packed"),
        text="first",
    ),
}
"""By class name: diffusers need not be imported to look one up."""

REFUSED = {
    "HeliosTransformer3DModel": "it cuts and gathers its sequence at every layer",
    "Kandinsky5Transformer3DModel": "it brings a sparse mask of its own (NABLA), and has no entry yet",
    "LTX2VideoTransformer3DModel": "audio attends to video in modules that db-SP does not shard",
    "SanaVideoTransformer3DModel": "its attention is linear, without a softmax that a mask could apply to",
    "WanAnimateTransformer3DModel": "its face adapter mixes tokens by frame outside self-attention",
}
"""Why classes that look alike are not run."""


def register_architecture(class_name: str, architecture: Architecture) -> None:
    """Makes a transformer class known; see docs/adding-a-model.md.

    Args:
        class_name: The name of the class; its subclasses are known with it.
        architecture: How it is built.

    Raises:
        UserError: For a name that is known already, with another architecture.
    """
    if ARCHITECTURES.setdefault(class_name, architecture) != architecture:
        raise UserError(f"{class_name} is known already, with other settings; register a subclass under another name")


def architecture_of(transformer: nn.Module) -> Architecture:
    """The architecture of a transformer or of a class it derives from. Raises UserError for one that cannot be run."""
    kind = type(transformer).__name__
    for cls in type(transformer).__mro__:
        if cls.__name__ in REFUSED:
            raise UserError(f"db-SP does not run {kind}: {REFUSED[cls.__name__]}")
        if cls.__name__ in ARCHITECTURES:
            architecture = ARCHITECTURES[cls.__name__]
            reason = architecture.refused(transformer)
            if reason is not None:
                raise UserError(f"db-SP does not run this {kind}: {reason}")
            return architecture
    raise UserError(
        f"db-SP does not know {kind}; it knows {', '.join(ARCHITECTURES)} and their subclasses; "
        "others of their kind need one entry: docs/adding-a-model.md"
    )
