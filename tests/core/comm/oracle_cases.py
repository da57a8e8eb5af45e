"""The cases of the distributed oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace

from dbsp_core import Strategy
from tests.support.attention_cases import Case

WORLDS = (2, 3, 4, 6, 8)
TOLERANCE = 1e-5

# Head counts that x does not divide, token counts that nothing divides, text, batches, every mix of block sizes.
SHAPES = (
    Case("-", heads=3, tokens=203, block_q=16, block_k=16),
    Case("-", heads=5, tokens=331, block_q=32, block_k=16, text_tokens=37, batch=2),
    Case("-", heads=12, tokens=419, block_q=16, block_k=32, text_tokens=16, width=24),
    Case("-", heads=1, tokens=1031, block_q=128, block_k=64, density=0.7),
    Case("-", heads=7, tokens=1027, block_q=64, block_k=128, text_tokens=3, batch=2, density=0.15),
)
SETTINGS = (
    {"planner": "contiguous"},
    {"planner": "contiguous", "layout": "striped"},
    {"planner": "paper"},
    {"planner": "paper", "padded": True},
    {"planner": "paper", "layout": "striped", "streams": "first", "padded": True},
    {"planner": "dbsp", "padded": True},
    {"planner": "dbsp", "layout": "striped"},
    {"planner": "random", "layout": "striped", "padded": True},
)


def every_case(strategy: Strategy) -> list[Case]:
    """Every shape with every setting, and all keys."""
    cases = []
    for seed, (shape, settings) in enumerate(itertools.product(SHAPES, SETTINGS)):
        cases.append(replace(shape, strategy=str(strategy), seed=seed, **settings))
    return cases


# Heads that x does not divide and are split, short blocks, empty rows and columns, text, batches, orders per head.
NEEDED_SHAPES = (
    Case("-", heads=3, tokens=203, density=0.15),
    Case("-", heads=5, tokens=331, block_q=32, text_tokens=37, batch=2, density=0.1),
    Case("-", heads=1, tokens=611, block_q=32, block_k=64, density=0.7),
    Case("-", heads=6, tokens=19 + 5 * 8 * 9, text_tokens=19, thw=(5, 8, 9), block_q=32, block_k=32, density=0.2,
         orders=("thw", "hwt", "wth", "hwt", "tile:3x4x4", "twh")),
)  # fmt: skip
NEEDED_SETTINGS = (
    {"planner": "dbsp", "padded": True},
    {"planner": "dbsp", "layout": "striped", "streams": "first", "padded": True},
    {"planner": "contiguous"},
    {"planner": "random", "layout": "striped"},
)


def key_cases(strategy: Strategy, keys: str) -> list[Case]:
    """Every shape with every setting, and "all" keys or those that are "needed"."""
    ways = enumerate(itertools.product(NEEDED_SHAPES, NEEDED_SETTINGS))
    return [
        replace(shape, strategy=str(strategy), keys=keys, seed=seed, band=bool(seed % 3), **how)
        for seed, (shape, how) in ways
    ]
