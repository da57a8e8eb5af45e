"""The images and videos of one packed call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.cost.sequence_cost import LayerSize
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.grid import Video
from dbsp_core.planning.bags import BagConfig
from dbsp_core.planning.sequences import SequencePlan
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError

Size = tuple[int, int, int]  # frames, rows and columns


@dataclass(frozen=True, eq=False, repr=False)
class Condition:
    """Conditions of one sequence."""

    timesteps: torch.Tensor  # [1], or [tokens]
    text: torch.Tensor  # float[n, d]
    image: torch.Tensor | None = None  # float[m, e], if the model uses it
    pooled: torch.Tensor | None = None  # float[p], if the model uses it
    guidance: torch.Tensor | None = None  # float[1], if the model uses it


@dataclass(frozen=True)
class SampleSpec:
    """Samples supported by a transformer's configuration."""

    channels: int  # channels of latents
    patch: Size  # frames, rows and columns of latents per token
    text: int  # width of prompt embeddings
    image: int | None = None  # width of image embeddings; None: not used
    pooled: int | None = None  # width of the pooled text embedding; None: not used
    guidance: bool = False  # True if the guidance scale is an input (distilled models)
    token_timesteps: bool = False  # True if each token may have its own timestep
    images_only: bool = False  # True if latents must have one frame


@dataclass(frozen=True, eq=False, repr=False)
class PackedSample:
    """One image or video with the transformer's inputs for it.

    Attributes:
        latents: float[C, F, H, W]; an image has one frame. Image conditioning is in the channels, as in the model's
            pipeline.
        timestep: A number or one-element tensor in the transformer's units (Flux: 0 to 1), or a tensor [tokens] for
            models with a timestep per token (Wan2.2 TI2V).
        text: float[n, d], prompt embeddings, with padding for models trained with it (Wan, Flux), without for
            HunyuanVideo.
        image: float[m, e], image embeddings, if the model uses them (Wan2.1 I2V).
        pooled: float[p], pooled prompt embedding, if the model uses it (Flux, HunyuanVideo).
        guidance: Guidance scale of distilled models in the transformer's units (FLUX.1-dev: the scale; HunyuanVideo:
            1000 times the scale).
    """

    latents: torch.Tensor
    timestep: torch.Tensor | float
    text: torch.Tensor
    image: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    guidance: float | None = None

    @property
    def size(self) -> Size:
        """(frames, height, width) of the latents."""
        frames, height, width = self.latents.shape[1:]
        return frames, height, width

    @property
    def condition(self) -> Condition:
        timesteps = self._on_device(self.timestep)
        guidance = None if self.guidance is None else self._on_device(self.guidance)
        return Condition(timesteps, self.text, self.image, self.pooled, guidance)

    def _on_device(self, value: torch.Tensor | float) -> torch.Tensor:
        """Returns a tensor [n] on the latents' device; a number is filled in without a copy that synchronizes."""
        device = self.latents.device
        if isinstance(value, torch.Tensor):
            return value.to(device).reshape(-1)
        return torch.full((1,), value, device=device)


@dataclass(frozen=True, eq=False, repr=False)
class Sharing:
    """Layout of a packed call's tokens for one rank."""

    group: SequenceGroup  # the ranks that share the sequences
    layout: SequenceLayout  # of tokens on them
    slots: int  # this rank's number of slots, padding included
    first_stream: int = 0  # slots of the stream that comes first, if text is in the sequence; else 0
    session: AttentionSession | None = None  # of this rank's bag; None: it has no sequences
    plan: SequencePlan | None = None  # the bag of each sequence; None: all ranks share every sequence

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the session's attention; without sequences, of padding, so that all parameters are used."""
        if self.session is None:
            return F.scaled_dot_product_attention(q, k, v, scale=scale)
        return self.session.attend(layer, q, k, v, scale=scale, gate=gate)


@dataclass(frozen=True, eq=False, repr=False)
class PackedBatch:
    """Inputs of a packed call."""

    samples: tuple[PackedSample, ...]  # this rank's samples
    sizes: tuple[Size, ...]  # of latents of all sequences, in packing order
    device: torch.device  # of the samples
    timestep: torch.Tensor | float  # the largest timestep, or another number that falls from step to step
    loaders: tuple[int, ...] | None = None  # rank that loads each sequence; None: every rank has all samples
    kinds: tuple[Mapping[str, tuple[list[int], torch.dtype]], ...] = ()
    """With loaders, shape and dtype of each tensor of the sequences' `Condition`, by name."""
    debug: bool = False  # True to compare tensors across ranks before every exchange
    videos: tuple[Video, ...] = ()  # each sequence as a `Video`
    bags: BagConfig | None = None  # bags that share sequences; None: all ranks share every sequence
    layer: LayerSize | None = None  # size of the transformer's layers, for planning bags
    sharing: Sharing | None = None  # None: not known yet


def check_samples(samples: Sequence[PackedSample], spec: SampleSpec) -> None:
    """Raises UserError for samples that do not fit the transformer."""
    for number, sample in enumerate(samples):
        if message := _message(sample, spec):
            raise UserError(f"sample {number}: {message}")


def _message(sample: PackedSample, spec: SampleSpec) -> str | None:
    latents, text = sample.latents, sample.text
    if latents.ndim != 4 or latents.shape[0] != spec.channels or not latents.numel():
        return f"latents must be [{spec.channels}, frames, height, width], got {list(latents.shape)}"
    if spec.images_only and latents.shape[1] != 1:
        return f"latents of this image model must have one frame, got {latents.shape[1]}"
    if any(side % part for side, part in zip(sample.size, spec.patch, strict=True)):
        return f"latents must be divisible into patches of {list(spec.patch)}, got {list(sample.size)}"
    if text.ndim != 2 or text.shape[1] != spec.text or not len(text) or not text.is_floating_point():
        return f"text must be float[tokens, {spec.text}], got {text.dtype} {list(text.shape)}"
    for subject, field, value, taken in (
        ("image embeddings are", "image", sample.image, spec.image is not None),
        ("the pooled text embedding is", "pooled", sample.pooled, spec.pooled is not None),
        ("the guidance scale is", "guidance", sample.guidance, spec.guidance),
    ):
        if (value is not None) != taken:
            return f"{subject} {f'missing; give it as {field}' if taken else f'not for this model; remove {field}'}"
    image, pooled = sample.image, sample.pooled
    if image is not None and (image.ndim != 2 or image.shape[1] != spec.image or image.dtype != text.dtype):
        return f"image must be [tokens, {spec.image}], of the dtype of text; got {list(image.shape)}"
    if pooled is not None and (list(pooled.shape) != [spec.pooled] or pooled.dtype != text.dtype):
        return f"pooled must be [{spec.pooled}], of the dtype of text; got {list(pooled.shape)}"
    tokens, times = math.prod(sample.size) // math.prod(spec.patch), len(sample.condition.timesteps)
    if times not in ((1, tokens) if spec.token_timesteps else (1,)):
        each = f", or {tokens}, one a token" if spec.token_timesteps else ""
        return f"timestep must be one number{each}; got {times}"
    return None
