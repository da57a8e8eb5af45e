"""The models that `dbsp simulate` knows: sizes from their published configurations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dbsp_core.errors import UserError

__all__ = ["ZOO", "ModelSpec", "require_model"]


@dataclass(frozen=True)
class ModelSpec:
    """A video diffusion transformer at its usual resolution.

    layers, heads: of self-attention;  head_dim: the width of a head
    ffn:         width of the MLP
    thw:         frames, rows and columns of the video's token grid
    text_tokens: that stand in the self-attention's sequence
    cross_text:  text tokens that cross-attention looks at; 0: there is none
    preset:      of dbsp_core.sources.presets, whose masks stand for its own
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


ZOO = {
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
    if name not in ZOO:
        raise UserError(f"unknown model {name!r}; use one of {', '.join(ZOO)}")
    return ZOO[name]
