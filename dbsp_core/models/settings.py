"""`generate` settings: prompt, size, steps and so on of a video, and the dtype of the weights."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from dbsp_core.utils.errors import SettingError, require_value
from dbsp_core.utils.schema import read_path, require_choice

TOKEN_PIXELS = 16  # pixels per token side: VAE factor 8 times patch size 2 in most models
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")

_LARGEST_SIDE = 1 << 16
_RANGES = {
    "num_frames": (1, 1_000_000),
    "steps": (1, 10_000),
    "fps": (1, 1000),
    "seed": (0, 2**63 - 1),
    "guidance_scale": (0, 10_000),
    "guidance_scale_2": (0, 10_000),
    "flow_shift": (0, 10_000),
}
"""Range of each number: beyond any real use, and within every library's integer range."""


def side_message(pixels: int, token: int = TOKEN_PIXELS) -> str | None:
    """Returns the error message about a video's height or width, or None."""
    if 0 < pixels <= _LARGEST_SIDE and pixels % token == 0:
        return None
    if pixels > _LARGEST_SIDE:
        return f"must be at most {_LARGEST_SIDE:,}"
    near = max(1, round(pixels / token)) * token
    return f"must be a multiple of {token}, for example {near}"


@dataclass(frozen=True)
class GenerateSettings:
    """One video to generate; None: the checkpoint's default. Raises SettingError for numbers out of range.

    Attributes:
        prompt: What the video should show; may be empty.
        negative_prompt: What the video should not show.
        height: Pixels, a multiple of 16 (32 for Wan2.2 TI2V).
        width: As height.
        num_frames: 4k + 1 for Wan, 8k + 1 for CogVideoX.
        steps: Number of denoising steps.
        guidance_scale: Scale of classifier-free guidance; at most 1: no guidance and half the work.
        flow_shift: Shift of a flow-matching scheduler.
        seed: Seed of the noise (default 42); gives the same video on any number of ranks.
        fps: Frames per second of the mp4 file.
        guidance_scale_2: Guidance scale of Wan2.2's second transformer. None: guidance_scale, if set.
        image: File of the first frame, for image-to-video; scaled and cropped to the video's size.
        last_image: File of the last frame: required by VACE, optional for image-to-video except in xDiT.
        dtype: Dtype of the weights. `auto`: bfloat16 on an accelerator, else float32.
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
    dtype: str = "auto"

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            require_value(self, name, value is None or value >= least, f"must be at least {least}", "generate.")
            require_value(self, name, value is None or value <= most, f"must be at most {most:,}", "generate.")
        for name in ("height", "width"):
            value = getattr(self, name)
            message = None if value is None else side_message(value)
            require_value(self, name, message is None, str(message), "generate.")
        require_choice("dtype", self.dtype, DTYPES, "generate.")

    def filled(self, usual: GenerateSettings | None) -> GenerateSettings:
        """Returns a copy with all settings but prompt and images filled in from the model's `usual` video, if known.

        flow_shift stays None if the model's scheduler sets it. Raises SettingError if the size is unknown.
        """
        usual = usual or GenerateSettings(negative_prompt="", steps=50, guidance_scale=5.0, fps=16)
        usual = replace(usual, seed=42 if usual.seed is None else usual.seed)
        missing = [f.name for f in fields(self) if getattr(self, f.name) is None]
        if self.guidance_scale is not None and "guidance_scale_2" in missing:  # it applies to both transformers
            missing.remove("guidance_scale_2")
        values: dict[str, Any] = {name: getattr(usual, name) for name in missing}
        full = replace(self, **values)
        for name in ("height", "width", "num_frames"):
            if getattr(full, name) is None:
                raise SettingError(
                    f"generate.{name} is not set, and no default size is known for this model; set it in the "
                    f"configuration's 'generate', or with --{name.replace('_', '-')}",
                    (name,),
                )
        return full

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype for loading a checkpoint."""
        if self.dtype == "auto":
            return torch.bfloat16 if torch.accelerator.is_available() else torch.float32
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype
