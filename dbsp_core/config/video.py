"""What is to be generated: prompt, size, steps and the like."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from dbsp_core.config.models import Checkpoint
from dbsp_core.utils.errors import SettingError, bad_value

__all__ = ["VideoSettings"]

_LEAST = {
    "height": 16,
    "width": 16,
    "num_frames": 1,
    "steps": 1,
    "fps": 1,
    "seed": 0,
    "guidance_scale": 0.0,
    "flow_shift": 0.0,
}
_STRIDES = {"WanPipeline": 4, "CogVideoXPipeline": 8}
"""By pipeline, how many frames each further step of `num_frames` takes: Wan's VAE makes 4 of one latent frame;
CogVideoX decodes two of those at a time."""


@dataclass(frozen=True)
class VideoSettings:
    """One video. None: as the checkpoint is usually run.

    height, width:  pixels, multiples of 16
    num_frames:     4k + 1 for Wan, 8k + 1 for CogVideoX
    steps:          of the denoising
    guidance_scale: of classifier-free guidance; 1 or less: none
    flow_shift:     of the scheduler, for models of flow matching
    seed:           of the noise
    fps:            frames per second of the mp4 file
    Raises ValueError for numbers that no model takes.
    """

    prompt: str | None = None
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    flow_shift: float | None = None
    seed: int | None = None
    fps: int | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise bad_value(self, name, f"must be at least {least}", "video.")
        for name in ("height", "width"):
            value = getattr(self, name)
            if value is not None and value % 16:
                near = max(16, round(value / 16) * 16)
                raise bad_value(self, name, f"must be a multiple of 16, for example {near}", "video.")

    def filled(self, checkpoint: Checkpoint | None) -> VideoSettings:
        """A copy in which everything but the prompt is set, but for flow_shift where the model has its own.

        Raises ValueError for a size that is not given and not known.
        """
        usual: dict[str, Any] = {"steps": 50, "guidance_scale": 5.0, "seed": 42, "fps": 16, "negative_prompt": ""}
        if checkpoint is not None:
            names = {f.name for f in fields(self)} - {"prompt", "seed"}
            usual |= {name: getattr(checkpoint, name) for name in names}
        missing = {name: usual.get(name) for name in (f.name for f in fields(self)) if getattr(self, name) is None}
        full = replace(self, **missing)
        unknown = [name for name in ("height", "width", "num_frames") if getattr(full, name) is None]
        if unknown:
            raise SettingError(
                f"video.{unknown[0]} is not set, and this model is none whose usual size is known; set it in the "
                f"configuration's 'video', or with --set video.{unknown[0]}=…",
                (unknown[0],),
            )
        return full

    def require_frames(self, pipeline: str) -> None:
        """Raises ValueError for a number of frames that a pipeline would change or refuse."""
        stride = _STRIDES.get(pipeline)
        if stride and self.num_frames is not None and (self.num_frames - 1) % stride:
            less = (self.num_frames - 1) // stride * stride + 1
            complaint = f"is not {stride}k + 1, as {pipeline} makes videos; use {less} or {less + stride}"
            raise bad_value(self, "num_frames", complaint, "video.")
