"""db-SP's own time over that of the attention, at Wan2.1-14B's size: what it does beyond plain sequence parallelism.

python -m scripts.bench.overhead                    8 ranks, all strategies, constants of the H200
python -m scripts.bench.overhead --json > FILE      the same numbers for a program
python -m scripts.bench.overhead --host FILE        the host's as they were measured for that file; nothing is measured

measured: on one core of this machine, with masks that change at every call: the planning thread (evaluating, and the
          share of new plans and their parts), with the counting of masks left out, which is the device's;
          and the calling thread (one attention of a session, new kernel tables included), on stand-ins of a few
          numbers, so that what a device or the network would do is left out. A GPU's launches take longer than
          operators on stand-ins: their number is given
counted:  operators of the calling thread; bytes sent and packed, from plans
modelled: seconds on the machine of --hardware, and the attention that all is compared with

What the planning thread does runs beside the device, and so does the host's part of a call, as long as it is shorter
than what the device does meanwhile. So a share is given of each, and apart from them the sum of what the device and
the network do more, which nothing hides.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

import dbsp_core.comm.all_to_all
import dbsp_core.planning.wire_format
import dbsp_core.runtime.ring
from dbsp_core import BlockMask, Plan, SequenceGroup, SequenceLayout, Strategy, make_plan
from dbsp_core.comm.groups import PendingTransfer
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.comm_volume import traffic_of
from dbsp_core.cost.hardware import Hardware, device_class, load_hardware
from dbsp_core.cost.latency import AttentionShape, Topology, exchange_cost_of, packed_bytes, predict
from dbsp_core.masks.mask_counts import MaskCounts
from dbsp_core.masks.video import Video
from dbsp_core.planning.planners import PlannerConfig
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.runtime.session.session import AttentionSession
from dbsp_core.sources import MaskRequest, SyntheticSource
from dbsp_core.sources.base import BlockSizes
from dbsp_core.sources.synthetic.presets import PRESETS

PRESET, HEAD_DIM, ELEMENT_BYTES, RANK = "wan2.1-t2v-14b", 128, 2, 0


def masks(calls: int) -> list[BlockMask]:
    source, preset = SyntheticSource(preset=PRESET, drift=0.015), PRESETS[PRESET]
    return [source.mask(MaskRequest(0, preset.model.heads, preset.model.thw, step=step)) for step in range(calls)]


def milliseconds(action: Callable[[], object], repeats: int, between: Callable[[], object] = lambda: None) -> float:
    """Median time that this thread's core was busy. between: called before each repetition, and not timed"""
    found = []
    for _ in range(repeats):
        between()
        start = time.thread_time()
        action()
        found.append((time.thread_time() - start) * 1e3)
    return statistics.median(found)


class Counting:
    """Keeps the time that this thread spends counting masks, to be left out: on a GPU, the device counts."""

    def __init__(self) -> None:
        self.milliseconds = 0.0

    def __enter__(self) -> Counting:
        self._patches = [
            mock.patch.object(MaskCounts, name, self._timed(getattr(MaskCounts, name)))
            for name in ("_counted", "_summed")
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _timed(self, count: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return count(*args)
            finally:
                self.milliseconds += (time.thread_time() - start) * 1e3

        return timed


def without_counting(action: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of an action, less what it spends on counting masks."""
    found = []
    with Counting() as counting:
        for _ in range(repeats):
            counting.milliseconds, start = 0.0, time.thread_time()
            action()
            found.append((time.thread_time() - start) * 1e3 - counting.milliseconds)
    return statistics.median(found)


def planning(
    seen: list[BlockMask], strategy: Strategy, layout: SequenceLayout, cost: float, repeats: int, replans: float
) -> dict[str, float]:
    """measured: milliseconds of the planning thread's pieces, and of all of them a call."""
    mask = seen[-1]

    def make(one: BlockMask) -> Plan:
        return make_plan(one, strategy, PlannerConfig(exchange_cost=cost), layout=layout, compare=False)

    def fresh() -> BlockMask:
        return BlockMask(mask.bits, mask.grid)

    plan, before = make(mask), make(seen[-2])
    found = {
        "evaluation_ms": without_counting(lambda: before.evaluate(fresh(), compare=False), repeats),
        "planning_ms": without_counting(lambda: make(fresh()), repeats),
        "part_ms": without_counting(lambda: RankPlan.of(plan.assignment, layout, RANK), repeats),
        "fingerprint_ms": without_counting(lambda: replace(plan.assignment).fingerprint, repeats),
    }
    a_plan = sum(found[part] for part in ("planning_ms", "part_ms", "fingerprint_ms"))
    return found | {"planning_thread_ms": found["evaluation_ms"] + replans * a_plan}


class NothingButHost:
    """Leaves out what a device or the network would do; what is left of a call is the host's part."""

    def __enter__(self) -> None:
        def all_to_all(_: SequenceGroup, sent: torch.Tensor, receive: Any, send: Any) -> torch.Tensor:
            return sent.new_empty(sum(receive), *sent.shape[1:])

        def shift(_: SequenceGroup, sent: torch.Tensor, to: int, received_shape: Any, source: int) -> PendingTransfer:
            return PendingTransfer(sent.new_empty(tuple(received_shape)), sent, ())

        def kernel(q: torch.Tensor, *_: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return q, q

        def pack_rows(mask: torch.Tensor, rows: torch.Tensor, *of_mask: Any) -> tuple[torch.Tensor, ...]:
            periods, _, width = of_mask[2].shape
            numbers = mask.new_zeros(3, periods, len(rows), dtype=torch.int64)
            bits = mask.new_zeros(periods, len(rows), -(-width // 8), dtype=torch.uint8)
            return bits, numbers[0].int(), numbers[1].int(), numbers[2]

        self._patches = [
            mock.patch.object(SequenceGroup, "all_to_all", all_to_all),
            mock.patch.object(SequenceGroup, "shift", shift),
            mock.patch.object(dbsp_core.runtime.ring, "block_attention", kernel),
            mock.patch.object(dbsp_core.comm.all_to_all, "copy_segments", return_value=None),
            mock.patch.object(dbsp_core.planning.wire_format, "gather_segments", return_value=None),
            mock.patch("dbsp_core.runtime.kernel_tables.expand_rows", lambda bits, *_: bits),
            mock.patch("dbsp_core.runtime.kernel_tables.pack_rows", pack_rows),
        ]
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


@dataclass(frozen=True)
class Alternating(BlockSizes):
    """Masks in turn, as if computed from queries and keys."""

    changes = "per_call"
    masks: tuple[BlockMask, ...] = ()
    turn: list[int] = field(default_factory=lambda: [0])

    def mask(self, request: MaskRequest, tokens: Any = None) -> BlockMask:
        self.turn[0] += 1
        return self.masks[self.turn[0] % len(self.masks)]


class Fixed(Alternating):
    """The first mask at every call."""

    changes = "never"


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calling(strategy: Strategy, repeats: int) -> dict[str, float]:
    """measured: milliseconds of the calling thread for one attention whose mask has changed; and with a fixed mask."""
    heads, thw = strategy.world, (strategy.world, 2, 4)
    grid = Alternating(8, 8).grid(MaskRequest(0, heads, thw))
    rng = np.random.default_rng(0)
    masks = tuple(BlockMask(rng.random((heads, grid.nq, grid.nk)) < 0.4, grid) for _ in range(2))
    found: dict[str, float] = {}
    for name, source in ("calling_thread_ms", Alternating(8, 8, masks)), ("fixed_mask_ms", Fixed(8, 8, masks[:1])):
        # A budget that lasts: new plans are the planning thread's, and change nothing here.
        config = DbspConfig(mask=source, reuse={"threshold": 9.0, "budget": None}, planner={"exchange_cost": 0.0})
        session = AttentionSession(config, SequenceGroup(RANK, strategy.world), strategy, heads, layers=1)
        q, k, v = torch.zeros(3, 1, heads, session.begin(Video(thw)).shard, 1)
        attend = functools.partial(session.attend, 0, q, k, v)
        with NothingButHost(), torch.no_grad():
            attend()
            with Operators() as operators:
                attend()
            times = [milliseconds(attend, 40, between=session.flush) for _ in range(repeats)]  # it has had 17 ms
        found |= {name: statistics.median(times), name.replace("_ms", "_operators"): operators.count}
    return found


def moved(
    mask: BlockMask, strategy: Strategy, layout: SequenceLayout, cost: float, hardware: Hardware
) -> dict[str, float]:
    """Counted bytes of the busiest rank and modelled milliseconds, against the contiguous plan at USP's layout."""
    shape = AttentionShape(1, mask.heads, mask.grid.tokens, HEAD_DIM, ELEMENT_BYTES)
    topology = Topology(strategy.world, strategy.world)
    usp_layout = SequenceLayout.contiguous(mask.grid.tokens, strategy.world)
    found: dict[str, float] = {}
    ways = {
        "usp": (make_plan(mask, strategy, "contiguous", layout=usp_layout), usp_layout),
        "dbsp": (make_plan(mask, strategy, PlannerConfig(exchange_cost=cost), layout=layout), layout),
    }
    for name, (plan, its_home) in ways.items():
        traffic, predicted = traffic_of(plan.assignment, its_home), predict(plan, shape, hardware, topology, its_home)
        sent = sum(
            (one - one * torch.eye(strategy.world).numpy()).sum(axis=1) for one in (traffic.dispatch, traffic.combine)
        )
        found |= {
            f"{name}_rho": plan.rho,
            f"{name}_sent_mb": float(sent.max()) * shape.token_bytes / 1e6,
            f"{name}_packed_mb": packed_bytes(plan, traffic, its_home, shape) / 1e6,
            f"{name}_exchange_ms": predicted.exchange_s * 1e3,
            f"{name}_pack_ms": predicted.pack_s * 1e3,
            f"{name}_exposed_p2p_ms": predicted.times.exposed_s * 1e3,
            f"{name}_attention_ms": predicted.total_s * 1e3,
        }
    # Bits of rows to indices of blocks, read and written once a call; and the mask is counted where it changes.
    plan = ways["dbsp"][0]
    rows = traffic_of(plan.assignment, layout).rows.max()
    tables = rows * mask.grid.nk * (1 / 8 + 4)
    # bits read for each kind of sums; or read, widened to 16 bits, and those read for either
    read = mask.bits.numel() * (2 if strategy.ring == 1 else 1 + 2 * 3)
    rate = hardware.constants.merge_bytes_per_s  # of memory
    found |= {"tables_ms": tables / rate * 1e3, "evaluation_on_device_ms": read / rate * 1e3}
    return found


def shares(row: dict[str, Any]) -> dict[str, float]:
    """Own time over the attention's, each."""
    device, attention = row["device"], row["device"]["dbsp_attention_ms"]
    more = sum(
        max(0.0, device[f"dbsp_{part}"] - device[f"usp_{part}"])
        for part in ("exchange_ms", "pack_ms", "exposed_p2p_ms")
    )
    return {
        "device_and_network_more": (more + device["tables_ms"]) / attention,
        "evaluation_on_device": device["evaluation_on_device_ms"] / attention,
        "calling_thread_in_the_shade": row["host"]["calling_thread_ms"] / attention,
        "planning_thread_in_the_shade": row["host"]["planning_thread_ms"] / attention,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--replans", type=float, default=0.1, help="new plans per call: 5 of 50")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--host", type=Path, metavar="FILE", help="of --json before: the host's part is taken from it")
    args = parser.parse_args()
    before = None if args.host is None else json.loads(args.host.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    hardware, seen = load_hardware(args.hardware), masks(9)
    shape = AttentionShape(1, seen[-1].heads, seen[-1].grid.tokens, HEAD_DIM, ELEMENT_BYTES)
    topology = Topology(args.ranks, args.ranks)
    rows = []
    for strategy in Strategy.all_for(args.ranks):
        layout = SequenceLayout.striped(seen[-1].grid, strategy)
        cost = exchange_cost_of(seen[-1], strategy, shape, hardware, topology)
        if before is None:
            host = planning(seen, strategy, layout, cost, args.repeats, args.replans) | calling(strategy, args.repeats)
        else:
            host = next(row["host"] for row in before["rows"] if row["strategy"] == str(strategy))
        row: dict[str, Any] = {"strategy": str(strategy), "exchange_cost": cost, "host": host}
        row["device"] = moved(seen[-1], strategy, layout, cost, hardware)
        rows.append(row | {"shares": shares(row)})
    if args.json:
        about = {
            "labels": {
                "host": "measured on one core; operators counted",
                "device": "bytes counted, times modelled",
                "shares": "of both",
            },
            "cpu": device_class("cpu"),
            "preset": PRESET,
            **{name: getattr(args, name) for name in ("ranks", "hardware", "repeats", "replans")},
        }
        host_of = {} if before is None else {name: before[name] for name in ("cpu", "repeats", "replans")}
        print(json.dumps({**about, **host_of, "rows": rows}, indent=1))
        return
    table = Table(title=f"{PRESET}, {args.ranks} ranks: host measured here, device modelled on {hardware.name}")
    for name in ("strategy", *rows[0]["host"]):
        table.add_column(name)
    for row in rows:
        table.add_row(row["strategy"], *(f"{value:.2f}" for value in row["host"].values()))
    console = Console(width=max(150, Console().width))
    console.print(table)
    for part in ("device", "shares"):
        table = Table(title="bytes counted, times modelled" if part == "device" else "own time over the attention's")
        table.add_column("")
        for row in rows:
            table.add_column(row["strategy"])
        for name in rows[0][part]:
            form = "{:.2%}" if part == "shares" else "{:.3f}"
            table.add_row(name, *(form.format(row[part][name]) for row in rows))
        console.print(table)


if __name__ == "__main__":
    main()
