"""The published checkpoints that db-SP knows: their names, and how they are usually run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbsp_core.utils.errors import UserError

__all__ = [
    "CHECKPOINTS",
    "MODEL_SPECS",
    "TINY",
    "TINY_MODELS",
    "Checkpoint",
    "ModelSignature",
    "ModelSpec",
    "checkpoint_of",
    "find_checkpoint",
    "model_signature",
    "require_model",
    "signature_of_model",
    "tiny_architecture",
]

TINY = "tiny-"
"""Before a key of `TINY_MODELS`, the name of a model that is made where it is needed."""

_WAN_NEGATIVE = (
    "Bright tones, overexposed, static, blurred details, subtitles, style, works, paintings, images, static, overall "
    "gray, worst quality, low quality, JPEG compression residue, ugly, incomplete, extra fingers, poorly drawn hands, "
    "poorly drawn faces, deformed, disfigured, misshapen limbs, fused fingers, still picture, messy background, three "
    "legs, many people in the background, walking backwards"
)
"""From Wan's model card and the example in diffusers' WanPipeline."""


@dataclass(frozen=True)
class Checkpoint:
    """One published pipeline, with the settings of its model card.

    name:     short; also names its files in configs/
    hub:      repository on Hugging Face
    aliases:  other names, of other repositories or in xfuser's registry
    pipeline: diffusers' class
    sizes:    (layers, heads, head_dim, patch_size_t) of the transformer, which tell a local folder apart
    flow_shift: of the scheduler, or None for the one it comes with
    """

    name: str
    hub: str
    aliases: tuple[str, ...]
    pipeline: str
    sizes: tuple[int, int, int, int]
    height: int
    width: int
    num_frames: int
    fps: int
    guidance_scale: float
    steps: int = 50
    flow_shift: float | None = None
    negative_prompt: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.hub, *self.aliases)


CHECKPOINTS = (
    Checkpoint(
        name="wan2.1-t2v-14b",
        hub="Wan-AI/Wan2.1-T2V-14B-Diffusers",
        aliases=("Wan2.1-T2V",),
        pipeline="WanPipeline",
        sizes=(40, 40, 128, 1),
        height=720,
        width=1280,
        num_frames=81,
        fps=16,
        guidance_scale=5.0,
        flow_shift=5.0,
        negative_prompt=_WAN_NEGATIVE,
    ),
    Checkpoint(
        name="wan2.1-t2v-1.3b",
        hub="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        aliases=("Wan2.1-T2V-1.3B",),
        pipeline="WanPipeline",
        sizes=(30, 12, 128, 1),
        height=480,
        width=832,
        num_frames=81,
        fps=16,
        guidance_scale=5.0,
        flow_shift=3.0,
        negative_prompt=_WAN_NEGATIVE,
    ),
    Checkpoint(
        name="cogvideox1.5-5b",
        hub="zai-org/CogVideoX1.5-5B",
        aliases=("THUDM/CogVideoX1.5-5B", "CogVideoX1.5"),
        pipeline="CogVideoXPipeline",
        sizes=(42, 48, 64, 2),
        height=768,
        width=1360,
        num_frames=81,
        fps=16,
        guidance_scale=6.0,
    ),
    Checkpoint(
        name="cogvideox-5b",
        hub="zai-org/CogVideoX-5b",
        aliases=("THUDM/CogVideoX-5b", "CogVideoX-5B"),
        pipeline="CogVideoXPipeline",
        sizes=(42, 48, 64, 1),
        height=480,
        width=720,
        num_frames=49,
        fps=8,
        guidance_scale=6.0,
    ),
)


def find_checkpoint(name: str) -> Checkpoint | None:
    """The checkpoint of that name, upper or lower case, or None."""
    wanted = name.casefold()
    return next((c for c in CHECKPOINTS if wanted in {known.casefold() for known in c.names}), None)


@dataclass(frozen=True)
class ModelSignature:
    """What tells a pipeline's checkpoint apart: diffusers' class and the transformer's sizes (see `Checkpoint`)."""

    pipeline: str
    sizes: tuple[int, int, int, int]

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The published checkpoint that it is of, or None."""
        return next((c for c in CHECKPOINTS if (c.pipeline, c.sizes) == (self.pipeline, self.sizes)), None)

    def __str__(self) -> str:
        if self.checkpoint is not None:
            return self.checkpoint.name
        for name, tiny in TINY_MODELS.items():
            if tiny == self:
                return f"{TINY}{name}"
        layers, heads, head_dim, _ = self.sizes
        return f"a {self.pipeline} with {layers} layers and {heads} heads of {head_dim}"


TINY_MODELS = {
    "wan": ModelSignature("WanPipeline", (4, 12, 24, 1)),
    "wan-trained": ModelSignature("WanPipeline", (4, 12, 24, 1)),
    "cogvideox": ModelSignature("CogVideoXPipeline", (2, 6, 16, 2)),
}
"""Tiny checkpoints that db-SP can make for demonstrations and tests, by name."""


def model_signature(pipeline: str, config: Mapping[str, Any]) -> ModelSignature:
    """Of a transformer.

    pipeline: its pipeline's class name
    config:   the transformer's configuration, a mapping as diffusers keeps it, or as it stands in config.json
    """
    patch = config.get("patch_size")
    frames = patch[0] if isinstance(patch, (list, tuple)) else config.get("patch_size_t") or 1
    names = ("num_layers", "num_attention_heads", "attention_head_dim")
    layers, heads, head_dim = (int(config.get(name) or 0) for name in names)
    return ModelSignature(pipeline, (layers, heads, head_dim, int(frames)))


def checkpoint_of(pipeline: str, config: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint that a transformer is of, by its sizes, or None. See `model_signature`."""
    return model_signature(pipeline, config).checkpoint


def tiny_architecture(model: str) -> str | None:
    """The key of `TINY_MODELS` that a model's name asks for ("tiny-wan": "wan"), or None."""
    name = model.removeprefix(TINY)
    return name if model.startswith(TINY) and name in TINY_MODELS and not Path(model).exists() else None


def signature_of_model(model: str | os.PathLike[str]) -> ModelSignature | None:
    """Of a checkpoint's name, a tiny model's, or a local folder in diffusers' form; None for what is neither."""
    text = os.fspath(model)
    checkpoint, tiny = find_checkpoint(text), tiny_architecture(text)
    if checkpoint is not None:
        return ModelSignature(checkpoint.pipeline, checkpoint.sizes)
    if tiny is not None:
        return TINY_MODELS[tiny]
    try:
        index = json.loads((Path(text) / "model_index.json").read_text())
        config = json.loads((Path(text) / "transformer" / "config.json").read_text())
        return model_signature(str(index["_class_name"]), config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@dataclass(frozen=True)
class ModelSpec:
    """A video diffusion transformer at its usual resolution.

    layers, heads: of self-attention;  head_dim: the width of a head
    ffn:         width of the MLP
    thw:         frames, rows and columns of the video's token grid
    text_tokens: that stand in the self-attention's sequence
    cross_text:  text tokens that cross-attention looks at; 0: there is none
    preset:      of dbsp_core.sources.synthetic.presets, whose masks stand for its own
    steps:       of a denoising
    forwards:    passes a step, the two of classifier-free guidance; guidance in a batch counts as two
    """

    name: str
    layers: int
    heads: int
    head_dim: int
    ffn: int
    thw: tuple[int, int, int]
    text_tokens: int
    cross_text: int
    preset: str
    steps: int = 50
    forwards: int = 2

    @property
    def tokens(self) -> int:
        return self.text_tokens + math.prod(self.thw)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def calls(self) -> int:
        """Forward passes of one video."""
        return self.steps * self.forwards

    @property
    def linear_flops(self) -> float:
        """FLOP of one forward pass but for self-attention's scores: projections, MLP, cross-attention.

        The keys and values of cross-attention's text are left out: 512 tokens beside tens of thousands.
        """
        projections = 4 * self.width**2 + 2 * self.width * self.ffn
        if self.cross_text:
            projections += 2 * self.width**2 + 2 * self.width * self.cross_text
        return 2.0 * self.layers * self.tokens * projections

    @property
    def dense_attention_flops(self) -> float:
        """FLOP of the scores and values of self-attention in one forward pass, all of them."""
        return 4.0 * self.layers * self.tokens**2 * self.width


MODEL_SPECS = {
    spec.name: spec
    for spec in (
        ModelSpec("wan2.1-t2v-14b", 40, 40, 128, 13824, (21, 45, 80), 0, 512, "wan2.1-t2v-14b"),
        ModelSpec("wan2.1-t2v-1.3b", 30, 12, 128, 8960, (21, 30, 52), 0, 512, "wan2.1-t2v-14b"),
        ModelSpec("cogvideox1.5-5b", 42, 48, 64, 12288, (21, 51, 80), 226, 0, "cogvideox1.5-5b"),
    )
}
"""By name: Wan2.1 14B at 720×1280 and 1.3B at 480×832, 81 frames; CogVideoX1.5 as the paper runs it (§6.1)."""


def require_model(name: str) -> ModelSpec:
    """The model of that name. Raises ValueError when there is none."""
    if name not in MODEL_SPECS:
        raise UserError(f"unknown model {name!r}; use one of {', '.join(MODEL_SPECS)}")
    return MODEL_SPECS[name]
