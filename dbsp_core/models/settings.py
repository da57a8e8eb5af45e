"""What is to be generated: the model, and prompt, size, steps and the like of the video."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from dbsp_core.utils.errors import SettingError, bad_value
from dbsp_core.utils.schema import read_path, require_choice

__all__ = ["DTYPES", "TOKEN_PIXELS", "GenerateSettings", "VideoSettings", "side_complaint"]

TOKEN_PIXELS = 16
"""Height and width of a token: 8 of the VAE times 2 of the patch, in most models."""
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")

_LEAST = {
    "num_frames": 1,
    "steps": 1,
    "fps": 1,
    "seed": 0,
    "guidance_scale": 0,
    "guidance_scale_2": 0,
    "flow_shift": 0,
}
_LARGEST_SIDE = 1 << 16
_MOST = {
    "num_frames": 1_000_000,
    "steps": 10_000,
    "fps": 1000,
    "seed": 2**63 - 1,
    "guidance_scale": 10_000,
    "guidance_scale_2": 10_000,
    "flow_shift": 10_000,
}
"""More than anybody makes, and little enough for every library to count with."""


def side_complaint(pixels: int, token: int = TOKEN_PIXELS) -> str | None:
    """What is wrong with a video's height or width; None: nothing."""
    if 0 < pixels <= _LARGEST_SIDE and pixels % token == 0:
        return None
    if pixels > _LARGEST_SIDE:
        return f"must be at most {_LARGEST_SIDE:,}"
    near = max(1, round(pixels / token)) * token
    return f"must be a multiple of {token}, for example {near}"


@dataclass(frozen=True)
class VideoSettings:
    """One video; what is None is as the checkpoint is usually run.

    Raises SettingError for numbers that no model takes.

    Attributes:
        height: Pixels, a multiple of 16 (of 32 for Wan2.2 TI2V), as is `width`.
        num_frames: 4k + 1 for Wan, 8k + 1 for CogVideoX.
        steps: Number of denoising steps.
        guidance_scale: Scale of classifier-free guidance; 1 or less: none.
        flow_shift: Shift of the scheduler, for models of flow matching.
        fps: Frames per second of the mp4 file.
        guidance_scale_2: Scale in the steps of a second transformer.
        image: File of the first frame, for models that make videos from images.
        last_image: File of the last frame.
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
    guidance_scale_2: float | None = None
    image: str | None = field(default=None, metadata={"read": read_path})
    last_image: str | None = field(default=None, metadata={"read": read_path})

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise bad_value(self, name, f"must be at least {least}", "video.")
            if value is not None and not value <= _MOST[name]:
                raise bad_value(self, name, f"must be at most {_MOST[name]:,}", "video.")
        for name in ("height", "width"):
            value = getattr(self, name)
            complaint = None if value is None else side_complaint(value)
            if complaint is not None:
                raise bad_value(self, name, complaint, "video.")

    def filled(self, usual: VideoSettings | None) -> VideoSettings:
        """A copy in which everything but prompt and images is set, from the model's `usual` video where that is known.

        flow_shift stays None where the model's scheduler has its own. Raises SettingError for an unknown size.
        """
        usual = usual or VideoSettings(negative_prompt="", steps=50, guidance_scale=5.0, fps=16)
        missing = [f.name for f in fields(self) if getattr(self, f.name) is None]
        values: dict[str, Any] = {name: 42 if name == "seed" else getattr(usual, name) for name in missing}
        full = replace(self, **values)
        unknown = [name for name in ("height", "width", "num_frames") if getattr(full, name) is None]
        if unknown:
            raise SettingError(
                f"video.{unknown[0]} is not set, and no default size is known for this model; set it in the "
                f"configuration's 'video', or with --set video.{unknown[0]}=…",
                (unknown[0],),
            )
        return full


@dataclass(frozen=True)
class GenerateSettings:
    """What a configuration says besides how attention is computed: which model, and what is made with it.

    Attributes:
        model: The checkpoint that the file's settings are for, a name or a folder (see dbsp_core.models.table):
            attaching to another one is refused; None: for any.
        dtype: Type of its weights as loaded; "auto" is bfloat16 on an accelerator, float32 without.
        video: A mapping such as {height: 480, width: 832, steps: 50}.
    """

    model: str | None = field(default=None, metadata={"read": read_path})
    dtype: str = "auto"
    video: VideoSettings = field(default_factory=VideoSettings)

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, DTYPES)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in which a checkpoint is loaded."""
        if self.dtype == "auto":
            return torch.bfloat16 if torch.accelerator.is_available() else torch.float32
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype
