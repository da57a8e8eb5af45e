"""Model signatures: diffusers' pipeline class, the transformer's sizes, and the variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dbsp_core.models.settings import TOKEN_PIXELS


@dataclass(frozen=True)
class Pipeline:
    """Properties of a diffusers pipeline class."""

    title: str  # name in messages
    frame_stride: int  # step of valid frame counts: CogVideoX decodes two latent frames of 4 at a time
    text_tokens: int  # text tokens in self-attention
    text_varies: bool = False  # True if the number depends on the prompt; `text_tokens` is then typical
    images: tuple[int, int] = (0, 0)  # fewest and most input images (first frame, last frame)
    from_image: str | None = None  # diffusers' class for the same checkpoint that starts from an image
    from_video: str | None = None  # diffusers' class for the same checkpoint that starts from a video
    float32_vae: bool = True  # True if diffusers' examples load the VAE in float32, other parts in bfloat16
    vae_frames: int = 4  # frames per latent frame after the first
    token_pixels: int = TOKEN_PIXELS  # height and width of a token, where no published model differs
    sound: bool = False  # True if it generates sound
    passes: int = 2  # forward passes per step with guidance; 1: the scale is an input of the transformer

    def frames_message(self, frames: int) -> str | None:
        """Returns the error message for a number of frames that the pipeline would change or reject, or None."""
        if frames > 0 and (frames - 1) % self.frame_stride == 0:
            return None
        less = max(0, (frames - 1) // self.frame_stride) * self.frame_stride + 1
        return f"must be {self.frame_stride}k + 1 for {self.title}, for example {less} or {less + self.frame_stride}"


PIPELINES = {
    "WanPipeline": Pipeline(
        "Wan text-to-video", 4, 0, from_image="WanImageToVideoPipeline", from_video="WanVideoToVideoPipeline"
    ),
    "WanImageToVideoPipeline": Pipeline("Wan image-to-video", 4, 0, images=(1, 2)),
    "WanVACEPipeline": Pipeline("Wan VACE", 4, 0, images=(2, 2)),
    "CogVideoXPipeline": Pipeline(
        "CogVideoX text-to-video", 8, 226, from_video="CogVideoXVideoToVideoPipeline", float32_vae=False
    ),
    "HunyuanVideoPipeline": Pipeline(
        "HunyuanVideo text-to-video", 4, 256, text_varies=True, float32_vae=False, passes=1
    ),
    "HunyuanVideo15Pipeline": Pipeline("HunyuanVideo-1.5 text-to-video", 4, 256, text_varies=True, float32_vae=False),
    # Two guidance passes in one batch, one with perturbed attention, one with video and audio apart.
    "LTX2Pipeline": Pipeline(
        "LTX-2",
        8,
        0,
        images=(0, 1),
        from_image="LTX2ImageToVideoPipeline",
        float32_vae=False,
        vae_frames=8,
        token_pixels=32,
        passes=4,
        sound=True,
    ),
}
"""Pipelines by diffusers class name."""


def token_grid(
    num_frames: int,
    height: int,
    width: int,
    patch_frames: int,
    token_pixels: int = TOKEN_PIXELS,
    vae_frames: int = 4,
) -> tuple[int, int, int]:
    """Returns the frames, rows and columns of tokens of a video of this size in frames and pixels."""
    latent_frames = (num_frames - 1) // vae_frames + 1
    return -(-latent_frames // patch_frames), height // token_pixels, width // token_pixels


Variant = Literal["", "two", "ti2v"]
"""Distinguishes pipelines of one class and size: "two" alternating transformers (Wan2.2 A14B), "ti2v" with a timestep
per token (Wan2.2 TI2V), or neither."""


@dataclass(frozen=True)
class ModelSignature:
    """Identifies a model: diffusers' pipeline class, the transformer's sizes, and the variant."""

    pipeline: str
    sizes: tuple[int, int, int, int]  # (layers, heads, head_dim, patch_frames), see `ModelSpec`
    variant: Variant = ""

    @property
    def images(self) -> tuple[int, int]:
        """Fewest and most input images (first frame, last frame)."""
        if self.variant == "ti2v":
            return 0, 1
        return PIPELINES[self.pipeline].images if self.pipeline in PIPELINES else (0, 0)

    def images_message(self, count: int) -> str | None:
        """Returns the error message for a number of images, or None."""
        least, most = self.images
        if least <= count <= most:
            return None
        if most == 0:
            return "generates from text only; remove the image"
        number = most if least == most else f"{least} to {most}"
        return f"takes {number} images, the first frame and then the last, got {count}; give each with --image FILE"


def variant_of(two: bool, index: Mapping[str, Any]) -> Variant:
    """Returns the variant of a pipeline with one or `two` transformers and this model_index.json."""
    return "ti2v" if index.get("expand_timesteps") else "two" if two else ""


def model_signature(pipeline: str, config: Mapping[str, Any], variant: Variant = "") -> ModelSignature:
    """Returns the signature of a transformer by its pipeline's class and its configuration, as in diffusers."""
    patch = config.get("patch_size")
    frames = patch[0] if isinstance(patch, (list, tuple)) else config.get("patch_size_t") or 1
    names = ("num_layers", "num_single_layers", "num_attention_heads", "attention_head_dim")
    layers, single_layers, heads, head_dim = (int(config.get(name) or 0) for name in names)
    if variant == "ti2v":  # same checkpoint in both pipelines
        pipeline = "WanPipeline"
    return ModelSignature(pipeline, (layers + single_layers, heads, head_dim, int(frames)), variant)
