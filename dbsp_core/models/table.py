"""Table of known models with sizes and default videos, and lookup by name or folder."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dbsp_core.models.settings import TOKEN_PIXELS, GenerateSettings
from dbsp_core.models.signature import PIPELINES, ModelSignature, Variant, model_signature, token_grid, variant_of
from dbsp_core.utils.errors import UserError, did_you_mean
from dbsp_core.utils.files import read_text


@dataclass(frozen=True)
class ModelSpec:
    """A published video diffusion transformer, with its model card's settings."""

    name: str  # short name, also used in configs/
    hub: str  # repository on Hugging Face
    aliases: tuple[str, ...]  # other names: repositories, xfuser's registry
    pipeline: str  # diffusers class
    layers: int  # self-attention layers, excluding VACE's for the control video
    heads: int
    head_dim: int
    patch_frames: int  # latent frames per token (patch_size_t)
    ffn: int  # width of the MLP; 1.5 times that for gated MLPs (three matrices)
    cross_text: int  # text tokens of cross-attention; 0: none
    parameters: int  # of all transformers and the text encoder, as published
    video: GenerateSettings  # default video, without prompt and seed; with flow_shift if the scheduler uses it
    paper_thw: tuple[int, int, int] | None = None  # token grid for predicted times, if not the default video's
    variant: Variant = ""
    token_pixels: int = TOKEN_PIXELS  # height and width of a token
    hidden: int | None = None  # hidden size, if not heads times head_dim
    other_tokens: int = 0  # text tokens in self-attention, for pipelines not in `PIPELINES`
    # (F, L, f, l): F + f·k frames make L + l·k latents. None: by the pipeline's `vae_frames`
    frame_groups: tuple[int, int, int, int] | None = None
    sound_tokens: float = 0.0  # sound tokens per frame and channel (of two) in self-attention
    mask: str = "subblock"  # `enable(pipe)` loads configs/NAME-MASK.yaml

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.hub, *self.aliases)

    @property
    def signature(self) -> ModelSignature:
        return ModelSignature(self.pipeline, (self.layers, self.heads, self.head_dim, self.patch_frames), self.variant)

    @property
    def text_tokens(self) -> int:
        """Text and sound tokens in self-attention."""
        if self.pipeline in PIPELINES:
            return PIPELINES[self.pipeline].text_tokens
        return self.other_tokens + 2 * round(self.sound_tokens * (self.video.num_frames or 0))

    @property
    def thw(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the video's token grid."""
        if self.paper_thw is not None:
            return self.paper_thw
        frames, height, width = (getattr(self.video, name) for name in ("num_frames", "height", "width"))
        if self.frame_groups is not None:
            least, least_latents, group, latents = self.frame_groups
            groups = -(-max(0, frames - least) // group)  # pipelines round up
            return least_latents + groups * latents, height // self.token_pixels, width // self.token_pixels
        vae_frames = PIPELINES[self.pipeline].vae_frames
        return token_grid(frames, height, width, self.patch_frames, self.token_pixels, vae_frames)

    @property
    def tokens(self) -> int:
        return self.text_tokens + math.prod(self.thw)

    @property
    def attention_dim(self) -> int:
        return self.heads * self.head_dim


_WAN_NEGATIVE = (
    "Bright tones, overexposed, static, blurred details, subtitles, style, works, paintings, images, static, overall "
    "gray, worst quality, low quality, JPEG compression residue, ugly, incomplete, extra fingers, poorly drawn hands, "
    "poorly drawn faces, deformed, disfigured, misshapen limbs, fused fingers, still picture, messy background, three "
    "legs, many people in the background, walking backwards"
)
"""Negative prompt of Wan's model card and of the example in diffusers' WanPipeline."""

_WAN_14B = ModelSpec(
    name="wan2.1-t2v-14b",
    hub="Wan-AI/Wan2.1-T2V-14B-Diffusers",
    aliases=("Wan2.1-T2V",),
    pipeline="WanPipeline",
    layers=40,
    heads=40,
    head_dim=128,
    patch_frames=1,
    ffn=13824,
    cross_text=512,
    parameters=14_288_491_584 + 5_680_910_336,
    video=GenerateSettings(
        None, _WAN_NEGATIVE, 720, 1280, num_frames=81, steps=50, guidance_scale=5.0, flow_shift=5.0, fps=16
    ),
)


def _like(base: ModelSpec, name: str, hub: str, aliases: tuple[str, ...] = (), **changes: Any) -> ModelSpec:
    """Returns `base` with changes; `video` holds changes of its default video."""
    video = replace(base.video, **changes.pop("video", {}))
    return replace(base, name=name, hub=hub, aliases=aliases, video=video, **changes)


_SMALL = {"height": 480, "width": 832, "flow_shift": 3.0}
_WAN_1_3B = _like(
    _WAN_14B,
    "wan2.1-t2v-1.3b",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    ("Wan2.1-T2V-1.3B",),
    layers=30,
    heads=12,
    ffn=8960,
    parameters=1_418_996_800 + 5_680_910_336,
    video=_SMALL,
)
_COGVIDEOX_1_5 = ModelSpec(
    name="cogvideox1.5-5b",
    hub="zai-org/CogVideoX1.5-5B",
    aliases=("THUDM/CogVideoX1.5-5B", "CogVideoX1.5"),
    pipeline="CogVideoXPipeline",
    layers=42,
    heads=48,
    head_dim=64,
    patch_frames=2,
    ffn=12288,
    cross_text=0,
    parameters=5_570_676_352 + 4_762_310_656,
    video=GenerateSettings(None, "", 768, 1360, num_frames=81, steps=50, guidance_scale=6.0, fps=16),
    paper_thw=(21, 51, 80),  # §6.1
    mask="sparge",
)
_COGVIDEOX = _like(
    _COGVIDEOX_1_5,
    "cogvideox-5b",
    "zai-org/CogVideoX-5b",
    ("THUDM/CogVideoX-5b", "CogVideoX-5B"),
    patch_frames=1,
    parameters=5_570_283_072 + 4_762_310_656,
    video={"height": 480, "width": 720, "num_frames": 49, "fps": 8},
    paper_thw=None,
)
_WAN_2_2 = _like(
    _WAN_14B,
    "wan2.2-t2v-a14b",
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    ("Wan2.2-T2V",),
    variant="two",
    parameters=2 * 14_288_491_584 + 5_680_910_336,
    video={"steps": 40, "guidance_scale": 4.0, "guidance_scale_2": 3.0, "flow_shift": 12.0},
)
_WAN_I2V = _like(
    _WAN_14B,
    "wan2.1-i2v-14b",
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
    ("Wan2.1-I2V",),
    pipeline="WanImageToVideoPipeline",
)
_WAN_I2V_480P = _like(_WAN_I2V, "wan2.1-i2v-14b-480p", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", video=_SMALL)
_WAN_2_2_I2V = _like(
    _WAN_I2V,
    "wan2.2-i2v-a14b",
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    ("Wan2.2-I2V",),
    variant="two",
    parameters=_WAN_2_2.parameters,
    video={"steps": 40, "guidance_scale": 3.5},
)
_WAN_2_2_DISTILLED = _like(
    _WAN_2_2_I2V, "wan2.2-distilled-i2v", _WAN_2_2_I2V.hub, video={"steps": 4, "guidance_scale": 1.0}, mask="sparge"
)
_WAN_2_2_TI2V = _like(
    _WAN_14B,
    "wan2.2-ti2v-5b",
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    ("Wan2.2-TI2V",),
    layers=30,
    heads=24,
    ffn=14336,
    variant="ti2v",
    token_pixels=32,
    video={"height": 704, "num_frames": 121, "fps": 24},
)
_WAN_VACE = _like(_WAN_14B, "wan2.1-vace-14b", "Wan-AI/Wan2.1-VACE-14B-diffusers", pipeline="WanVACEPipeline")
_WAN_VACE_1_3B = _like(_WAN_1_3B, "wan2.1-vace-1.3b", "Wan-AI/Wan2.1-VACE-1.3B-diffusers", pipeline="WanVACEPipeline")
_HUNYUAN = ModelSpec(
    name="hunyuanvideo",
    hub="hunyuanvideo-community/HunyuanVideo",
    aliases=("tencent/HunyuanVideo",),
    pipeline="HunyuanVideoPipeline",
    layers=60,  # 20 with two streams, 40 with one, with equally many weights per token
    heads=24,
    head_dim=128,
    patch_frames=1,
    ffn=12288,
    cross_text=0,
    parameters=12_821_012_544 + 7_505_186_816 + 123_060_480,
    video=GenerateSettings(None, "", 720, 1280, num_frames=129, steps=50, guidance_scale=6.0, fps=24),
)
_HUNYUAN_1_5 = _like(
    _HUNYUAN,
    "hunyuanvideo1.5",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
    ("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", "tencent/HunyuanVideo-1.5"),
    pipeline="HunyuanVideo15Pipeline",
    layers=54,
    heads=16,
    ffn=8192,
    parameters=8_326_608_160 + 7_070_619_136 + 219_314_944,
    video={"num_frames": 121},
)
_LTX_2 = ModelSpec(
    name="ltx-2",
    hub="Lightricks/LTX-2",
    aliases=(),
    pipeline="LTX2Pipeline",
    layers=48,
    heads=32,
    head_dim=128,
    patch_frames=1,
    ffn=16384,  # of the video; ignores the few audio tokens
    cross_text=1024,
    parameters=18_876_174_592 + 11_766_034_176,
    video=GenerateSettings(None, "", 1088, 1920, num_frames=241, steps=30, guidance_scale=3.0, fps=24),
    token_pixels=32,
)
_MINIMAX_H3 = ModelSpec(
    name="minimax-h3",
    hub="MiniMaxAI/MiniMax-H3",
    aliases=(),
    pipeline="MiniMaxH3ModularPipeline",
    layers=50,
    heads=56,
    head_dim=128,
    patch_frames=1,
    ffn=21504,
    cross_text=0,
    parameters=33_122_992_896,
    video=GenerateSettings(None, "", 768, 1344, num_frames=124, steps=49, guidance_scale=1.0, fps=24),
    token_pixels=32,
    hidden=5376,
    other_tokens=512,
    frame_groups=(5, 2, 17, 5),
    sound_tokens=40 / 24,  # 40 latents per second
)
_WANS = (_WAN_14B, _WAN_1_3B, _WAN_2_2, _WAN_I2V, _WAN_I2V_480P, _WAN_2_2_I2V, _WAN_2_2_DISTILLED, _WAN_2_2_TI2V)
_OTHERS = (_COGVIDEOX_1_5, _COGVIDEOX, _HUNYUAN, _HUNYUAN_1_5, _LTX_2, _MINIMAX_H3)
MODEL_SPECS = {spec.name: spec for spec in (*_WANS, _WAN_VACE, _WAN_VACE_1_3B, *_OTHERS)}
"""Models by name. For equal signatures, the first model is the one reported.

Sizes of HunyuanVideo, LTX-2 and MiniMax-H3 are the defaults of diffusers' classes (0.42), and parameters are counted
from them, without H3's text encoder. H3's text length varies, 512 tokens are assumed; its schedule of 50 points has 49
passes. LTX-2's video is ten seconds in 1080p: at its default size of 6,144 tokens, attention takes little time.
"""
_BY_SIGNATURE = {spec.signature: spec for spec in reversed(MODEL_SPECS.values())}  # first of equals wins
GENERATED = {name: spec for name, spec in MODEL_SPECS.items() if spec.pipeline in PIPELINES}
"""Models that `dbsp generate` supports."""

TINY = "tiny-"  # prefix of the names of tiny models, which are made on demand
TINY_MODELS = {
    "wan": ModelSignature("WanPipeline", (4, 12, 24, 1)),
    "wan-trained": ModelSignature("WanPipeline", (4, 12, 24, 1)),
    "wan2.2": ModelSignature("WanPipeline", (4, 12, 24, 1), "two"),
    "wan-ti2v": ModelSignature("WanPipeline", (4, 12, 24, 1), "ti2v"),
    "wan-i2v": ModelSignature("WanImageToVideoPipeline", (4, 12, 24, 1)),
    "wan-vace": ModelSignature("WanVACEPipeline", (4, 12, 24, 1)),
    "cogvideox": ModelSignature("CogVideoXPipeline", (2, 6, 16, 2)),
}
"""Tiny checkpoints for demonstrations and tests, by name."""


def find_model_spec(name: str) -> ModelSpec | None:
    """Returns the model of this name (any case), or None."""
    wanted = name.casefold()
    return next((s for s in MODEL_SPECS.values() if wanted in {known.casefold() for known in s.names}), None)


def tiny_architecture(model: str) -> str | None:
    """Returns the key of `TINY_MODELS` for a model's name ("tiny-wan" → "wan"), or None."""
    name = model.removeprefix(TINY)
    return name if model.startswith(TINY) and name in TINY_MODELS and not Path(model).exists() else None


def signature_of_name(name: str) -> ModelSignature | None:
    """Returns the signature of the published or tiny model of this name, or None."""
    spec, tiny = find_model_spec(name), tiny_architecture(name)
    return spec.signature if spec is not None else None if tiny is None else TINY_MODELS[tiny]


def signature_of_model(model: str | os.PathLike[str]) -> ModelSignature | None:
    """Returns the signature of a model by its name or local folder in diffusers format, or None."""
    text = os.fspath(model)
    known = signature_of_name(text)
    if known is not None:
        return known
    try:
        index = json.loads(read_text(Path(text) / "model_index.json"))
        config = json.loads(read_text(Path(text) / "transformer" / "config.json"))
        variant = variant_of((index.get("transformer_2") or [None])[0] is not None, index)
        return model_signature(str(index["_class_name"]), config, variant)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def published_model(signature: ModelSignature) -> ModelSpec | None:
    """Returns the first published model with this signature, or None."""
    return _BY_SIGNATURE.get(signature)


def model_title(signature: ModelSignature, class_name: str | None = None) -> str:
    """Returns a model's name if known, else its class (default: the pipeline's) and sizes, for messages."""
    spec = published_model(signature)
    if spec is not None:
        return spec.name
    tiny = next((name for name, tiny_signature in TINY_MODELS.items() if tiny_signature == signature), None)
    if tiny is not None:
        return f"{TINY}{tiny}"
    layers, heads, head_dim, _ = signature.sizes
    named = f"a {class_name or signature.pipeline}"
    if not heads or not head_dim:  # a class with other configuration keys
        return named
    return f"{named} with {layers} layers and {heads} heads of {head_dim}"


def unknown_model(name: str) -> UserError:
    """Returns the error for an unknown model name."""
    return UserError(f"unknown model {name!r}{did_you_mean(name, MODEL_SPECS)}; use one of {', '.join(MODEL_SPECS)}")
