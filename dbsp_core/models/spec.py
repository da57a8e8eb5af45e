"""What is known of a published model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dbsp_core.models.pipelines import PIPELINES, token_grid
from dbsp_core.models.signature import ModelSignature, Variant
from dbsp_core.models.video import TOKEN_PIXELS, VideoSettings

__all__ = ["ModelSpec"]


@dataclass(frozen=True)
class ModelSpec:
    """A published video diffusion transformer, with the settings of its model card.

    Attributes:
        name: Short name, also of its files in dbsp_configs/.
        hub: Repository on Hugging Face.
        aliases: Other names, of other repositories or in xfuser's registry.
        pipeline: Name of diffusers' class.
        layers: Number of self-attention layers, without VACE's few for the control video.
        patch_frames: Latent frames that make one token (patch_size_t).
        ffn: Width of the MLP.
        cross_text: Text tokens that cross-attention looks at; 0: there is none.
        parameters: Number of all transformers' and the text encoder's together, as published.
        preset: Name in `dbsp_core.sources.synthetic.presets` of the masks that are taken for its own.
        video: Its usual video, with all set but prompt and seed, and flow_shift where the scheduler comes with one.
        paper_thw: The token grid that times are predicted for, where that is not the usual video's.
        token_pixels: Height and width of a token.
    """

    name: str
    hub: str
    aliases: tuple[str, ...]
    pipeline: str
    layers: int
    heads: int
    head_dim: int
    patch_frames: int
    ffn: int
    cross_text: int
    parameters: int
    preset: str
    video: VideoSettings
    paper_thw: tuple[int, int, int] | None = None
    variant: Variant = ""
    token_pixels: int = TOKEN_PIXELS

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.hub, *self.aliases)

    @property
    def signature(self) -> ModelSignature:
        return ModelSignature(self.pipeline, (self.layers, self.heads, self.head_dim, self.patch_frames), self.variant)

    @property
    def text_tokens(self) -> int:
        """Text tokens that are part of self-attention's sequence."""
        return PIPELINES[self.pipeline].text_tokens

    @property
    def thw(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the video's token grid."""
        if self.paper_thw is not None:
            return self.paper_thw
        frames, height, width = (getattr(self.video, name) for name in ("num_frames", "height", "width"))
        return token_grid(frames, height, width, self.patch_frames, self.token_pixels)

    @property
    def tokens(self) -> int:
        return self.text_tokens + math.prod(self.thw)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def steps(self) -> int:
        """Steps of a denoising."""
        return self.video.steps or 0

    @property
    def guided(self) -> bool:
        """Whether it runs under classifier-free guidance: with a scale over 1, which distilled models are not."""
        scales = (self.video.guidance_scale, self.video.guidance_scale_2)
        return any(scale is not None and scale > 1 for scale in scales)

    @property
    def calls(self) -> int:
        """Forward passes of one video: two a step under classifier-free guidance, also where they are one batch."""
        return (2 if self.guided else 1) * self.steps

    @property
    def linear_flops(self) -> float:
        """FLOP of one forward pass but for self-attention's scores: projections, MLP, cross-attention.

        The keys and values of cross-attention's text are left out: 512 tokens beside tens of thousands.
        """
        projections = 4 * self.width**2 + 2 * self.width * self.ffn
        if self.cross_text:
            projections += 2 * self.width**2 + 2 * self.width * self.cross_text
        return 2.0 * self.layers * self.tokens * projections
