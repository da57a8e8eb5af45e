"""The images and videos of one packed call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dbsp_core.utils.errors import UserError

__all__ = ["Condition", "PackedBatch", "PackedSample", "Size", "check_samples"]

Size = tuple[int, int, int]
"""Frames, rows and columns."""


@dataclass(frozen=True, eq=False, repr=False)
class Condition:
    """What a sequence is denoised by.

    Attributes:
        timesteps: [1], or [tokens].
        text: float[n, d].
        image: float[m, e], where the model has it.
    """

    timesteps: torch.Tensor
    text: torch.Tensor
    image: torch.Tensor | None


@dataclass(frozen=True, eq=False, repr=False)
class PackedSample:
    """One image or video, with all that a transformer is given for it.

    Attributes:
        latents: float[C, F, H, W]; an image has one frame. What is given of the video (image conditioning) is among
            the channels, as the model's pipeline puts it there.
        timestep: A number, or a tensor of one element; or a tensor [tokens], one for each token of the latents, as
            models that are given a first frame have them (Wan2.2 TI2V).
        text: float[n, d], the prompt's embeddings, with padding where the model is used to it, or without.
        image: float[m, e], the image encoder's embeddings, where the model has them (Wan2.1 I2V).
    """

    latents: torch.Tensor
    timestep: torch.Tensor | float
    text: torch.Tensor
    image: torch.Tensor | None = None

    def __repr__(self) -> str:
        image = "" if self.image is None else f", {len(self.image)} of an image"
        return f"<PackedSample of latents {list(self.latents.shape)}, {len(self.text)} tokens of text{image}>"

    @property
    def size(self) -> Size:
        """(frames, height, width) of the latents."""
        frames, height, width = self.latents.shape[1:]
        return frames, height, width

    @property
    def condition(self) -> Condition:
        timesteps = torch.as_tensor(self.timestep, device=self.latents.device).reshape(-1)
        return Condition(timesteps, self.text, self.image)


@dataclass(frozen=True, eq=False, repr=False)
class PackedBatch:
    """What a transformer is called with for several samples at once.

    Attributes:
        samples: Those that this rank is given.
        sizes: Latents' frames, rows and columns of all sequences of the call, in the order in which they are packed.
        device: Of the samples.
        timestep: The largest of all, or another number that falls from step to step of a denoising.
        loaders: By sequence, the rank that is given it; None: every rank is given all.
        lengths: By sequence, tokens of text and of image, and number of timesteps, where loaders differ.
        text_type: Of text and image, where loaders differ.
    """

    samples: tuple[PackedSample, ...]
    sizes: tuple[Size, ...]
    device: torch.device
    timestep: torch.Tensor | float
    loaders: tuple[int, ...] | None = None
    lengths: tuple[Size, ...] = ()
    text_type: torch.dtype = torch.float32

    def grids(self, patch: Sequence[int]) -> list[Size]:
        """Each sequence's token grid (t, h, w)."""
        t, h, w = patch
        return [(frames // t, height // h, width // w) for frames, height, width in self.sizes]


def check_samples(samples: Sequence[PackedSample], config: Any) -> None:
    """Raises UserError for samples that a transformer of this configuration cannot be given."""
    channels, patch, text_width, image_width = (
        getattr(config, name) for name in ("in_channels", "patch_size", "text_dim", "image_dim")
    )
    for number, sample in enumerate(samples):
        latents, text, image = sample.latents, sample.text, sample.image
        complaint = None
        if latents.ndim != 4 or latents.shape[0] != channels or not latents.numel():
            complaint = f"latents must be [{channels}, frames, height, width], got {list(latents.shape)}"
        elif any(side % part for side, part in zip(sample.size, patch, strict=True)):
            complaint = f"latents of {list(sample.size)} do not divide into patches of {list(patch)}"
        elif text.ndim != 2 or text.shape[1] != text_width or not len(text):
            complaint = f"text must be [tokens, {text_width}], got {list(text.shape)}"
        elif (image is None) != (image_width is None):
            complaint = f"image embeddings are {'not for this model' if image_width is None else 'missing'}"
        elif image is not None and (image.ndim != 2 or image.shape[1] != image_width or image.dtype != text.dtype):
            complaint = f"image must be [tokens, {image_width}], of the dtype of text; got {list(image.shape)}"
        else:
            tokens, times = math.prod(sample.size) // math.prod(patch), len(sample.condition.timesteps)
            if times not in (1, tokens):
                complaint = f"timestep must be one number, or {tokens}, one a token; got {times}"
        if complaint:
            raise UserError(f"sample {number}: {complaint}")
