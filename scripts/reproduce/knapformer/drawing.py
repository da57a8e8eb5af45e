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
        UserError: For text that is none, or sizes that make no tokens.
    """
    return tuple(map(_parse, text.split(",")))


def _parse(code: str) -> Stream:
    match = _CODE.fullmatch(code.strip())
    if match is None:
        raise UserError(
            f"sequences {code.strip()!r} are not of the form g{{G}}b{{B}}i{{R}}f{{F}}s{{S}}: G GPUs with B sequences "
            "each, R pixels square, F frames, S 1 for a clip and 0 for images or key frames; for example g4b1i512f85s1"
        )
    gpus, batch, resolution, frames = (int(match[n] or 1) for n in range(1, 5))
    if min(gpus, frames) < 1 or resolution < TOKEN_PIXELS:
        raise UserError(
            f"sequences {code.strip()!r} need at least one GPU, one frame and {TOKEN_PIXELS} pixels, a token's size"
        )
    most = {"GPUs": (gpus, 4096), "sequences": (gpus * batch, 1 << 16), "pixels": (resolution, 1 << 16)}
    for what, (count, limit) in (most | {"frames": (frames, 1_000_000)}).items():
        if count > limit:
            raise UserError(f"sequences {code.strip()!r} have more than {limit:,} {what}; give fewer")
    return Stream(gpus, batch, resolution, frames, frames > 1 if match[5] is None else match[5] == "1")


@dataclass(frozen=True)
class StreamAssumptions:
    """Assumptions about what codes leave open. The defaults are those of KnapFormer's published simulator.

    Attributes:
        text: Least and most text tokens of a sequence, drawn uniformly.
        area: Least and most of what aspect ratios multiply the tokens of a frame by, drawn uniformly for each batch.
    """

    text: tuple[int, int] = (0, 392)
    area: tuple[float, float] = (0.96, 1.04)

    def __post_init__(self) -> None:
        if not 0 <= self.text[0] <= self.text[1]:
            raise UserError(f"text tokens {self.text} must be a least and a most number, for example 0-392")
        if not 0 < self.area[0] <= self.area[1]:
            raise UserError(f"area factors {self.area} must be a least and a most positive number, such as 0.96-1.04")

    def in_words(self) -> str:
        text, area = (f"{low:g}" if low == high else f"{low:g} to {high:g}" for low, high in (self.text, self.area))
        return f"assumed: {text} text tokens a sequence, frames' tokens times {area} for aspect ratios"


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
        found: np.ndarray = self.text + self.thw.prod(axis=1)
        return found

    def __len__(self) -> int:
        return len(self.text)


def draw(streams: tuple[Stream, ...], world: int, seed: int, assumptions: StreamAssumptions) -> DrawnSequences:
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
        height, width = _frame(stream.side, rng.uniform(*assumptions.area))
        text.append(rng.integers(assumptions.text[0], assumptions.text[1] + 1, stream.batch))
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
