"""World of the small model: one coloured shape that moves over a floor, and the sentence that describes it.

Everything is drawn here, from (seed, index) alone: no data set is downloaded and none is stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch

HEIGHT, WIDTH, FRAMES, FPS = 144, 240, 33, 16  # 9 latent frames × 9 × 15 tokens = 1,215

COLOURS = {
    "red": (0.90, 0.12, 0.12),
    "green": (0.10, 0.72, 0.18),
    "blue": (0.12, 0.25, 0.92),
    "yellow": (0.97, 0.85, 0.10),
}
SHAPES = ("ball", "square", "triangle")
MOTIONS = ("bounces", "slides left", "slides right", "turns", "hides behind a pillar")
FLOORS = ("checkered", "plain")

_WALL = (0.86, 0.86, 0.84)
_PILLAR = (0.45, 0.42, 0.42)
_HORIZON = 0.62  # of the height: the floor lies below
_CHECK = 24  # pixels to a side of a checker


@dataclass(frozen=True)
class Scene:
    """Content of a video; `phase`, `size` and `across` in [0, 1) are not in the caption."""

    colour: str
    shape: str
    motion: str
    floor_colour: str
    floor: str
    phase: float = 0.0
    size: float = 0.5
    across: float = 0.5

    @property
    def caption(self) -> str:
        """For example "a red ball bounces over a blue checkered floor"."""
        return f"a {self.colour} {self.shape} {self.motion} over a {self.floor_colour} {self.floor} floor"

    @staticmethod
    def draw(seed: int, index: int) -> Scene:
        """The index-th scene of a seed: a caption drawn equally, and the rest of it."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        every = _every()
        chosen = every[int(torch.randint(len(every), (1,), generator=generator))]
        phase, size, across = torch.rand(3, generator=generator).tolist()
        return Scene(*chosen, phase=phase, size=size, across=across)


def _every() -> list[tuple[str, str, str, str, str]]:
    return [item for item in product(COLOURS, SHAPES, MOTIONS, COLOURS, FLOORS) if item[0] != item[3]]


def captions() -> list[str]:
    """All captions of the world: a shape never has its floor's colour."""
    return [Scene(*item).caption for item in _every()]


def render(scene: Scene, frames: int = FRAMES, start: int = 0) -> torch.Tensor:
    """Returns float32[3, frames, HEIGHT, WIDTH] in [−1, 1], from frame `start` on."""
    y, x = torch.meshgrid(torch.arange(HEIGHT) + 0.5, torch.arange(WIDTH) + 0.5, indexing="ij")
    backdrop = _backdrop(scene, x, y)
    colour = torch.tensor(COLOURS[scene.colour])[:, None, None]
    radius = 22 + 12 * scene.size
    images = []
    for frame in range(start, start + frames):
        centre_x, centre_y, angle = _pose(scene, frame / FPS, radius)
        inside = _inside(scene.shape, x - centre_x, y - centre_y, radius, angle)
        shade = _mark(x - centre_x, y - centre_y, radius, angle)
        images.append(backdrop + inside * (colour * shade - backdrop))
        if "pillar" in scene.motion:
            pillar = ((x - WIDTH / 2).abs() < 20).float()
            images[-1] = images[-1] + pillar * (torch.tensor(_PILLAR)[:, None, None] - images[-1])
    return torch.stack(images, 1) * 2 - 1


def _backdrop(scene: Scene, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """float32[3, H, W] in [0, 1]: a wall over a floor in a deeper tone of its colour."""
    wall = torch.tensor(_WALL)[:, None, None].expand(3, *x.shape)
    floor = 0.55 * torch.tensor(COLOURS[scene.floor_colour])[:, None, None] + 0.08
    if scene.floor == "checkered":
        odd = ((x / _CHECK).floor() + ((y - HEIGHT * _HORIZON) / _CHECK).floor()) % 2
        floor = floor + odd * (0.55 - 0.55 * floor)
    return torch.where(y > HEIGHT * _HORIZON, floor, wall)


def _pose(scene: Scene, time: float, radius: float) -> tuple[float, float, float]:
    """Centre in pixels and angle in radians, `time` seconds in."""
    ground = HEIGHT * 0.80 - radius
    centre = 60 + (WIDTH - 120) * scene.across
    if scene.motion == "bounces":
        beat = (time * 1.0 + scene.phase) % 1.0
        return centre, ground - (ground - radius - 2) * 4 * beat * (1 - beat), 0.0
    if scene.motion == "turns":
        return centre, ground - 14, (time * 0.5 + scene.phase) * 2 * math.pi
    # From one side to the other: a triangle wave for hiding, one way for sliding.
    path = 0.25 * scene.phase + time * 0.36
    left, right = radius + 4, WIDTH - radius - 4
    if scene.motion == "slides left":
        path = 1 - path
    if "pillar" in scene.motion and scene.across < 0.5:
        path = 1 - path
    return left + (right - left) * min(max(path, 0.0), 1.0), ground, 0.0


def _inside(shape: str, dx: torch.Tensor, dy: torch.Tensor, radius: float, angle: float) -> torch.Tensor:
    """Coverage in [0, 1], float32[H, W], with an edge one pixel wide."""
    u, v = dx * math.cos(angle) + dy * math.sin(angle), dy * math.cos(angle) - dx * math.sin(angle)
    if shape == "ball":
        distance = (u**2 + v**2).sqrt() - radius
    elif shape == "square":
        distance = torch.maximum(u.abs(), v.abs()) - 0.86 * radius
    else:
        sides = [u * math.sin(a) - v * math.cos(a) for a in (math.pi / 3, math.pi, -math.pi / 3)]
        distance = torch.stack(sides).amax(0) - 0.6 * radius
    return (0.5 - distance).clamp(0, 1)


def _mark(dx: torch.Tensor, dy: torch.Tensor, radius: float, angle: float) -> torch.Tensor:
    """Shade float32[H, W]: half of every shape is darker, so that one sees a ball turn."""
    u = dx * math.cos(angle) + dy * math.sin(angle)
    return 1 - 0.35 * (0.5 + u).clamp(0, 1)
