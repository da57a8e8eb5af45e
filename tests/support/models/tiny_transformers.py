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
    places = torch.stack(torch.meshgrid(*map(torch.arange, thw), indexing="ij")).flatten(1).float() * 8
    sizes = dict.fromkeys(("num_frames", "height", "width"))
    timestep = _ti2v(noise, thw, batch)["timestep"]
    return _ltx(noise, thw, batch) | sizes | {"video_coords": places.expand(batch, 3, -1), "timestep": timestep}


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
    """With an image of another size beside the generated one, which is a grid of its own."""
    inputs, (_, h, w) = _flux(noise, thw, batch), thw
    ids = _flux(noise, (1, h - 2, w + 1), batch)["img_ids"] + torch.tensor([1, 0, 0])
    tokens = noise(batch, h * w + len(ids), 4)
    return inputs | {"hidden_states": tokens, "img_ids": torch.cat([inputs["img_ids"], ids])}


def _qwen(noise: Noise, thw: Thw, batch: int) -> dict[str, Any]:
    _, h, w = thw
    return {
        "hidden_states": noise(batch, h * w, 16),
        "encoder_hidden_states": noise(batch, TEXT + 4, 16),
        "encoder_hidden_states_mask": _padded(batch, TEXT, 4),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, h, w)]] * batch,
    }


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
    "skyreels": Tiny("SkyReelsV2Transformer3DModel", _SIZES | _WAN, _wan),
    "chronoedit": Tiny("ChronoEditTransformer3DModel", _SIZES | _WAN, _wan),
    "cogvideox": Tiny(
        "CogVideoXTransformer3DModel",
        _SIZES
        | {"in_channels": 4, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 16, "sample_frames": 9}
        | {"sample_width": 16, "sample_height": 16, "patch_size": 2, "patch_size_t": 2, "patch_bias": False}
        | {"max_text_seq_length": 32, "use_rotary_positional_embeddings": True},
        _cogvideox,
    ),
    "hunyuan": Tiny(
        "HunyuanVideoTransformer3DModel",
        _SIZES
        | _HUNYUAN
        | {"in_channels": 4, "num_single_layers": 2, "guidance_embeds": True, "pooled_projection_dim": 8}
        | {"rope_axes_dim": (8, 8, 8)},
        _hunyuan,
    ),
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
    "flux": Tiny("FluxTransformer2DModel", _SIZES | _IMAGE | _FLUX_SIZES, _flux),
    "flux-reference": Tiny("FluxTransformer2DModel", _SIZES | _IMAGE | _FLUX_SIZES, _flux_reference),
    "flux2": Tiny(
        "Flux2Transformer2DModel",
        _SIZES
        | _IMAGE
        | {"attention_head_dim": 32, "patch_size": 1, "timestep_guidance_channels": 32, "axes_dims_rope": (8,) * 4},
        _flux2,
    ),
    "qwen": Tiny(
        "QwenImageTransformer2DModel",
        _SIZES
        | {"patch_size": 2, "in_channels": 16, "out_channels": 4, "joint_attention_dim": 16, "guidance_embeds": False}
        | {"axes_dims_rope": (8, 8, 8)},
        _qwen,
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
        import diffusers  # which looks up its names when they are asked for, not for two threads at a time

        torch.manual_seed(seed)
        transformer = getattr(diffusers, TINY[name].cls)(**TINY[name].sizes | options).eval()
        TINY[name].prepare(transformer)
        return transformer


def tiny_inputs(name: str, thw: Thw = (3, 5, 7), batch: int = 1, seed: int = 1) -> dict[str, Any]:
    """The arguments of a forward pass over a token grid; images have its rows and columns."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return TINY[name].inputs(noise, thw, batch) | {"return_dict": False}
