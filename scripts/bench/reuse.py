"""How often plans are made, and how even work is meanwhile, over denoising steps of drifting masks.

python -m scripts.bench.reuse                      Wan2.1 under SpargeAttn, drift fitted to the paper's Fig. 11
python -m scripts.bench.reuse --masks FILE         recorded masks: a mask file with a group for every step, or a folder
python -m scripts.bench.reuse --json > FILE        the same numbers for a program

Each rule is run by db-SP's own caches. "walk" and "jumps" are the synthetic masks in another order: back and forth by
one step at random, and any of twelve steps at random. "oracle" is what no rule could beat that plans for the mask at
hand ("now"), or for any of the run's masks ("any"), had it known all masks beforehand: found by dynamic programming,
for as many plans.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dbsp_cli.mask_tools.series import MaskSeries
from dbsp_core import BlockMask, Plan, SequenceGroup, Strategy, make_plan
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.runtime.session.async_plan_cache import AsyncPlanCache
from dbsp_core.runtime.session.plan_cache import PlansBy, SyncPlanCache
from dbsp_core.runtime.session.replan_rule import ReplanRule
from scripts.reproduce.fig11 import PRESET, masks_by_step

LABEL = "measured on synthetic masks, drift fitted to the paper's one point"
RECORDED = "measured on recorded masks"


def orders(calls: int, seed: int) -> dict[str, list[int]]:
    """By kind of drift, the step whose mask each call has."""
    rng = np.random.default_rng(seed)
    walk = [0]
    while len(walk) < calls:
        walk.append(abs(walk[-1] + int(rng.choice((-1, 1)))))
    return {"drift": list(range(calls)), "walk": walk, "jumps": rng.integers(0, 12, calls).tolist()}


def rules(args: argparse.Namespace) -> dict[str, ReplanRule]:
    return {
        "threshold": ReplanRule(args.threshold),
        "budget": ReplanRule(args.threshold, args.budget),
    }


def planner_of(strategy: Strategy, layout: SequenceLayout) -> Callable[[BlockMask], Plan]:
    return lambda mask: make_plan(mask, strategy, layout=layout)


def run(masks: Sequence[BlockMask], plan: Callable[[BlockMask], Plan], rule: ReplanRule, behind: bool) -> list[float]:
    """[plans made, mean and worst ρ_s used]"""
    cache = AsyncPlanCache(rule, group=SequenceGroup(0, 1)) if behind else SyncPlanCache(rule)
    for mask in masks:
        cache.plan_for(0, mask, PlansBy(plan))
    cache.flush()
    counters = cache.counters
    return [counters.replans, counters.rho_used / counters.evaluated, counters.worst_used]


def oracles(masks: Sequence[BlockMask], plan: Callable[[BlockMask], Plan], most: int) -> dict[str, list[float]]:
    """By kind, the least mean ρ_s with 1, 2, … `most` plans."""
    rho = np.array([[plan_.evaluate(mask).rho for mask in masks] for plan_ in map(plan, masks)])
    before = np.concatenate([np.zeros((len(rho), 1)), rho.cumsum(axis=1)], axis=1)
    any_cost = np.array([[(before[:, j] - before[:, i]).min() for j in range(len(rho) + 1)] for i in range(len(rho))])
    now_cost = before - before[np.arange(len(rho)), np.arange(len(rho))][:, None]
    return {"now": placed(now_cost, most), "any": placed(any_cost, most)}


def placed(cost: np.ndarray, most: int) -> list[float]:
    """The least mean over all ways to cut the calls into 1, 2, … runs. cost: float[n, n + 1], of run i to j"""
    calls = len(cost)
    best, found = np.concatenate([[0.0], np.full(calls, np.inf)]), []
    for _ in range(most):
        best = np.array([np.inf, *(min(best[i] + cost[i, j] for i in range(j)) for j in range(1, calls + 1))])
        found.append(float(best[-1]) / calls)
    return found


def masks_by_layer(args: argparse.Namespace) -> Iterator[dict[str, list[BlockMask]]]:
    """Of each layer, by kind of drift: the masks of its calls."""
    if args.masks is not None:
        series = MaskSeries.read(args.masks)
        for layer in series.layers[: args.layers]:
            yield {"recorded": [series.get(step, layer) for step in series.steps]}
        return
    options = argparse.Namespace(seed=args.seed, coarsen=1)
    for layer in range(args.layers):
        by_step = masks_by_step(layer, options)
        yield {kind: [by_step[step] for step in steps] for kind, steps in orders(len(by_step), layer).items()}


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """One row per strategy, kind of drift and rule; means over layers."""
    found: dict[tuple[str, str, str], list[list[float]]] = {}
    for by_kind in masks_by_layer(args):
        for name in args.strategies:
            strategy = Strategy.parse(name)
            for kind, masks in by_kind.items():
                plan = planner_of(strategy, SequenceLayout.striped(masks[0].grid, strategy))
                for rule_name, rule in rules(args).items():
                    for behind in (False, True):
                        way = f"{rule_name}, {'async' if behind else 'sync'}"
                        found.setdefault((name, kind, way), []).append(run(masks, plan, rule, behind))
                if strategy.ring == 1:
                    for oracle, means in oracles(masks, plan, args.plans).items():
                        found.setdefault((name, kind, f"oracle: {oracle}"), []).append([args.plans, means[-1], 0.0])
    return [row(*key, values) for key, values in found.items()]


def row(strategy: str, kind: str, rule: str, values: list[list[float]]) -> dict[str, object]:
    plans, rho, worst = np.mean(values, axis=0)
    return {"strategy": strategy, "masks": kind, "rule": rule, "plans": plans, "rho_used": rho, "rho_worst": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", type=Path, help="recorded masks instead of synthetic ones")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the masks")
    parser.add_argument("--strategies", nargs="+", default=["U8R1", "U4R2", "U1R8"])
    parser.add_argument("--threshold", type=float, default=1.10, help="P_s")
    parser.add_argument("--budget", type=float, default=0.30, help="reuse.budget")
    parser.add_argument("--plans", type=int, default=5, help="how many an oracle may make")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    rows, label = measure(args), RECORDED if args.masks else LABEL
    preset, masks = (None, args.masks.name) if args.masks else (PRESET, None)
    if args.json:
        print(json.dumps({"label": label, "preset": preset, **vars(args), "masks": masks, "rows": rows}, indent=1))
        return
    table = Table(title=f"{preset or masks}, P_s {args.threshold}, means over layers", caption=label)
    for name in ("strategy", "masks", "rule", "plans made", "mean ρ_s used", "worst"):
        table.add_column(name)
    for one in rows:
        worst = f"{one['rho_worst']:.3f}" if one["rho_worst"] else "–"
        shown = (str(one["strategy"]), str(one["masks"]), str(one["rule"]))
        table.add_row(*shown, f"{one['plans']:.1f}", f"{one['rho_used']:.4f}", worst)
    Console(width=max(110, Console().width)).print(table)


if __name__ == "__main__":
    main()
