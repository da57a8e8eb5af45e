"""The published checkpoints that db-SP knows: their names, and how they are usually run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CHECKPOINTS", "Checkpoint", "checkpoint_of", "find_checkpoint"]


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


def checkpoint_of(pipeline: str, config: Any) -> Checkpoint | None:
    """The checkpoint that a transformer is of, by its sizes, or None.

    pipeline: its pipeline's class name
    config:   the transformer's configuration, a mapping as diffusers keeps it, or as it stands in config.json
    """
    patch = config.get("patch_size")
    frames = patch[0] if isinstance(patch, (list, tuple)) else config.get("patch_size_t") or 1
    sizes = (config.get("num_layers"), config.get("num_attention_heads"), config.get("attention_head_dim"), frames)
    return next((c for c in CHECKPOINTS if c.pipeline == pipeline and c.sizes == sizes), None)
