"""A tiny transformer of each class that db-SP knows, with random weights, and inputs for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

HEADS = 6
WIDTH = 24
TEXT = 9
"""Tokens of text that count."""
AUDIO = 11
"""Tokens of audio."""
LATENTS = {"in_channels": 16, "out_channels": 16, "text_dim": 32}
"""Sizes with which Wan's transformers fit the VAE and the text encoder of its tiny pipeline."""
_DRAWING = threading.Lock()  # torch's generator is one for all threads

_SIZES = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH, "num_layers": 2}
_WAN = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 64, "rope_max_seq_len": 64}
_IMAGE = {"in_channels": 4, "num_single_layers": 2, "joint_attention_dim": 32}
_HUNYUAN = {"out_channels": 4, "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 16}

Thw = tuple[int, int, int]
Noise = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Tiny:
    """One variant of a class: its name in diffusers, its sizes, and inputs(noise, thw, batch) for a pass.

    prepare: what is done to a new one, whose weights would hide mistakes
    """

    cls: str
    sizes: dict[str, Any]
    inputs: Callable[[Noise, Thw, int], dict[str, Any]]
    prepare: Callable[[Any], None] = lambda transformer: None


def _wan(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    t, h, w = thw
    return {
        "hidden_states": noise(batch, 4, t, 2 * h, 2 * w),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": noise(batch, TEXT, 16),
    }


def _ti2v(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    t, h, w = thw
    timestep = torch.full((batch, t * h * w), 500.0)
    timestep[:, : h * w] = 0  # of the given first frame
    return _wan(noise, thw, batch) | {"timestep": timestep}


def _wan_image(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    return _wan(noise, thw, batch) | {
        "encoder_hidden_states": noise(batch, 512, 16),  # a number that diffusers takes for granted
        "encoder_hidden_states_image": noise(batch, 17, 20),
    }


def _animate(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    """Three frames, of which the first is given; their face is a video of five."""
    t, h, w = thw
    return _wan(noise, thw, batch) | {
        "hidden_states": noise(batch, 12, t, 2 * h, 2 * w),
        "pose_hidden_states": noise(batch, 4, t - 1, 2 * h, 2 * w),
        "face_pixel_values": noise(batch, 3, 4 * (t - 2) + 1, 16, 16),
    }


def _anyflow(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    t, h, w = thw
    return {
        "hidden_states": noise(batch, t, 4, 2 * h, 2 * w),
        "timestep": torch.full((batch, t), 500.0),
        "r_timestep": torch.full((batch, t), 300.0),
        "encoder_hidden_states": noise(batch, TEXT, 16),
    }


def _vace(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    t, h, w = thw
    control = {"control_hidden_states": noise(batch, 6, t, 2 * h, 2 * w)}
    return _wan(noise, thw, batch) | control | {"control_hidden_states_scale": torch.tensor([1.0, 0.5])}


def _cogvideox(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    t, h, w = thw
    angles = noise(t * h * w, WIDTH // 2).repeat_interleave(2, dim=1)
    return {
        "hidden_states": noise(batch, 2 * t, 4, 2 * h, 2 * w),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": noise(batch, TEXT, 16),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def _consisid(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    t, h, w = thw
    face = {"id_cond": noise(batch, 10), "id_vit_hidden": [noise(batch, 4, 12) for _ in range(2)]}
    return _cogvideox(noise, thw, batch) | face | {"hidden_states": noise(batch, t, 4, 2 * h, 2 * w)}


def _easyanimate(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    t, h, w = thw
    return _wan(noise, thw, batch) | {
        "encoder_hidden_states_t5": noise(batch, 5, 12),
        "inpaint_latents": noise(batch, 3, t, 2 * h, 2 * w),
    }


def _padded(batch: int, tokens: int, padding: int) -> torch.Tensor:
    mask = torch.zeros(batch, tokens + padding, dtype=torch.long)
    mask[:, :tokens] = 1
    return mask


def _hunyuan(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, *thw),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": noise(batch, TEXT + 4, 16),
        "encoder_attention_mask": _padded(batch, TEXT, 4),
        "pooled_projections": noise(batch, 8),
        "guidance": torch.full((batch,), 6000.0),
    }


def _framepack(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    t, h, w = thw
    history = {"clean": (2, 1), "history_2x": (2, 2), "history_4x": (3, 4)}
    given = {f"latents_{name}": noise(batch, 4, frames, 2 * h, 2 * w) for name, (frames, _) in history.items()}
    given |= {f"indices_latents_{name}": torch.arange(frames) for name, (frames, _) in history.items()}
    video = {"hidden_states": noise(batch, 4, t, 2 * h, 2 * w), "indices_latents": torch.arange(7, 7 + t)}
    return _hunyuan(noise, thw, batch) | given | video | {"image_embeds": noise(batch, 5, 12)}


def _hunyuan_15(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 9, *thw),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": noise(batch, 10, 16),
        "encoder_attention_mask": _padded(batch, 6, 4),
        "encoder_hidden_states_2": noise(batch, 6, 32),
        "encoder_attention_mask_2": _padded(batch, 3, 3),
        "image_embeds": torch.zeros(batch, 5, 12),
    }


def _hunyuan_15_image(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    return _hunyuan_15(noise, thw, batch) | {"image_embeds": noise(batch, 5, 12)}


def _ltx(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    t, h, w = thw
    return {
        "hidden_states": noise(batch, t * h * w, 8),
        "encoder_hidden_states": noise(batch, TEXT, 16),
        "timestep": torch.full((batch,), 500),
        "encoder_attention_mask": _padded(batch, TEXT - 2, 2),
        "num_frames": t,
        "height": h,
        "width": w,
    }


def _ltx_image(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    positions = torch.stack(torch.meshgrid(*map(torch.arange, thw), indexing="ij")).flatten(1).float() * 8
    sizes = dict.fromkeys(("num_frames", "height", "width"))
    timestep = _ti2v(noise, thw, batch)["timestep"]
    return _ltx(noise, thw, batch) | sizes | {"video_coords": positions.expand(batch, 3, -1), "timestep": timestep}


def _ltx2(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    text = _padded(batch, TEXT - 2, 2)
    audio = {"audio_hidden_states": noise(batch, AUDIO, 8), "audio_num_frames": AUDIO}
    audio |= {"audio_encoder_hidden_states": noise(batch, TEXT, 16), "audio_encoder_attention_mask": text}
    return _ltx(noise, thw, batch) | audio | {"encoder_attention_mask": text}


def _ltx23(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    """LTX-2.3 of a given first frame, with guidance that skips the first item's attention in the first layer."""
    time = {"timestep": _ti2v(noise, thw, batch)["timestep"], "use_cross_timestep": True}
    time |= dict.fromkeys(("audio_timestep", "sigma"), torch.full((batch,), 500.0))
    skipped = {"spatio_temporal_guidance_blocks": [0], "perturbation_mask": torch.arange(batch).clamp(max=1).float()}
    keyframes = torch.zeros(batch, time["timestep"].shape[1], 1)
    keyframes[:, ::4] = 1
    return _ltx2(noise, thw, batch) | time | skipped | {"video_keyframes_mask": keyframes}


def _flux(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    _, h, w = thw
    ids = torch.zeros(h * w, 3)
    ids[:, 1:] = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1).reshape(-1, 2)
    return {
        "hidden_states": noise(batch, h * w, 4),
        "encoder_hidden_states": noise(batch, TEXT, 32),
        "pooled_projections": noise(batch, 32),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT, 3),
    }


def _flux2(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    inputs = _flux(noise, thw, batch)
    del inputs["pooled_projections"]
    text = torch.zeros(TEXT, 4)
    text[:, 3] = torch.arange(TEXT)
    image = torch.nn.functional.pad(inputs["img_ids"], (0, 1))
    ids = {"img_ids": image.expand(batch, -1, -1), "txt_ids": text.expand(batch, -1, -1)}
    return inputs | ids | {"guidance": torch.full((batch,), 3.5)}


def _flux_reference(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    """With an image of another size next to the generated one, which is a grid of its own."""
    inputs, (_, h, w) = _flux(noise, thw, batch), thw
    ids = _flux(noise, (1, h - 2, w + 1), batch)["img_ids"] + torch.tensor([1, 0, 0])
    tokens = noise(batch, h * w + len(ids), 4)
    return inputs | {"hidden_states": tokens, "img_ids": torch.cat([inputs["img_ids"], ids])}


def _flux_like(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    inputs = _flux(noise, thw, batch)
    del inputs["pooled_projections"]
    return inputs


def _flux3(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    inputs = _flux_like(noise, thw, batch)
    ids = {name: torch.nn.functional.pad(inputs[name], (0, 1)) for name in ("img_ids", "txt_ids")}
    return inputs | ids


def _flux3_reference(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    reference, target = _flux3(noise, (1, thw[1] + 1, thw[2] - 1), batch), torch.full((batch,), 0.25)
    given = {"image_cond_hidden_states": reference["hidden_states"], "image_cond_ids": reference["img_ids"] + 1}
    return _flux3(noise, thw, batch) | given | {"target_timestep": target}


def _krea(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    """Padding is in the middle of text."""
    _, h, w = thw
    mask = torch.ones(batch, TEXT + 4, dtype=torch.bool)
    mask[:, 3:7] = False
    ids = _flux(noise, thw, batch)["img_ids"]
    return {
        "hidden_states": noise(batch, h * w, 4),
        "encoder_hidden_states": noise(batch, TEXT + 4, 3, 16),
        "encoder_attention_mask": mask,
        "timestep": torch.full((batch,), 0.5),
        "position_ids": torch.cat([torch.zeros(TEXT + 4, 3), ids]),
    }


def _ernie(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    _, h, w = thw
    return {
        "hidden_states": noise(batch, 4, 2 * h, 2 * w),
        "timestep": torch.full((batch,), 500),
        "text_bth": noise(batch, TEXT + 4, 16),
        "text_lens": torch.full((batch,), TEXT),
    }


def _qwen(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    _, h, w = thw
    return {
        "hidden_states": noise(batch, h * w, 16),
        "encoder_hidden_states": noise(batch, TEXT + 4, 16),
        "encoder_hidden_states_mask": _padded(batch, TEXT, 4),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, h, w)]] * batch,
    }


def _qwen_edit(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    """With two images next to the generated one; timesteps of the edited ones are 0."""
    _, h, w = thw
    shapes = [(1, h, w), (1, h - 1, w + 1), (1, 2, 3)]
    tokens = noise(batch, sum(t * h * w for t, h, w in shapes), 16)
    return _qwen(noise, thw, batch) | {"hidden_states": tokens, "img_shapes": [shapes] * batch}


def _qwen_layered(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    """Two layers, and the image that they are of."""
    _, h, w = thw
    more = {"hidden_states": noise(batch, 3 * h * w, 16), "img_shapes": [[(1, h, w)] * 3] * batch}
    return _qwen(noise, thw, batch) | more | {"additional_t_cond": torch.zeros(batch, dtype=torch.long)}


def _cosmos(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    return _wan(noise, thw, batch) | {"fps": 24}


def _cosmos_image(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    """Cosmos 2.5 of a given first frame, each frame with a timestep of its own."""
    t, h, w = thw
    timestep = torch.full((batch, 1, t, 1, 1), 0.5)
    timestep[:, :, 0] = 0.1
    given = {"timestep": timestep, "condition_mask": noise(batch, 1, t, 2 * h, 2 * w)}
    return (
        _cosmos(noise, thw, batch) | given | {"encoder_hidden_states": (noise(batch, TEXT, 16), noise(batch, 4, 12))}
    )


def _hunyuan_image(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    _, h, w = thw
    return {
        "hidden_states": noise(batch, 4, h, w),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": noise(batch, 10, 16),
        "encoder_attention_mask": _padded(batch, 6, 4),
        "encoder_hidden_states_2": noise(batch, 6, 32),
        "encoder_attention_mask_2": _padded(batch, 3, 3),
        "guidance": torch.full((batch,), 3500.0),
    }


def _hunyuan_image_refiner(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    image, (_, h, w) = _hunyuan_image(noise, thw, batch), thw
    others = ("timestep", "encoder_hidden_states", "encoder_attention_mask", "guidance")
    return {"hidden_states": noise(batch, 8, 2, h, w)} | {name: image[name] for name in others}


def _z_image(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    """Captions of several lengths are filled up to one."""
    _, h, w = thw
    images, captions = noise(batch, 4, 1, 2 * h, 2 * w), noise(batch, TEXT + batch, 16)
    return {
        "x": list(images),
        "t": torch.full((batch,), 0.5),
        "cap_feats": [caption[: TEXT + item] for item, caption in enumerate(captions)],
    }


def _ltx_condition(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    """With the tokens of a frame that is given next to the video's own."""
    inputs, more = _ltx_image(noise, thw, batch), _ltx_image(noise, (1, *thw[1:]), batch)
    tokens = {name: torch.cat([inputs[name], more[name]], 1) for name in ("hidden_states", "timestep")}
    return inputs | tokens | {"video_coords": torch.cat([inputs["video_coords"], more["video_coords"]], 2)}


def _minimax_h3(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    """Packed as [text, an image that is given, audio, video]."""
    (t, h, w), audio = thw, 6
    given, video = h * w, t * h * w
    rows = TEXT + given + audio + video
    tags = torch.tensor([1] * TEXT + [0] * given + [2] * audio + [0] * video)
    frame = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1).reshape(-1, 2) * 0.5
    positions = torch.zeros(rows, 3, dtype=torch.float64)
    positions[:TEXT, 0] = torch.arange(TEXT)
    positions[TEXT : TEXT + given, 1:] = frame
    positions[TEXT + given : -video, 0] = torch.arange(audio)
    positions[-video:, 0] = TEXT + torch.arange(t).repeat_interleave(h * w)
    positions[-video:, 1:] = frame.repeat(t, 1)
    indices = torch.arange(rows)
    times = (tags == 2).long()
    times[TEXT : TEXT + given] = 2
    return {
        "hidden_states": noise(batch, given + video, 16),
        "audio_hidden_states": noise(batch, audio, 5),
        "encoder_hidden_states": noise(batch, TEXT, 16),
        "timestep": torch.tensor([0.5, 0.2, 1.0]),
        "timestep_indices": times,
        "token_tags": tags,
        "position_ids": positions,
        "video_indices": indices[tags == 0],
        "audio_indices": indices[tags == 2],
        "text_indices": indices[tags == 1],
    }


def _kandinsky(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    t, h, w = thw
    return {
        "hidden_states": noise(batch, t, 2 * h, 2 * w, 4),
        "encoder_hidden_states": noise(batch, TEXT, 16),
        "timestep": torch.full((batch,), 500.0),
        "pooled_projections": noise(batch, 12),
        "visual_rope_pos": [torch.arange(size) for size in thw],
        "text_rope_pos": torch.arange(TEXT),
    }


def _kandinsky_nabla(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    """As its pipeline asks for NABLA, for a video of whole tiles of 8 × 8 tokens; for another one, without."""
    from diffusers import Kandinsky5T2VPipeline

    inputs = _kandinsky(noise, thw, batch)
    if thw[1] % 8 or thw[2] % 8:
        return inputs
    transformer = SimpleNamespace(config=SimpleNamespace(**_KANDINSKY | _NABLA))
    pipe = SimpleNamespace(transformer=transformer, fast_sta_nabla=Kandinsky5T2VPipeline.fast_sta_nabla)
    params = Kandinsky5T2VPipeline.get_sparse_params(pipe, inputs["hidden_states"], torch.device("cpu"))
    return inputs | {"sparse_params": params}


def _open_gates(transformer: Any) -> None:
    """New ones are closed, so that no block does anything. And rotary tables are applied in the model's own dtype:
    rounding q and k to bfloat16, as diffusers does, lets the last bit of a sum change them by 2^-9."""
    from diffusers.models.transformers import transformer_kandinsky

    for name, parameter in transformer.named_parameters():
        if "modulation" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    transformer_kandinsky.torch = _UNROUNDED  # type: ignore[attr-defined]


class _Unrounded(ModuleType):
    """torch, but that bfloat16 is float32."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_UNROUNDED = _Unrounded("torch")
_KANDINSKY = {
    "in_visual_dim": 4,
    "in_text_dim": 16,
    "in_text_dim2": 12,
    "time_dim": 24,
    "out_visual_dim": 4,
    "patch_size": (1, 2, 2),
    "model_dim": HEADS * WIDTH,
    "ff_dim": 64,
    "axes_dims": (8, 8, 8),
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
}
_NABLA = {
    "attention_type": "nabla",
    "attention_P": 0.4,
    "attention_wT": 1,
    "attention_wH": 1,
    "attention_wW": 3,
    "attention_add_sta": True,
    "attention_method": "topcdf",
}
_WAN_CLASS = "WanTransformer3DModel"
_H15_SIZES = _SIZES | _HUNYUAN | {"in_channels": 9, "text_embed_2_dim": 32, "image_embed_dim": 12, "target_size": 16}
_LTX_SIZES = _SIZES | {
    "in_channels": 8,
    "out_channels": 8,
    "cross_attention_dim": HEADS * WIDTH,
    "caption_channels": 16,
}
_LTX2_SIZES = _LTX_SIZES | {
    "num_attention_heads": 3,
    "cross_attention_dim": 3 * WIDTH,
    "audio_in_channels": 8,
    "audio_out_channels": 8,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 12,
    "audio_cross_attention_dim": 24,
}
_LTX23_SIZES = _LTX2_SIZES | {"rope_type": "split", "use_keyframes_abs_pos_embedding": True}
_LTX23_SIZES |= dict.fromkeys(
    ("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod", "perturbed_attn"), True
)
_QWEN_SIZES = _SIZES | {"patch_size": 2, "in_channels": 16, "out_channels": 4, "joint_attention_dim": 16}
_QWEN_SIZES |= {"guidance_embeds": False, "axes_dims_rope": (8, 8, 8)}
_COSMOS_SIZES = _SIZES | {"in_channels": 4, "out_channels": 4, "mlp_ratio": 2, "text_embed_dim": 16}
_COSMOS_SIZES |= {"concat_padding_mask": False, "adaln_lora_dim": 4, "max_size": (4, 32, 32), "patch_size": (1, 2, 2)}
_HUNYUAN_IMAGE_SIZES = _SIZES | {"num_single_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 16}
_HUNYUAN_IMAGE_SIZES |= {"guidance_embeds": True}
_COGVIDEOX_SIZES = _SIZES | {"in_channels": 4, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 16}
_COGVIDEOX_SIZES |= {"sample_width": 16, "sample_height": 16, "patch_size": 2}
_FLUX3_SIZES = {"in_channels": 4, "cond_in_channels": 4, "num_layers": 1, "num_single_layers": 2}
_FLUX3_SIZES |= {"joint_attention_dim": 32, "timestep_channels": 16, "axes_dims_rope": (6, 6, 6, 6)}
_FRAMEPACK = {"patch_size": 2, "has_image_proj": True, "image_proj_dim": 12, "has_clean_x_embedder": True}
_HUNYUAN_SIZES = _SIZES | _HUNYUAN | {"in_channels": 4, "num_single_layers": 2, "guidance_embeds": True}
_HUNYUAN_SIZES |= {"pooled_projection_dim": 8, "rope_axes_dim": (8, 8, 8)}
_FLUX_SIZES = {"patch_size": 1, "pooled_projection_dim": 32, "guidance_embeds": False, "axes_dims_rope": (8, 8, 8)}
TINY = {
    "wan": Tiny(_WAN_CLASS, _SIZES | _WAN, _wan),
    "wan-i2v": Tiny(_WAN_CLASS, _SIZES | _WAN | {"image_dim": 20, "added_kv_proj_dim": HEADS * WIDTH}, _wan_image),
    "wan-ti2v": Tiny(_WAN_CLASS, _SIZES | _WAN, _ti2v),
    "vace": Tiny(
        "WanVACETransformer3DModel",
        _SIZES | _WAN | {"num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 6},
        _vace,
    ),
    "animate": Tiny(
        "WanAnimateTransformer3DModel",
        _SIZES
        | _WAN
        | {"in_channels": 12, "latent_channels": 4, "image_dim": None, "inject_face_latents_blocks": 2}
        | {"motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}, "motion_encoder_size": 16}
        | {"motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 8, "face_encoder_hidden_dim": 16},
        _animate,
    ),
    "anyflow": Tiny("AnyFlowTransformer3DModel", _SIZES | _WAN, _anyflow),
    "skyreels": Tiny("SkyReelsV2Transformer3DModel", _SIZES | _WAN, _wan),
    "chronoedit": Tiny("ChronoEditTransformer3DModel", _SIZES | _WAN, _wan),
    "cogvideox": Tiny(
        "CogVideoXTransformer3DModel",
        _COGVIDEOX_SIZES
        | {"sample_frames": 9, "patch_size_t": 2, "patch_bias": False}
        | {"max_text_seq_length": 32, "use_rotary_positional_embeddings": True},
        _cogvideox,
    ),
    "consisid": Tiny(
        "ConsisIDTransformer3DModel",
        _COGVIDEOX_SIZES
        | {"max_text_seq_length": 32, "use_rotary_positional_embeddings": True, "is_train_face": True}
        | {"cross_attn_dim_head": 8, "cross_attn_num_heads": 2, "LFE_id_dim": 10, "LFE_vit_dim": 12, "LFE_depth": 2}
        | {"LFE_dim_head": 8, "LFE_num_heads": 2, "LFE_num_id_token": 2, "LFE_num_querie": 4, "LFE_output_dim": 96}
        | {"LFE_num_scale": 2},
        _consisid,
    ),
    "easyanimate": Tiny(
        "EasyAnimateTransformer3DModel",
        _SIZES
        | {
            "attention_head_dim": 32,
            "in_channels": 7,
            "out_channels": 4,
            "patch_size": 2,
            "time_embed_dim": 16,
            "text_embed_dim": 16,
        }
        | {"text_embed_dim_t5": 12, "mmdit_layers": 1},
        _easyanimate,
    ),
    "hunyuan": Tiny(
        "HunyuanVideoTransformer3DModel",
        _HUNYUAN_SIZES,
        _hunyuan,
    ),
    "framepack": Tiny("HunyuanVideoFramepackTransformer3DModel", _HUNYUAN_SIZES | _FRAMEPACK, _framepack),
    "hunyuan1.5": Tiny(
        "HunyuanVideo15Transformer3DModel", _H15_SIZES | {"rope_axes_dim": (8, 8, 8), "task_type": "t2v"}, _hunyuan_15
    ),
    "hunyuan1.5-i2v": Tiny(
        "HunyuanVideo15Transformer3DModel",
        _H15_SIZES | {"rope_axes_dim": (8, 8, 8), "task_type": "i2v"},
        _hunyuan_15_image,
    ),
    "ltx": Tiny("LTXVideoTransformer3DModel", _LTX_SIZES, _ltx),
    "ltx-i2v": Tiny("LTXVideoTransformer3DModel", _LTX_SIZES, _ltx_image),
    "ltx-condition": Tiny("LTXVideoTransformer3DModel", _LTX_SIZES, _ltx_condition),
    "ltx2": Tiny("LTX2VideoTransformer3DModel", _LTX2_SIZES, _ltx2),
    "ltx2.3": Tiny("LTX2VideoTransformer3DModel", _LTX23_SIZES, _ltx23),
    "flux": Tiny("FluxTransformer2DModel", _SIZES | _IMAGE | _FLUX_SIZES, _flux),
    "flux-reference": Tiny("FluxTransformer2DModel", _SIZES | _IMAGE | _FLUX_SIZES, _flux_reference),
    "flux2": Tiny(
        "Flux2Transformer2DModel",
        _SIZES
        | _IMAGE
        | {"attention_head_dim": 32, "patch_size": 1, "timestep_guidance_channels": 32, "axes_dims_rope": (8,) * 4},
        _flux2,
    ),
    "flux3": Tiny("Flux3Transformer2DModel", _SIZES | _FLUX3_SIZES, _flux3),
    "flux3-reference": Tiny("Flux3Transformer2DModel", _SIZES | _FLUX3_SIZES | {"flow_map": True}, _flux3_reference),
    "longcat-image": Tiny(
        "LongCatImageTransformer2DModel", _SIZES | _IMAGE | {"axes_dims_rope": [8, 8, 8]}, _flux_like
    ),
    "ovis": Tiny(
        "OvisImageTransformer2DModel",
        _SIZES | _IMAGE | {"out_channels": 4, "axes_dims_rope": (8, 8, 8)},
        _flux_like,
    ),
    "krea2": Tiny(
        "Krea2Transformer2DModel",
        _SIZES
        | {"in_channels": 4, "num_key_value_heads": 3, "intermediate_size": 64, "timestep_embed_dim": 16}
        | {"text_hidden_dim": 16, "num_text_layers": 3, "text_num_attention_heads": 2, "axes_dims_rope": (8, 8, 8)}
        | {"text_num_key_value_heads": 2, "text_intermediate_size": 32},
        _krea,
    ),
    "ernie-image": Tiny(
        "ErnieImageTransformer2DModel",
        {"hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "num_layers": 2, "ffn_hidden_size": 64}
        | {"in_channels": 4, "out_channels": 4, "patch_size": 2, "text_in_dim": 16, "rope_axes_dim": (8, 8, 8)},
        _ernie,
    ),
    "qwen": Tiny(
        "QwenImageTransformer2DModel",
        _QWEN_SIZES,
        _qwen,
    ),
    "qwen-edit": Tiny("QwenImageTransformer2DModel", _QWEN_SIZES | {"zero_cond_t": True}, _qwen_edit),
    "qwen-layered": Tiny(
        "QwenImageTransformer2DModel",
        _QWEN_SIZES | {"use_layer3d_rope": True, "use_additional_t_cond": True},
        _qwen_layered,
    ),
    "cosmos": Tiny("CosmosTransformer3DModel", _COSMOS_SIZES, _cosmos),
    "cosmos2.5": Tiny(
        "CosmosTransformer3DModel",
        _COSMOS_SIZES
        | {"in_channels": 5, "extra_pos_embed_type": None, "img_context_dim_in": 12, "img_context_num_tokens": 4}
        | {"img_context_dim_out": HEADS * WIDTH},
        _cosmos_image,
    ),
    "hunyuan-image": Tiny(
        "HunyuanImageTransformer2DModel",
        _HUNYUAN_IMAGE_SIZES
        | {"in_channels": 4, "out_channels": 4, "text_embed_2_dim": 32, "rope_axes_dim": (12, 12)},
        _hunyuan_image,
    ),
    "hunyuan-image-refiner": Tiny(
        "HunyuanImageTransformer2DModel",
        _HUNYUAN_IMAGE_SIZES
        | {"in_channels": 8, "out_channels": 4, "patch_size": (1, 1, 1), "rope_axes_dim": (8, 8, 8)},
        _hunyuan_image_refiner,
    ),
    "z-image": Tiny(
        "ZImageTransformer2DModel",
        {"in_channels": 4, "dim": HEADS * WIDTH, "n_layers": 2, "n_refiner_layers": 1, "n_heads": HEADS}
        | {"n_kv_heads": HEADS, "cap_feat_dim": 16, "axes_dims": [8, 8, 8], "axes_lens": [128, 32, 32]},
        _z_image,
    ),
    "minimax-h3": Tiny(
        "MiniMaxH3Transformer3DModel",
        _SIZES
        | {"hidden_size": 48, "num_refiner_layers": 1, "ffn_dim": 64, "in_channels": 4, "audio_in_channels": 5}
        | {"patch_size": (1, 2, 2), "text_dim": 16, "freq_dim": 32, "time_embed_hidden_dim": 48}
        | {"time_embed_dim": 24, "rope_freq_dim": 4},
        _minimax_h3,
    ),
    "kandinsky5": Tiny("Kandinsky5Transformer3DModel", _KANDINSKY, _kandinsky, _open_gates),
    "kandinsky5-nabla": Tiny("Kandinsky5Transformer3DModel", _KANDINSKY | _NABLA, _kandinsky_nabla, _open_gates),
}
"""By a name for tests."""


def make_tiny_transformer(name: str, seed: int = 0, **options: Any) -> Any:
    """The same weights for the same seed, on every rank."""
    with _DRAWING, torch.random.fork_rng():
        import diffusers  # here: its names are not all there while another thread imports it

        torch.manual_seed(seed)
        transformer = getattr(diffusers, TINY[name].cls)(**TINY[name].sizes | options).eval()
        for module in transformer.modules():
            if isinstance(module, torch.nn.Linear) and not module.weight.any():  # or what it is given has no effect
                torch.nn.init.xavier_uniform_(module.weight)
        TINY[name].prepare(transformer)
        return transformer


def tiny_inputs(name: str, thw: Thw = (3, 5, 7), batch: int = 1, seed: int = 1) -> dict[str, Any]:
    """The arguments of a forward pass over a token grid; images have its rows and columns."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return TINY[name].inputs(noise, thw, batch) | {"return_dict": False}
