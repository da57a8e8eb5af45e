"""Cases of attention, each drawn from (seed, number) alone."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from dbsp_core import Strategy
from dbsp_core.layout.sequence_layout import LAYOUTS, Streams
from dbsp_core.planning.planners import PLANNERS

WORLDS = tuple(range(1, 9))
CASES_PER_WORLD = 20
"""So many numbers in a row have one world size: starting processes takes seconds."""
ORDERS = ("thw", "twh", "htw", "hwt", "wth", "wht", "tile:2x2x2", "tile:1x3x4")
STATIC = ("random", "dense", "window", "tile", "radial", "svg", "synthetic", "file", "function")
PREDICTED = ("sparge", "lowrank", "sol", "union", "vsa")
BLOCKS = (1, 3, 5, 8, 12, 16, 16, 24, 32)
TOKENS = 420
"""Most of a sequence's video."""


@dataclass(frozen=True)
class Sequence:
    """thw: frames, rows, columns of video;  text: tokens before it;  source: of its mask"""

    thw: tuple[int, int, int]
    text: int
    source: str

    @property
    def tokens(self) -> int:
        return self.text + math.prod(self.thw)


@dataclass(frozen=True)
class Draw:
    """One attention, or one attention and its backward.

    sequences: packed where there are several
    orders:    of tokens, one for all heads or one per head; for mask source "random"
    keys, precision: as for `make_plan`;  padded: whether ranks hold padding too
    planner:   a name, or "random" for any owner and any chunk
    layout:    a name, "shuffled" for tokens in no order, or "least" for the one in which the fewest keys are sent
    """

    world: int
    strategy: str
    sequences: tuple[Sequence, ...]
    heads: int
    batch: int
    width: int
    block_q: int
    block_k: int
    density: float
    orders: tuple[str, ...]
    planner: str
    layout: str
    streams: Streams
    padded: bool
    keys: str
    kernel: str
    dtype: str
    backward: bool
    debug: bool
    seed: int
    precision: str = "model"

    @property
    def predicted(self) -> bool:
        return any(sequence.source in PREDICTED for sequence in self.sequences)

    @property
    def possible(self) -> bool:
        """Whether db-SP claims to serve it."""
        strategy = Strategy.parse(self.strategy)
        text_alone = self.streams is not None and not any(one.text for one in self.sequences)
        batch = self.batch == 1 or len(self.sequences) == 1 or not self.predicted
        tiles = self.block_q == self.block_k or not any(sequence.source == "vsa" for sequence in self.sequences)
        rightly_typed = self.kernel != "triton" or self.dtype != "float64"
        return (
            strategy.world == self.world
            and not text_alone
            and batch
            and tiles
            and rightly_typed
            and not (self.backward and self.precision == "int8")
        )


def world_of(seed: int, number: int) -> int:
    return random.Random(f"{seed}:world:{number // CASES_PER_WORLD}").choice(WORLDS)


def draw_case(seed: int, number: int) -> Draw:
    """The same for equal arguments, on every machine."""
    rng = random.Random(f"{seed}:{number}")
    while True:
        case = _draw(rng, world_of(seed, number))
        if case.possible:
            return case


def _draw(rng: random.Random, world: int) -> Draw:
    kernel = rng.choices(["auto", "cpu", "reference", "triton"], [10, 4, 4, 0.1])[0]
    small = kernel == "triton"
    heads = rng.randint(1, 2 if small else 9)
    count = rng.choice([2, 3, 4]) if rng.random() < 0.25 else 1
    sequences = tuple(_sequence(rng, 40 if small else TOKENS // count) for _ in range(count))
    blocks = [16] if small else list(BLOCKS)
    return Draw(
        world=world,
        strategy=str(rng.choice(Strategy.all_for(world))),
        sequences=sequences,
        heads=heads,
        batch=rng.choice([1, 1, 1, 2, 3]),
        width=16 if small else rng.choice([4, 8, 16, 16, 24, 40]),
        block_q=rng.choice(blocks),
        block_k=rng.choice(blocks),
        density=rng.choice([0.05, 0.2, 0.4, 0.8, 1.0]),
        orders=tuple(rng.choices(ORDERS, k=rng.choice([1, heads]))),
        planner=rng.choice([*PLANNERS, "dbsp", "dbsp", "random"]),
        layout=rng.choice([*LAYOUTS, "shuffled"]),
        streams="first" if rng.random() < 0.3 else None,
        padded=rng.random() < 0.5,
        keys=rng.choice(["all", "all", "needed"]),
        kernel=kernel,
        dtype=rng.choices(["float32", "float64", "bfloat16"], [6, 2, 2])[0],
        backward=not small and rng.random() < 0.25,
        debug=rng.random() < 0.3,
        seed=rng.randrange(2**31),
        precision=rng.choice(["model", "model", "int8"]),
    )


def _sequence(rng: random.Random, most: int) -> Sequence:
    frames, rows = rng.randint(1, 7), rng.randint(1, 8)
    columns = rng.randint(1, max(1, most // (frames * rows)))
    text = rng.choice([0, 0, 1, rng.randint(1, 40)])
    return Sequence((frames, rows, min(columns, 12)), text, rng.choice(["random", "random", *STATIC, *PREDICTED]))
