"""The cases of the distributed oracle: pairs of strategies, shapes and settings in index of full products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dbsp_core import Strategy
from tests.support.attention_cases import Case
from tests.support.generators import EVERY_STRATEGY

WORLDS = tuple(range(2, 9))
EVERY = tuple((world, strategy) for world in WORLDS for strategy in Strategy.all_for(world))
TOLERANCE = 1e-5

# Head counts that x does not divide, token counts that nothing divides, text, batches, every mix of block sizes.
SHAPES = (
    Case("-", heads=3, tokens=203, block_q=16, block_k=16),
    Case("-", heads=5, tokens=331, block_q=32, block_k=16, text_tokens=37, batch=2),
    Case("-", heads=12, tokens=419, block_q=16, block_k=32, text_tokens=16, head_dim=24),
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


# Heads that x does not divide and are split, short blocks, empty rows and columns, text, batches, orders per head.
KEY_SHAPES = (
    Case("-", heads=3, tokens=203, density=0.15),
    Case("-", heads=5, tokens=331, block_q=32, text_tokens=37, batch=2, density=0.1),
    Case("-", heads=1, tokens=611, block_q=32, block_k=64, density=0.7),
    Case("-", heads=6, tokens=19 + 5 * 8 * 9, text_tokens=19, thw=(5, 8, 9), block_q=32, block_k=32, density=0.2,
         orders=("thw", "hwt", "wth", "hwt", "tile:3x4x4", "twh")),
)  # fmt: skip
KEYS = ("needed", "all")
KEY_SETTINGS = (
    {"planner": "dbsp", "padded": True},
    {"planner": "dbsp", "layout": "striped", "streams": "first", "padded": True},
    {"planner": "contiguous"},
    {"planner": "random", "layout": "striped"},
)


# Orders of all heads equal, and orders of their own: a block then holds other tokens in other heads.
ORDERED_SHAPES = (
    Case("-", heads=3, tokens=5 + 7 * 6 * 8, text_tokens=5, thw=(7, 6, 8), orders=("hwt",), block_k=32),
    Case("-", heads=2, tokens=6 * 6 * 9, thw=(6, 6, 9), orders=("tile:2x4x4",), batch=2),
    Case("-", heads=6, tokens=19 + 5 * 8 * 9, text_tokens=19, thw=(5, 8, 9), block_q=32,
         orders=("thw", "hwt", "wth", "hwt", "tile:3x4x4", "twh")),
)  # fmt: skip
ORDERED_SETTINGS = (
    {"planner": "contiguous", "padded": True},
    {"planner": "paper", "layout": "striped", "streams": "first", "padded": True},
    {"planner": "dbsp", "padded": True},
    {"planner": "random", "layout": "striped", "streams": "first", "padded": True},
)


def pairwise(strategy: Strategy, shapes: Sequence[Case], settings: Sequence[dict[str, Any]]) -> list[Case]:
    """Returns cases that meet every pair of a shape and a setting, and of a number of ranks and a setting.

    A strategy has every other setting, and the next strategy has those between. Masks and inputs of a shape are drawn
    from three seeds, so that the references are shared by all strategies.
    """
    turn = EVERY_STRATEGY.index(strategy)
    return [
        replace(shapes[(turn + index) // 2 % len(shapes)], strategy=str(strategy), seed=turn % 3, **one)
        for index, one in enumerate(settings)
        if (turn + index) % 2 == 0
    ]


def plain_cases(strategy: Strategy) -> list[Case]:
    """Returns cases with one token order and all keys."""
    return pairwise(strategy, SHAPES, SETTINGS)


def ordered_cases(strategy: Strategy) -> list[Case]:
    """Returns cases with token orders."""
    return pairwise(strategy, ORDERED_SHAPES, ORDERED_SETTINGS)


def key_cases(strategy: Strategy) -> list[Case]:
    """Returns cases that send "all" keys or those that are "needed", some of them with banded masks."""
    cases = pairwise(strategy, KEY_SHAPES, [one | {"keys": keys} for keys in KEYS for one in KEY_SETTINGS])
    return [replace(case, band=case.seed > 0) for case in cases]
