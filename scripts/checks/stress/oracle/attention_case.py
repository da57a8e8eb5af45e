"""Cases of attention, each drawn from (seed, number) alone, and smaller variants of a case."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from dbsp_core import Strategy
from dbsp_core.layout.sequence_layout import LAYOUTS
from dbsp_core.planning.planners import PLANNERS
from tests.support.attention_cases import Case

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
    """One of a case. thw: frames, rows, columns of video;  text: tokens before it;  source: of its mask"""

    thw: tuple[int, int, int]
    text: int
    source: str

    @property
    def tokens(self) -> int:
        return self.text + math.prod(self.thw)


@dataclass(frozen=True)
class Draw(Case):
    """One attention, or one attention and its backward, of several packed sequences or one.

    `tokens`, `text_tokens` and `thw` are the sequences' own. `orders` (one for all heads or one per head) are those of
    mask source "random". `layout` may also be "shuffled", for tokens in no order.
    """

    sequences: tuple[Sequence, ...] = ()
    backward: bool = False

    def __str__(self) -> str:
        given = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return f"Draw({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def world(self) -> int:
        return Strategy.parse(self.strategy).world

    @property
    def predicted(self) -> bool:
        return any(sequence.source in PREDICTED for sequence in self.sequences)

    @property
    def possible(self) -> bool:
        """True if db-SP supports it."""
        text_alone = self.streams is not None and not any(one.text for one in self.sequences)
        batch = self.batch == 1 or len(self.sequences) == 1 or not self.predicted
        tiles = self.block_q == self.block_k or not any(sequence.source == "vsa" for sequence in self.sequences)
        kernel = self.kernel != "triton" or self.dtype != torch.float64
        return not text_alone and batch and tiles and kernel and not (self.backward and self.precision == "int8")


def draw_case(seed: int, number: int) -> Draw:
    """Returns the same case for equal arguments, on every machine."""
    rng = random.Random(f"{seed}:{number}")
    world = random.Random(f"{seed}:world:{number // CASES_PER_WORLD}").choice(WORLDS)
    while True:
        case = _draw(rng, world)
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
        strategy=str(rng.choice(Strategy.all_for(world))),
        sequences=sequences,
        heads=heads,
        batch=rng.choice([1, 1, 1, 2, 3]),
        head_dim=16 if small else rng.choice([4, 8, 16, 16, 24, 40]),
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
        dtype=rng.choices([torch.float32, torch.float64, torch.bfloat16], [6, 2, 2])[0],
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


def variants(case: Draw) -> Iterator[Draw]:
    """Yields cases that are simpler in one field, the greatest steps first."""
    plain: dict[str, tuple[Any, ...]] = {
        "sequences": tuple(_fewer(case.sequences)),
        "strategy": (f"U{case.world}R1", f"U1R{case.world}"),
        "heads": (1, case.heads // 2, case.heads - 1),
        "batch": (1, case.batch - 1),
        "head_dim": (4, 8),
        "block_q": (16,),
        "block_k": (16,),
        "density": (1.0,),
        "orders": (("thw",),),
        "planner": ("contiguous",),
        "layout": ("contiguous",),
        "kernel": ("auto", "reference"),
        "keys": ("all",),
        "precision": ("model",),
        "dtype": (torch.float64, torch.float32),
        "backward": (False,),
        "debug": (False,),
        "padded": (False,),
        "streams": (None,),
    }
    for name, values in plain.items():
        now = getattr(case, name)
        if now in values and name not in ("heads", "batch"):
            values = values[: values.index(now)]
        for value in dict.fromkeys(values):
            smaller = replace(case, **{name: value})
            if name == "heads" and len(case.orders) > 1:
                smaller = replace(smaller, orders=case.orders[:value])
            if value != now and min(smaller.heads, smaller.batch) >= 1 and smaller.possible:
                yield smaller


def _fewer(sequences: tuple[Sequence, ...]) -> Iterator[tuple[Sequence, ...]]:
    """Yields sequences with one less, or one of them smaller."""
    for number, one in enumerate(sequences):
        before, after = sequences[:number], sequences[number + 1 :]
        if len(sequences) > 1:
            yield before + after
        smaller = [replace(one, text=0)] if one.text else []
        smaller += [
            replace(one, thw=(*one.thw[:axis], one.thw[axis] // 2, *one.thw[axis + 1 :]))  # type: ignore[arg-type]
            for axis in range(3)
            if one.thw[axis] > 1
        ]
        smaller += [replace(one, source="random")] if one.source != "random" else []
        for changed in smaller:
            yield (*before, changed, *after)
