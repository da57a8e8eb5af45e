"""KnapFormer's synthetic data streams (§4.1): codes, and sequences drawn from them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from dbsp_core.utils.errors import UserError

_CODE = re.compile(r"g(\d{1,9})b(\d{1,9})i(\d{1,9})(?:f(\d{1,9}))?(?:s([01]))?", re.IGNORECASE)
TOKEN_PIXELS = 16
"""Height and width of a token: a VAE that shrinks by 8, patches of 2."""
_NARROWEST = 0.75
"""Least ratio of a video's height to its width."""
TEXT, AREA = (0, 392), (0.96, 1.04)
"""What codes leave open, as KnapFormer's published simulator has it: least and most text tokens of a sequence, and
least and most of what a batch's aspect ratio multiplies the tokens of a frame by. Both are drawn uniformly."""
ASSUMED = "assumed: 0 to 392 text tokens a sequence, frames' tokens times 0.96 to 1.04 for aspect ratios"


@dataclass(frozen=True)
class Stream:
    """Code g{gpus}b{batch}i{resolution}f{frames}s{clip}: what the data loaders of `gpus` neighbouring ranks bring.

    Attributes:
        gpus: Ranks.
        batch: Sequences of each rank.
        resolution: Height and width, pixels.
        frames: Of pixels; 1 is an image.
        clip: Whether frames are a video clip, 17 of which make 5 latent ones, rather than single images or key frames.
    """

    gpus: int
    batch: int
    resolution: int
    frames: int = 1
    clip: bool = False

    @property
    def latent_frames(self) -> int:
        return max(self.frames * 5 // 17, 1) if self.clip else self.frames

    @property
    def side(self) -> int:
        """Tokens in height and in width."""
        return self.resolution // TOKEN_PIXELS

    def __str__(self) -> str:
        return f"g{self.gpus}b{self.batch}i{self.resolution}f{self.frames}s{int(self.clip)}"


def parse_streams(text: str) -> tuple[Stream, ...]:
    """Reads codes with commas between. Left out, f is 1, and s is 1 for more than one frame.

    Raises:
        UserError: For other text.
    """
    streams = []
    for code in text.split(","):
        match = _CODE.fullmatch(code.strip())
        if match is None:
            raise UserError(f"expected streams as g4b1i512f85s1, got {code.strip()!r}; see KnapFormer §4.1")
        gpus, batch, resolution, frames = (int(match[n] or 1) for n in range(1, 5))
        streams.append(Stream(gpus, batch, resolution, frames, frames > 1 if match[5] is None else match[5] == "1"))
    return tuple(streams)


@dataclass(frozen=True, eq=False)
class DrawnSequences:
    """The sequences of one step.

    Attributes:
        text: int64[n], text tokens.
        thw: int64[n, 3], the token grid.
        loader: int64[n], the rank that loads each sequence.
    """

    text: np.ndarray
    thw: np.ndarray
    loader: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """int64[n]: text and video together."""
        tokens: np.ndarray = self.text + self.thw.prod(axis=1)
        return tokens

    def __len__(self) -> int:
        return len(self.text)


def draw(streams: tuple[Stream, ...], world: int, seed: int) -> DrawnSequences:
    """One step's sequences, the streams repeated until all ranks have one.

    Raises:
        UserError: When the streams' GPUs do not divide `world`, or there is no sequence at all.
    """
    gpus = sum(stream.gpus for stream in streams)
    if world % gpus:
        raise UserError(
            f"the sequences' streams are for {gpus} GPUs, which do not divide {world}; use a multiple of {gpus}"
        )
    rng = np.random.default_rng(seed)
    text: list[np.ndarray] = []
    thw: list[tuple[int, int, int]] = []
    loader: list[int] = []
    by_rank = [stream for stream in streams for _ in range(stream.gpus)]
    for rank in range(world):
        stream = by_rank[rank % gpus]
        height, width = _frame(stream.side, rng.uniform(*AREA))
        text.append(rng.integers(TEXT[0], TEXT[1] + 1, stream.batch))
        thw += [(stream.latent_frames, height, width)] * stream.batch
        loader += [rank] * stream.batch
    if not thw:
        raise UserError("there are no sequences: every stream has a batch of 0; give b at least 1 in one of them")
    return DrawnSequences(np.concatenate(text), np.array(thw, dtype=np.int64), np.array(loader, dtype=np.int64))


def _frame(side: int, area: float) -> tuple[int, int]:
    """Height and width in tokens, of those from 3 : 4 to square the closest to side² · area tokens."""
    target = max(int(side * side * area), 1)
    heights = np.arange(max(1, round(side * _NARROWEST)), side + 1)
    widths = np.maximum(np.rint(target / heights).astype(np.int64), 1)
    best = int(np.abs(heights * widths - target).argmin())
    return int(heights[best]), int(widths[best])
