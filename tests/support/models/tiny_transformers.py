"""A tiny transformer of each class that db-SP knows, with random weights, and inputs for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
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

Thw = tuple[int, int, int]


@dataclass(frozen=True)
class Draw:
    """Draws the inputs of a pass over a token grid."""

    thw: Thw
    batch: int
    generator: torch.Generator

    def noise(self, *shape: int) -> torch.Tensor:
        """Returns random numbers of this shape for each item."""
        return torch.randn(self.batch, *shape, generator=self.generator)

    def video(self, channels: int, frames: int | None = None, least: int = 2) -> torch.Tensor:
        """Returns latents of which `least` rows and columns make a token."""
        t, h, w = self.thw
        return self.noise(channels, t if frames is None else frames, least * h, least * w)

    def image_tokens(self, channels: int) -> torch.Tensor:
        return self.noise(self.thw[1] * self.thw[2], channels)

    def full(self, value: float) -> torch.Tensor:
        return torch.full((self.batch,), value)

    def padded(self, tokens: int, padding: int) -> torch.Tensor:
        """Returns the mask of a text of so many tokens, and padding behind them."""
        return (torch.arange(tokens + padding) < tokens).long().expand(self.batch, -1).clone()

    def of(self, *thw: int) -> Draw:
        """Returns the same for another token grid."""
        t, h, w = thw
        return replace(self, thw=(t, h, w))


@dataclass(frozen=True)
class Tiny:
    """One variant of a class: its name in diffusers, its sizes, and the inputs of a pass.

    prepare: what is done to a new one, whose weights would hide mistakes
    """

    cls: str
    sizes: dict[str, Any]
    inputs: Callable[[Draw], dict[str, Any]]
    prepare: Callable[[Any], None] = lambda transformer: None


def _wan(d: Draw) -> dict[str, Any]:
    return {"hidden_states": d.video(4), "timestep": d.full(500), "encoder_hidden_states": d.noise(TEXT, 16)}


def _times_of_tokens(d: Draw) -> torch.Tensor:
    """Returns a timestep for each token, 0 for those of a given first frame."""
    t, h, w = d.thw
    timestep = torch.full((d.batch, t * h * w), 500.0)
    timestep[:, : h * w] = 0
    return timestep


def _ti2v(d: Draw) -> dict[str, Any]:
    return _wan(d) | {"timestep": _times_of_tokens(d)}


def _wan_image(d: Draw) -> dict[str, Any]:
    text = {"encoder_hidden_states": d.noise(512, 16)}  # a number that diffusers takes for granted
    return _wan(d) | text | {"encoder_hidden_states_image": d.noise(17, 20)}


def _animate(d: Draw) -> dict[str, Any]:
    """Returns three frames, of which the first is given; their face is a video of five."""
    t = d.thw[0]
    face = d.noise(3, 4 * (t - 2) + 1, 16, 16)
    given = {"hidden_states": d.video(12), "pose_hidden_states": d.video(4, t - 1), "face_pixel_values": face}
    return _wan(d) | given


def _anyflow(d: Draw) -> dict[str, Any]:
    frames = (d.batch, d.thw[0])
    times = {"timestep": torch.full(frames, 500.0), "r_timestep": torch.full(frames, 300.0)}
    return _wan(d) | times | {"hidden_states": d.video(4).transpose(1, 2)}


def _vace(d: Draw) -> dict[str, Any]:
    control = {"control_hidden_states": d.video(6), "control_hidden_states_scale": torch.tensor([1.0, 0.5])}
    return _wan(d) | control


def _cogvideox(d: Draw, frames_of_token: int = 2) -> dict[str, Any]:
    t, h, w = d.thw
    angles = torch.randn(t * h * w, WIDTH // 2, generator=d.generator).repeat_interleave(2, dim=1)
    video = d.video(4, frames_of_token * t).transpose(1, 2)
    return _wan(d) | {"hidden_states": video, "image_rotary_emb": (angles.cos(), angles.sin())}


def _cogvideox_1_0(d: Draw) -> dict[str, Any]:
    return _cogvideox(d, 1)


def _consisid(d: Draw) -> dict[str, Any]:
    face = {"id_cond": d.noise(10), "id_vit_hidden": [d.noise(4, 12) for _ in range(2)]}
    return _cogvideox(d, 1) | face


def _easyanimate(d: Draw) -> dict[str, Any]:
    return _wan(d) | {"encoder_hidden_states_t5": d.noise(5, 12), "inpaint_latents": d.video(3)}


def _hunyuan(d: Draw) -> dict[str, Any]:
    return {
        "hidden_states": d.video(4, least=1),
        "timestep": d.full(500),
        "encoder_hidden_states": d.noise(TEXT + 4, 16),
        "encoder_attention_mask": d.padded(TEXT, 4),
        "pooled_projections": d.noise(8),
        "guidance": d.full(6000.0),
    }


def _framepack(d: Draw) -> dict[str, Any]:
    history = {"clean": 2, "history_2x": 2, "history_4x": 3}
    given = {f"latents_{name}": d.video(4, frames) for name, frames in history.items()}
    given |= {f"indices_latents_{name}": torch.arange(frames) for name, frames in history.items()}
    video = {"hidden_states": d.video(4), "indices_latents": torch.arange(7, 7 + d.thw[0])}
    return _hunyuan(d) | given | video | {"image_embeds": d.noise(5, 12)}


def _two_texts(d: Draw) -> dict[str, Any]:
    return {
        "timestep": d.full(500.0),
        "encoder_hidden_states": d.noise(10, 16),
        "encoder_attention_mask": d.padded(6, 4),
        "encoder_hidden_states_2": d.noise(6, 32),
        "encoder_attention_mask_2": d.padded(3, 3),
    }


def _hunyuan_15(d: Draw) -> dict[str, Any]:
    return _two_texts(d) | {"hidden_states": d.video(9, least=1), "image_embeds": torch.zeros(d.batch, 5, 12)}


def _hunyuan_15_image(d: Draw) -> dict[str, Any]:
    return _hunyuan_15(d) | {"image_embeds": d.noise(5, 12)}


def _ltx(d: Draw) -> dict[str, Any]:
    t, h, w = d.thw
    text = {"encoder_hidden_states": d.noise(TEXT, 16), "encoder_attention_mask": d.padded(TEXT - 2, 2)}
    video = {"hidden_states": d.noise(t * h * w, 8), "num_frames": t, "height": h, "width": w}
    return text | video | {"timestep": d.full(500)}


def _ltx_image(d: Draw) -> dict[str, Any]:
    positions = torch.stack(torch.meshgrid(*map(torch.arange, d.thw), indexing="ij")).flatten(1).float() * 8
    sizes = dict.fromkeys(("num_frames", "height", "width"))
    return _ltx(d) | sizes | {"video_coords": positions.expand(d.batch, 3, -1), "timestep": _times_of_tokens(d)}


def _ltx2(d: Draw) -> dict[str, Any]:
    text = d.padded(TEXT - 2, 2)
    audio = {"audio_hidden_states": d.noise(AUDIO, 8), "audio_num_frames": AUDIO}
    audio |= {"audio_encoder_hidden_states": d.noise(TEXT, 16), "audio_encoder_attention_mask": text}
    return _ltx(d) | audio | {"encoder_attention_mask": text}


def _ltx23(d: Draw) -> dict[str, Any]:
    """Returns inputs of LTX-2.3 with a first frame, and guidance that skips the first item's attention in layer 0."""
    time = {"timestep": _times_of_tokens(d), "use_cross_timestep": True}
    time |= dict.fromkeys(("audio_timestep", "sigma"), d.full(500.0))
    skipped = {
        "spatio_temporal_guidance_blocks": [0],
        "perturbation_mask": torch.arange(d.batch).clamp(max=1).float(),
    }
    keyframes = torch.zeros(d.batch, time["timestep"].shape[1], 1)
    keyframes[:, ::4] = 1
    return _ltx2(d) | time | skipped | {"video_keyframes_mask": keyframes}


def _grid(d: Draw) -> torch.Tensor:
    """Returns row and column of each token of an image."""
    return torch.cartesian_prod(*map(torch.arange, d.thw[1:]))


def _flux_like(d: Draw, more: int = 0) -> dict[str, Any]:
    """Returns an image and text with positions. more: further numbers of each position"""
    ids = torch.nn.functional.pad(_grid(d).float(), (1, more))
    image = {"hidden_states": d.image_tokens(4), "img_ids": ids, "timestep": d.full(0.5)}
    return image | {"encoder_hidden_states": d.noise(TEXT, 32), "txt_ids": torch.zeros(TEXT, 3 + more)}


def _flux(d: Draw) -> dict[str, Any]:
    return _flux_like(d) | {"pooled_projections": d.noise(32)}


def _flux2(d: Draw) -> dict[str, Any]:
    inputs = _flux_like(d, 1)
    inputs["txt_ids"][:, 3] = torch.arange(TEXT)
    ids = {name: inputs[name].expand(d.batch, -1, -1) for name in ("img_ids", "txt_ids")}
    return inputs | ids | {"guidance": d.full(3.5)}


def _flux_reference(d: Draw) -> dict[str, Any]:
    """Adds an image of another size next to the generated one, which is a grid of its own."""
    inputs, (_, h, w) = _flux(d), d.thw
    other = _flux_like(d.of(1, h - 2, w + 1))
    ids = torch.cat([inputs["img_ids"], other["img_ids"] + torch.tensor([1, 0, 0])])
    return inputs | {"hidden_states": torch.cat([inputs["hidden_states"], other["hidden_states"]], 1), "img_ids": ids}


def _flux3(d: Draw) -> dict[str, Any]:
    return _flux_like(d, 1)


def _flux3_reference(d: Draw) -> dict[str, Any]:
    reference = _flux3(d.of(1, d.thw[1] + 1, d.thw[2] - 1))
    given = {"image_cond_hidden_states": reference["hidden_states"], "image_cond_ids": reference["img_ids"] + 1}
    return _flux3(d) | given | {"target_timestep": d.full(0.25)}


def _krea(d: Draw) -> dict[str, Any]:
    """Puts padding in the middle of text."""
    mask = torch.ones(d.batch, TEXT + 4, dtype=torch.bool)
    mask[:, 3:7] = False
    image = _flux_like(d)
    return {
        "hidden_states": image["hidden_states"],
        "encoder_hidden_states": d.noise(TEXT + 4, 3, 16),
        "encoder_attention_mask": mask,
        "timestep": image["timestep"],
        "position_ids": torch.cat([torch.zeros(TEXT + 4, 3), image["img_ids"]]),
    }


def _ernie(d: Draw) -> dict[str, Any]:
    text = {"text_bth": d.noise(TEXT + 4, 16), "text_lens": d.full(TEXT)}
    return text | {"hidden_states": d.video(4, 1)[:, :, 0], "timestep": d.full(500)}


def _qwen(d: Draw) -> dict[str, Any]:
    text = {"encoder_hidden_states": d.noise(TEXT + 4, 16), "encoder_hidden_states_mask": d.padded(TEXT, 4)}
    image = {"hidden_states": d.image_tokens(16), "img_shapes": [[(1, *d.thw[1:])]] * d.batch}
    return text | image | {"timestep": d.full(0.5)}


def _qwen_edit(d: Draw) -> dict[str, Any]:
    """Adds two images next to the generated one; timesteps of the edited ones are 0."""
    _, h, w = d.thw
    shapes = [(1, h, w), (1, h - 1, w + 1), (1, 2, 3)]
    tokens = torch.cat([d.of(*shape).image_tokens(16) for shape in shapes], 1)
    return _qwen(d) | {"hidden_states": tokens, "img_shapes": [shapes] * d.batch}


def _qwen_layered(d: Draw) -> dict[str, Any]:
    """Returns two layers, and the image that they are of."""
    _, h, w = d.thw
    layers = {"hidden_states": d.noise(3 * h * w, 16), "img_shapes": [[(1, h, w)] * 3] * d.batch}
    return _qwen(d) | layers | {"additional_t_cond": d.full(0)}


def _cosmos(d: Draw) -> dict[str, Any]:
    return _wan(d) | {"fps": 24}


def _cosmos_image(d: Draw) -> dict[str, Any]:
    """Cosmos 2.5 of a given first frame, each frame with a timestep of its own."""
    timestep = torch.full((d.batch, 1, d.thw[0], 1, 1), 0.5)
    timestep[:, :, 0] = 0.1
    given = {"timestep": timestep, "condition_mask": d.video(1)}
    return _cosmos(d) | given | {"encoder_hidden_states": (d.noise(TEXT, 16), d.noise(4, 12))}


def _hunyuan_image(d: Draw) -> dict[str, Any]:
    return _two_texts(d) | {"hidden_states": d.video(4, 1, least=1)[:, :, 0], "guidance": d.full(3500.0)}


def _hunyuan_image_refiner(d: Draw) -> dict[str, Any]:
    image = _hunyuan_image(d) | {"hidden_states": d.video(8, 2, least=1)}
    return {name: value for name, value in image.items() if not name.endswith("_2")}


def _z_image(d: Draw) -> dict[str, Any]:
    """Captions of several lengths are filled up to one."""
    captions = [caption[: TEXT + item] for item, caption in enumerate(d.noise(TEXT + d.batch, 16))]
    return {"x": list(d.video(4, 1)), "t": d.full(0.5), "cap_feats": captions}


def _ltx_condition(d: Draw) -> dict[str, Any]:
    """Adds the tokens of a frame that is given next to the video's own."""
    inputs, more = _ltx_image(d), _ltx_image(d.of(1, *d.thw[1:]))
    joined = (("hidden_states", 1), ("timestep", 1), ("video_coords", 2))
    return inputs | {name: torch.cat([inputs[name], more[name]], dim) for name, dim in joined}


def _minimax_h3(d: Draw) -> dict[str, Any]:
    """Packs [text, an image that is given, audio, video]."""
    (t, h, w), audio = d.thw, 6
    given, video = h * w, t * h * w
    rows = TEXT + given + audio + video
    tags = torch.tensor([1] * TEXT + [0] * given + [2] * audio + [0] * video)
    frame = _grid(d) * 0.5
    positions = torch.zeros(rows, 3, dtype=torch.float64)
    positions[:TEXT, 0] = torch.arange(TEXT)
    positions[TEXT : TEXT + given, 1:] = frame
    positions[TEXT + given : -video, 0] = torch.arange(audio)
    positions[-video:, 0] = TEXT + torch.arange(t).repeat_interleave(h * w)
    positions[-video:, 1:] = frame.repeat(t, 1)
    indices = {name: torch.arange(rows)[tags == tag] for tag, name in enumerate(("video", "text", "audio"))}
    times = (tags == 2).long()
    times[TEXT : TEXT + given] = 2
    return {
        "hidden_states": d.noise(given + video, 16),
        "audio_hidden_states": d.noise(audio, 5),
        "encoder_hidden_states": d.noise(TEXT, 16),
        "timestep": torch.tensor([0.5, 0.2, 1.0]),
        "timestep_indices": times,
        "token_tags": tags,
        "position_ids": positions,
        **{f"{name}_indices": own for name, own in indices.items()},
    }


def _kandinsky(d: Draw) -> dict[str, Any]:
    return {
        "hidden_states": d.video(4).permute(0, 2, 3, 4, 1).contiguous(),
        "encoder_hidden_states": d.noise(TEXT, 16),
        "timestep": d.full(500.0),
        "pooled_projections": d.noise(12),
        "visual_rope_pos": [torch.arange(size) for size in d.thw],
        "text_rope_pos": torch.arange(TEXT),
    }


def _kandinsky_nabla(d: Draw) -> dict[str, Any]:
    """Asks for NABLA as its pipeline does, for a video of whole tiles of 8 × 8 tokens; not for another one."""
    from diffusers import Kandinsky5T2VPipeline

    inputs = _kandinsky(d)
    if d.thw[1] % 8 or d.thw[2] % 8:
        return inputs
    transformer = SimpleNamespace(config=SimpleNamespace(**_KANDINSKY | _NABLA))
    pipe = SimpleNamespace(transformer=transformer, fast_sta_nabla=Kandinsky5T2VPipeline.fast_sta_nabla)
    params = Kandinsky5T2VPipeline.get_sparse_params(pipe, inputs["hidden_states"], torch.device("cpu"))
    return inputs | {"sparse_params": params}


def _kandinsky_sr(d: Draw) -> dict[str, Any]:
    """Makes a latent, an anchor and its mask, of whole tiles of 8 × 8 tokens."""
    whole = d.of(d.thw[0], *(-(-size // 8) * 8 for size in d.thw[1:]))
    return {"hidden_states": whole.video(9).permute(0, 2, 3, 4, 1).contiguous(), "timestep": d.full(500.0)}


def _open_gates(transformer: Any) -> None:
    """Opens gates, which new models have closed, so that no block does anything. Rotary tables are not rounded:
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
_VISUAL = {"in_visual_dim": 4, "out_visual_dim": 4, "patch_size": (1, 2, 2), "num_visual_blocks": 2}
_KANDINSKY = _VISUAL | {"in_text_dim": 16, "in_text_dim2": 12, "num_text_blocks": 1, "axes_dims": (8, 8, 8)}
_KANDINSKY |= {"time_dim": 24, "model_dim": HEADS * WIDTH, "ff_dim": 64}
_KANDINSKY_SR = _VISUAL | {"axes_dims": (8, 8, 8), "time_dim": 24, "model_dim": HEADS * WIDTH, "ff_dim": 64}
_KANDINSKY_SR |= {"nabla_threshold": 0.4, "nabla_window": (1, 1, 3)}
_NABLA = {"attention_type": "nabla", "attention_method": "topcdf", "attention_P": 0.4, "attention_add_sta": True}
_NABLA |= {"attention_wT": 1, "attention_wH": 1, "attention_wW": 3}
_SIZES = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH, "num_layers": 2}
_CHANNELS = {"in_channels": 4, "out_channels": 4}
_ROPE = {"axes_dims_rope": (8, 8, 8)}
_WAN = _SIZES | _CHANNELS | {"text_dim": 16, "freq_dim": 32, "ffn_dim": 64, "rope_max_seq_len": 64}
_WITH_IMAGE = {"image_dim": 20, "added_kv_proj_dim": HEADS * WIDTH}
_FACE = {"in_channels": 12, "latent_channels": 4, "image_dim": None, "inject_face_latents_blocks": 2}
_FACE |= {"motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}, "motion_encoder_size": 16, "motion_style_dim": 8}
_FACE |= {"motion_dim": 4, "motion_encoder_dim": 8, "face_encoder_hidden_dim": 16}
_COGVIDEOX = _SIZES | _CHANNELS | {"time_embed_dim": 16, "text_embed_dim": 16, "sample_width": 16, "sample_height": 16}
_COGVIDEOX |= {"patch_size": 2, "max_text_seq_length": 32, "use_rotary_positional_embeddings": True}
_IDENTITY = {"is_train_face": True, "cross_attn_dim_head": 8, "cross_attn_num_heads": 2, "LFE_id_dim": 10}
_IDENTITY |= {"LFE_vit_dim": 12, "LFE_depth": 2, "LFE_dim_head": 8, "LFE_num_heads": 2, "LFE_num_id_token": 2}
_IDENTITY |= {"LFE_num_querie": 4, "LFE_output_dim": 96, "LFE_num_scale": 2}
_EASYANIMATE = {"attention_head_dim": 32, "in_channels": 7, "patch_size": 2, "time_embed_dim": 16}
_EASYANIMATE |= {"text_embed_dim": 16, "text_embed_dim_t5": 12, "mmdit_layers": 1}
_HUNYUANS = {"out_channels": 4, "num_refiner_layers": 1, "text_embed_dim": 16, "rope_axes_dim": (8, 8, 8)}
_HUNYUANS |= _SIZES | {"patch_size": 1, "patch_size_t": 1}
_HUNYUAN = _HUNYUANS | {"in_channels": 4, "num_single_layers": 2, "guidance_embeds": True, "pooled_projection_dim": 8}
_FRAMEPACK = {"patch_size": 2, "has_image_proj": True, "image_proj_dim": 12, "has_clean_x_embedder": True}
_HUNYUAN_15 = _HUNYUANS | {"in_channels": 9, "text_embed_2_dim": 32, "image_embed_dim": 12, "target_size": 16}
_LTX = _SIZES | {"in_channels": 8, "out_channels": 8, "cross_attention_dim": HEADS * WIDTH, "caption_channels": 16}
_LTX2 = _LTX | {"num_attention_heads": 3, "cross_attention_dim": 3 * WIDTH, "audio_in_channels": 8}
_LTX2 |= {"audio_out_channels": 8, "audio_num_attention_heads": 2, "audio_attention_head_dim": 12}
_LTX2 |= {"audio_cross_attention_dim": 24}
_LTX23 = _LTX2 | {"rope_type": "split", "use_keyframes_abs_pos_embedding": True, "perturbed_attn": True}
_LTX23 |= dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), True)
_IMAGE = _SIZES | {"in_channels": 4, "num_single_layers": 2, "joint_attention_dim": 32}
_FLUX = _IMAGE | _ROPE | {"patch_size": 1, "pooled_projection_dim": 32, "guidance_embeds": False}
_FLUX2 = {"attention_head_dim": 32, "patch_size": 1, "timestep_guidance_channels": 32, "axes_dims_rope": (8,) * 4}
_FLUX3 = _IMAGE | {"cond_in_channels": 4, "num_layers": 1, "timestep_channels": 16, "axes_dims_rope": (6, 6, 6, 6)}
_KREA = {"in_channels": 4, "num_key_value_heads": 3, "intermediate_size": 64, "timestep_embed_dim": 16}
_KREA |= {"text_hidden_dim": 16, "num_text_layers": 3, "text_num_attention_heads": 2, "text_num_key_value_heads": 2}
_KREA |= {"text_intermediate_size": 32}
_ERNIE = {"hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "num_layers": 2, "ffn_hidden_size": 64}
_ERNIE |= {"patch_size": 2, "text_in_dim": 16, "rope_axes_dim": (8, 8, 8)}
_QWEN = _SIZES | _ROPE | {"patch_size": 2, "in_channels": 16, "out_channels": 4, "joint_attention_dim": 16}
_QWEN |= {"guidance_embeds": False}
_COSMOS = _SIZES | _CHANNELS | {"mlp_ratio": 2, "text_embed_dim": 16, "concat_padding_mask": False}
_COSMOS |= {"adaln_lora_dim": 4, "max_size": (4, 32, 32), "patch_size": (1, 2, 2)}
_COSMOS_IMAGE = {"in_channels": 5, "extra_pos_embed_type": None, "img_context_dim_in": 12}
_COSMOS_IMAGE |= {"img_context_num_tokens": 4, "img_context_dim_out": HEADS * WIDTH}
_HUNYUAN_IMAGE = _SIZES | _CHANNELS | {"num_single_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 16}
_HUNYUAN_IMAGE |= {"guidance_embeds": True}
_REFINER = {"in_channels": 8, "patch_size": (1, 1, 1), "rope_axes_dim": (8, 8, 8)}
_Z_IMAGE = {"in_channels": 4, "dim": HEADS * WIDTH, "n_layers": 2, "n_refiner_layers": 1, "n_heads": HEADS}
_Z_IMAGE |= {"n_kv_heads": HEADS, "cap_feat_dim": 16, "axes_dims": [8, 8, 8], "axes_lens": [128, 32, 32]}
_MINIMAX_H3 = _SIZES | {"hidden_size": 48, "num_refiner_layers": 1, "ffn_dim": 64, "in_channels": 4}
_MINIMAX_H3 |= {"audio_in_channels": 5, "patch_size": (1, 2, 2), "text_dim": 16, "freq_dim": 32}
_MINIMAX_H3 |= {"time_embed_hidden_dim": 48, "time_embed_dim": 24, "rope_freq_dim": 4}
_WAN_CLASS, _LTX_CLASS, _FLUX_CLASS = "WanTransformer3DModel", "LTXVideoTransformer3DModel", "FluxTransformer2DModel"
_HUNYUAN_15_CLASS, _QWEN_CLASS = "HunyuanVideo15Transformer3DModel", "QwenImageTransformer2DModel"
_IMAGE_CLASS, _KANDINSKY_CLASS = "HunyuanImageTransformer2DModel", "Kandinsky5Transformer3DModel"
TINY = {
    "wan": Tiny(_WAN_CLASS, _WAN, _wan),
    "wan-i2v": Tiny(_WAN_CLASS, _WAN | _WITH_IMAGE, _wan_image),
    "wan-ti2v": Tiny(_WAN_CLASS, _WAN, _ti2v),
    "vace": Tiny(
        "WanVACETransformer3DModel", _WAN | {"num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 6}, _vace
    ),
    "animate": Tiny("WanAnimateTransformer3DModel", _WAN | _FACE, _animate),
    "anyflow": Tiny("AnyFlowTransformer3DModel", _WAN, _anyflow),
    "skyreels": Tiny("SkyReelsV2Transformer3DModel", _WAN, _wan),
    "chronoedit": Tiny("ChronoEditTransformer3DModel", _WAN, _wan),
    "cogvideox": Tiny(
        "CogVideoXTransformer3DModel",
        _COGVIDEOX | {"sample_frames": 9, "patch_size_t": 2, "patch_bias": False},
        _cogvideox,
    ),
    "cogvideox1.0": Tiny("CogVideoXTransformer3DModel", _COGVIDEOX | {"sample_frames": 9}, _cogvideox_1_0),
    "consisid": Tiny("ConsisIDTransformer3DModel", _COGVIDEOX | _IDENTITY, _consisid),
    "easyanimate": Tiny("EasyAnimateTransformer3DModel", _SIZES | _CHANNELS | _EASYANIMATE, _easyanimate),
    "hunyuan": Tiny("HunyuanVideoTransformer3DModel", _HUNYUAN, _hunyuan),
    "framepack": Tiny("HunyuanVideoFramepackTransformer3DModel", _HUNYUAN | _FRAMEPACK, _framepack),
    "hunyuan1.5": Tiny(_HUNYUAN_15_CLASS, _HUNYUAN_15 | {"task_type": "t2v"}, _hunyuan_15),
    "hunyuan1.5-i2v": Tiny(_HUNYUAN_15_CLASS, _HUNYUAN_15 | {"task_type": "i2v"}, _hunyuan_15_image),
    "ltx": Tiny(_LTX_CLASS, _LTX, _ltx),
    "ltx-i2v": Tiny(_LTX_CLASS, _LTX, _ltx_image),
    "ltx-condition": Tiny(_LTX_CLASS, _LTX, _ltx_condition),
    "ltx2": Tiny("LTX2VideoTransformer3DModel", _LTX2, _ltx2),
    "ltx2.3": Tiny("LTX2VideoTransformer3DModel", _LTX23, _ltx23),
    "flux": Tiny(_FLUX_CLASS, _FLUX, _flux),
    "flux-reference": Tiny(_FLUX_CLASS, _FLUX, _flux_reference),
    "flux2": Tiny("Flux2Transformer2DModel", _IMAGE | _FLUX2, _flux2),
    "flux3": Tiny("Flux3Transformer2DModel", _FLUX3, _flux3),
    "flux3-reference": Tiny("Flux3Transformer2DModel", _FLUX3 | {"flow_map": True}, _flux3_reference),
    "longcat-image": Tiny("LongCatImageTransformer2DModel", _IMAGE | {"axes_dims_rope": [8, 8, 8]}, _flux_like),
    "ovis": Tiny("OvisImageTransformer2DModel", _IMAGE | _ROPE | {"out_channels": 4}, _flux_like),
    "krea2": Tiny("Krea2Transformer2DModel", _SIZES | _ROPE | _KREA, _krea),
    "ernie-image": Tiny("ErnieImageTransformer2DModel", _CHANNELS | _ERNIE, _ernie),
    "qwen": Tiny(_QWEN_CLASS, _QWEN, _qwen),
    "qwen-edit": Tiny(_QWEN_CLASS, _QWEN | {"zero_cond_t": True}, _qwen_edit),
    "qwen-layered": Tiny(
        _QWEN_CLASS, _QWEN | {"use_layer3d_rope": True, "use_additional_t_cond": True}, _qwen_layered
    ),
    "cosmos": Tiny("CosmosTransformer3DModel", _COSMOS, _cosmos),
    "cosmos2.5": Tiny("CosmosTransformer3DModel", _COSMOS | _COSMOS_IMAGE, _cosmos_image),
    "hunyuan-image": Tiny(
        _IMAGE_CLASS, _HUNYUAN_IMAGE | {"text_embed_2_dim": 32, "rope_axes_dim": (12, 12)}, _hunyuan_image
    ),
    "hunyuan-image-refiner": Tiny(_IMAGE_CLASS, _HUNYUAN_IMAGE | _REFINER, _hunyuan_image_refiner),
    "z-image": Tiny("ZImageTransformer2DModel", _Z_IMAGE, _z_image),
    "minimax-h3": Tiny("MiniMaxH3Transformer3DModel", _MINIMAX_H3, _minimax_h3),
    "kandinsky5": Tiny(_KANDINSKY_CLASS, _KANDINSKY, _kandinsky, _open_gates),
    "kandinsky6-sr": Tiny("Kandinsky6SRTransformer3DModel", _KANDINSKY_SR, _kandinsky_sr, _open_gates),
    "kandinsky5-nabla": Tiny(_KANDINSKY_CLASS, _KANDINSKY | _NABLA, _kandinsky_nabla, _open_gates),
}
"""By a name for tests."""


def make_tiny_transformer(name: str, seed: int = 0, **options: Any) -> Any:
    """Returns a transformer with the same weights for the same seed, on every rank."""
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
    """Returns the arguments of a forward pass over a token grid; images have its rows and columns."""
    draw = Draw(thw, batch, torch.Generator().manual_seed(seed))
    return TINY[name].inputs(draw) | {"return_dict": False}


_BY_NUMBER = ("vace", "animate", "consisid", "ltx2.3")
"""Models whose configuration or inputs name layers by number."""
_LAYERS = dict.fromkeys(("num_layers", "num_single_layers", "num_visual_blocks", "n_layers"), 1)


def make_brief_transformer(name: str, **options: Any) -> Any:
    """Returns a transformer with one layer of each kind, and with three heads where nothing else says six."""
    sizes = TINY[name].sizes
    fewer = {} if name in _BY_NUMBER else {part: count for part, count in _LAYERS.items() if part in sizes}
    if "num_attention_heads" in sizes and HEADS * WIDTH not in sizes.values() and name != "consisid":
        fewer["num_attention_heads"] = 3
    return make_tiny_transformer(name, **fewer | options)
