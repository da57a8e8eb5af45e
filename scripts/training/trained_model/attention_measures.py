"""What DSV (Tan et al., 2025, §3) observes of attention, by head: how scores are spread, and where the largest are.

Critical keys are DSV's: of each query the fewest that hold 90 % of its attention. Where these are most of all keys,
being near or shared says little, so all that is said of them is said of each query's best 10 % of keys too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from itertools import product

import numpy as np
import torch

__all__ = [
    "SHARES",
    "Observed",
    "Spread",
    "best_keys",
    "critical_keys",
    "fits",
    "held_by_top",
    "located",
    "near",
    "neighbours",
    "observe",
    "shared",
    "spread",
]

SHARES = (0.01, 0.05, 0.1, 0.2, 0.3)
CRITICAL, BEST = 0.9, 0.1
RANKS = 60  # at most, at even distances on a logarithmic scale, that curves are fitted to
CUBE, GROUP = (2, 2, 2), (2, 4, 4)  # DSV's groups of queries (§6)

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class Spread:
    """How one head's scores are spread, means over its queries. Shares are in [0, 1].

    top_*:  attention that the first so many per cent of a query's keys hold;  concentrated: share of queries whose
            first 10 % hold at least 90 % (DSV, Fig. 3);  density: critical keys' share of all
    power, exponential, lognormal: R² of the logarithm of scores, largest first, on the logarithm of their rank, on the
            rank, on the normal distribution's quantile; tail_*: of the largest 10 % alone;  exponent: of the power law
    """

    density: float
    top_1: float
    top_5: float
    top_10: float
    top_20: float
    top_30: float
    concentrated: float
    power: float
    exponential: float
    lognormal: float
    exponent: float
    tail_power: float
    tail_exponential: float
    tail_lognormal: float


@dataclass(frozen=True)
class Observed(Spread):
    """One head, means over its queries, all shares in [0, 1]: how scores are spread, and of each query's critical keys

    order, radius, around, far: share that is at most 5 tokens away in the order of tokens; at most 5 away in
            (frame, row, column), Euclidean; at most 1 away along each axis; more than 10 away, Euclidean
    next, cube, group, any: share that is critical to the next query too; to another of its cube of 2×2×2; of its group
            of 2×4×4; to any other query
    best_*: the same of each query's best 10 % of keys
    """

    order: float
    radius: float
    around: float
    far: float
    next: float
    cube: float
    group: float
    any: float
    best_order: float
    best_radius: float
    best_around: float
    best_far: float
    best_next: float
    best_cube: float
    best_group: float
    best_any: float


def observe(query: torch.Tensor, key: torch.Tensor, scale: float, thw: Sizes) -> list[Observed]:
    """One attention, by head. query, key: float32[H, N, D], tokens in order "thw"; scale: of their products."""
    places, pairs = near(thw), neighbours(thw)
    rows = []
    for q, k in zip(query, key, strict=True):
        scores = torch.softmax(q @ k.T * scale, -1)
        chosen = (critical_keys(scores), best_keys(scores))
        values = [value for keys in chosen for value in (*located(keys, places), *shared(keys, pairs))]
        rows.append(Observed(*astuple(spread(q, k, scale)), *values))
    return rows


def spread(query: torch.Tensor, key: torch.Tensor, scale: float) -> Spread:
    """One head. query: float32[N, D], of all tokens or some; key: float32[K, D]"""
    ranked = torch.log_softmax(query @ key.T * scale, -1).sort(-1, descending=True).values
    held = held_by_top(ranked.exp())
    values = [
        float(critical_keys(ranked.exp()).float().mean()),
        *(float(one.mean()) for one in held),
        float((held[SHARES.index(0.1)] >= CRITICAL).float().mean()),
        *fits(ranked),
        *fits(ranked[:, : int(BEST * ranked.shape[1])])[:3],
    ]
    return Spread(*values)


def held_by_top(ranked: torch.Tensor) -> list[torch.Tensor]:
    """Of each query, float32[N], what its first 1, 5, 10, 20 and 30 % of keys hold. ranked: scores, largest first"""
    sums = ranked.cumsum(-1)
    return [sums[:, max(1, int(share * ranked.shape[1])) - 1] for share in SHARES]


def critical_keys(scores: torch.Tensor) -> torch.Tensor:
    """bool[N, K]: of each query the fewest keys that together hold 90 % of its scores, float32[N, K]."""
    ranked, order = scores.sort(-1, descending=True)
    before = ranked.cumsum(-1) - ranked
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, before < CRITICAL * ranked.sum(-1, True))


def best_keys(scores: torch.Tensor) -> torch.Tensor:
    """bool[N, K]: each query's 10 % of keys with the largest scores."""
    first = scores.topk(max(1, int(BEST * scores.shape[1]))).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, first, True)


def fits(ranked: torch.Tensor) -> tuple[float, float, float, float]:
    """R² of three lines, means over queries, and the power law's exponent, the first one's slope negated.

    ranked: float32[N, K], logarithms of scores, largest first. The lines run over the logarithm of the rank (a power
    law), over the rank (an exponential), and over the normal distribution's quantile (a log-normal), all through the
    same points, which are spread evenly over the logarithm of the rank.
    """
    count = ranked.shape[1]
    ranks = torch.from_numpy(np.unique(np.geomspace(1, count, RANKS).round()).astype(np.int64))
    values = ranked[:, ranks - 1].double()
    quantile = torch.special.ndtri((ranks - 0.5) / count)
    lines = [_line(x.double(), values) for x in (ranks.log(), ranks, quantile)]
    return lines[0][0], lines[1][0], lines[2][0], -lines[0][1]


def _line(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """R² and slope of least squares, means over rows of y that are not constant."""
    x, y = x - x.mean(), y - y.mean(-1, keepdim=True)
    spread = y.square().sum(-1)
    y, spread = y[spread > 0], spread[spread > 0]
    products = y @ x
    return float((products.square() / (x.square().sum() * spread)).mean()), float(products.mean() / x.square().sum())


def near(thw: Sizes) -> Mapping[str, torch.Tensor]:
    """Pairs of tokens, bool[N, N], as `Observed` names them: order, radius, around, far. Their means are chance's."""
    places = torch.tensor(list(product(*map(range, thw))))
    apart = (places[:, None] - places).abs()
    distance = apart.square().sum(-1).double().sqrt()
    index = torch.arange(len(places))
    return {
        "order": (index[:, None] - index).abs() <= 5,
        "radius": distance <= 5,
        "around": apart.amax(-1) <= 1,
        "far": distance > 10,
    }


def located(chosen: torch.Tensor, places: Mapping[str, torch.Tensor]) -> list[float]:
    """Share of each query's chosen keys that lie in each of `places`, mean over queries. chosen: bool[N, N]"""
    counts = chosen.sum(-1)
    return [float(((chosen & place).sum(-1) / counts).mean()) for place in places.values()]


def neighbours(thw: Sizes) -> Mapping[str, torch.Tensor]:
    """Pairs of different queries, bool[N, N], as `Observed` names them: next, cube, group, any."""
    places = torch.tensor(list(product(*map(range, thw))))
    index = torch.arange(len(places))
    other = index[:, None] != index

    def together(sizes: Sizes) -> torch.Tensor:
        tile = places // torch.tensor(sizes)
        return (tile[:, None] == tile).all(-1) & other

    return {"next": index[:, None] + 1 == index, "cube": together(CUBE), "group": together(GROUP), "any": other}


def shared(chosen: torch.Tensor, pairs: Mapping[str, torch.Tensor]) -> list[float]:
    """Share of a query's chosen keys that another has chosen too, mean over each kind of pairs. chosen: bool[N, K]"""
    keys = chosen.float()
    common = keys @ keys.T / keys.sum(-1, keepdim=True)
    return [float(common[pair].mean()) for pair in pairs.values()]
