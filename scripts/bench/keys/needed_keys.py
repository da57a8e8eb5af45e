"""What it is worth to send ranks only the keys that their rows need: predicted times, CSV to standard output.

Keys that go round the ring take the best of every UxRy in the layouts that are meant for them, striped and
contiguous; "ring_local_ms" is the same in the layout of needed keys. All plans are chosen by one model. Times are
modelled, with the constants of dbsp_configs/hardware (assumed and published, see there); bytes and ρ_s are counted.

    python -m scripts.bench.keys.needed_keys > docs/results/needed-keys.csv
    python -m scripts.bench.keys.needed_keys planning        # milliseconds of a plan, measured here
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from dbsp_core.comm.route_building import build_route
from dbsp_core.cost.comm_volume import traffic_of
from dbsp_core.cost.hardware import Hardware, load_hardware
from dbsp_core.cost.latency import AttentionShape, Topology, predict
from dbsp_core.cost.layout_choice import least_keys_layout
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.sources import MaskRequest, StaticMaskSource, SvgSource, SyntheticSource, WindowSource

WAN = MaskRequest(0, 40, (21, 45, 80), layers=40)
"""Wan2.1-14B's self-attention, 81 frames of 720p; heads of 128 numbers in bfloat16."""
MASKS: dict[str, StaticMaskSource] = {
    "sliding tiles 3x5x5": WindowSource(window=(3, 5, 5), tile=(3, 5, 8), block_q=120, block_k=120),
    "window 7x21x33": WindowSource(window=(7, 21, 33)),
    "svg": SvgSource(),
    "sparse svg": SvgSource(frames=3, bandwidth=0.1),
    "synthetic 0.2": SyntheticSource(preset="wan2.1-t2v-14b", density=0.2),
}
MACHINES = ((4, 40), (1, None), (2, 40), (4, 20))
"""Nodes of 8 H200s, and GB/s of each GPU between them."""


@dataclass(frozen=True)
class Timed:
    """layout: its name"""

    plan: Plan
    layout: str
    total_s: float
    kv_received: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("times", "planning"), default="times")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "planning":
        print_planning_times()
    else:
        write_predicted_times()


def write_predicted_times() -> None:
    """A row for each mask and machine."""
    writer = None
    for nodes, bandwidth in MACHINES:
        for name, source in MASKS.items():
            mask = source.mask(WAN)
            hardware = _machine(bandwidth)
            topology = Topology(8 * nodes, 8)
            rings = list(_rings(mask, hardware, topology))
            ring = min((one for one in rings if one.layout != "local"), key=lambda one: one.total_s)
            needed = min(_needed(mask, hardware, topology), key=lambda one: one.total_s)
            auto = min((ring, needed), key=lambda one: one.total_s)
            row = {
                "mask": name,
                "density": f"{mask.density:.3f}",
                "gpus": 8 * nodes,
                "GB_per_s": bandwidth or "NVLink",
            }
            for label, one in (("ring", ring), ("needed", needed)):
                row |= {
                    label: f"{one.plan.strategy} {one.layout}",
                    f"{label}_ms": f"{one.total_s * 1e3:.3f}",
                    f"{label}_kv_received": f"{one.kv_received:.2f}",
                    f"{label}_rho": f"{one.plan.rho:.4f}",
                }
            keys = needed.plan.assignment.keys
            row |= {"needed_chunks": ":".join(map(str, keys.shares)) if keys.periods > 1 else ""}
            local = min(one.total_s for one in rings if one.layout == "local")
            row |= {"ring_local_ms": f"{local * 1e3:.3f}"}
            row |= {"needed_speedup": f"{ring.total_s / needed.total_s:.3f}"}
            row |= {"auto_speedup": f"{ring.total_s / auto.total_s:.3f}"}
            if writer is None:
                writer = csv.DictWriter(sys.stdout, row, lineterminator="\n")
                writer.writeheader()
            writer.writerow(row)
            sys.stdout.flush()


def _machine(bandwidth: float | None) -> Hardware:
    machine = load_hardware("h200")
    network = {} if bandwidth is None else {"network_bytes_per_s": bandwidth * 1e9}
    return replace(machine, constants=replace(machine.constants, **network))


def _shape(mask: BlockMask) -> AttentionShape:
    return AttentionShape(1, mask.heads, mask.grid.tokens, 128, 2)


def _rings(mask: BlockMask, hardware: Hardware, topology: Topology) -> Iterator[Timed]:
    """The fastest plan of each strategy and layout."""
    for strategy in _strategies(topology):
        for name in ("striped", "contiguous", "local"):
            layout = SequenceLayout.named(name, mask.grid, strategy)
            yield _timed(make_plan(mask, strategy, layout=layout, compare=False), name, layout, hardware, topology)


def _needed(mask: BlockMask, hardware: Hardware, topology: Topology) -> Iterator[Timed]:
    for strategy in _strategies(topology):
        chosen = SequenceLayout.named("striped", mask.grid, strategy)
        for name, layout in (("local", least_keys_layout([mask], strategy)), ("striped", chosen)):
            plan = make_plan(mask, strategy, "local", layout=layout, compare=False, keys="needed")
            yield _timed(plan, name, layout, hardware, topology)


def _strategies(topology: Topology) -> list[Strategy]:
    """Those whose slots or heads are not so few that they are out of the question, to save time."""
    return [s for s in Strategy.all_for(topology.world) if s.ring <= 8]


def _timed(plan: Plan, name: str, layout: SequenceLayout, hardware: Hardware, topology: Topology) -> Timed:
    share = plan.heads * plan.grid.tokens / topology.world
    received = traffic_of(plan.assignment, layout).kv_received / share
    return Timed(plan, name, _predicted_s(plan, layout, hardware, topology), received)


def _predicted_s(plan: Plan, layout: SequenceLayout, hardware: Hardware, topology: Topology) -> float:
    shape = AttentionShape(1, plan.heads, plan.grid.tokens, 128, 2)
    return predict(plan, shape, hardware, topology, layout).total_s


def print_planning_times() -> None:
    """Of one attention, in this process with one thread: the median of five after one to warm up."""
    print("mask,strategy,plan_ms,route_ms")
    for name, source in MASKS.items():
        mask = source.mask(WAN)
        for text in ("U8R1", "U2R4", "U1R8", "U8R4"):
            strategy = Strategy.parse(text)
            layout = least_keys_layout([mask], strategy)
            plan = partial(make_plan, mask, strategy, "local", layout=layout, compare=False, keys="needed")
            plans = [plan() for _ in range(6)][1:]
            routes = []
            for _ in plans:
                start = time.perf_counter()
                build_route(plans[0].assignment, layout, 0, layout.shard, torch.device("cpu"))
                routes.append(1e3 * (time.perf_counter() - start))
            print(f"{name},{text},{sorted(p.plan_ms for p in plans)[2]:.1f},{sorted(routes)[2]:.1f}", flush=True)


if __name__ == "__main__":
    main()
