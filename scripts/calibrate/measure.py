"""The program of each rank: it measures one part of an attention at a time, in step with the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.planning.plan import make_plan
from dbsp_core.planning.planners import require_planner
from dbsp_core.runtime.attention import DualBalancedAttention
from dbsp_core.runtime.tables import build_tables, table_layout
from dbsp_kernels import block_attention, merge_states
from scripts.calibrate.cases import Case, Sizes
from scripts.calibrate.timing import Samples, Timer

__all__ = ["Setting", "measure_attentions", "measure_parts"]


@dataclass(frozen=True)
class Setting:
    """How to measure: `dtype` is that of q, k and v; for `max_wait_s` see `Timer`."""

    device: str
    dtype: torch.dtype
    kernel: str
    repeats: int
    max_wait_s: float = 0.0

    @property
    def where(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": self.dtype}


def measure_parts(rank: int, world: int, sizes: Sizes, setting: Setting) -> dict[str, list[Samples]]:
    """Measures each part, samples in the order of `sizes`; communication and overlap only with several ranks."""
    group, where, repeats = SequenceGroup.of(), setting.where, setting.repeats
    timer = Timer(setting.device, setting.max_wait_s)
    found = {
        "compute": [timer.samples_alone(_kernel_call(case, setting), repeats) for case in sizes.compute],
        "merge": [timer.samples_alone(_merge_call(n, setting.device), repeats) for n in sizes.merges],
        "linear": [timer.samples_alone(_product(rows, width, where), repeats) for rows, width in sizes.linear],
    }
    if world > 1:
        found["exchange"] = [timer.samples(_exchange(n, group, setting.device), repeats) for n in sizes.transfers]
        found["p2p"] = [timer.samples(_rotate(n, group, setting.device), repeats) for n in sizes.transfers]
    runs = [("call", Strategy(world, 1), sizes.call), ("overlap", Strategy(1, world), sizes.overlap)]
    for part, strategy, cases in runs[: 1 + (world > 1)]:
        calls = (_attention_call(case, strategy, "contiguous", group, setting) for case in cases)
        found[part] = [timer.samples(call, repeats) for call in calls]
    return found


def measure_attentions(
    rank: int, world: int, cases: tuple[tuple[Case, str, str], ...], setting: Setting
) -> list[Samples]:
    """Measures whole attentions of (case, strategy, planner), one of each in turn, so that drift hits all alike."""
    group, timer = SequenceGroup.of(), Timer(setting.device, setting.max_wait_s)
    calls = [
        _attention_call(case, Strategy.parse(strategy), planner, group, setting) for case, strategy, planner in cases
    ]
    samples: list[Samples] = [[] for _ in calls]
    for turn in range(setting.repeats):
        for mine, call in zip(samples, calls, strict=True):
            mine += timer.samples(call, 1, warm_up=int(turn == 0))
    return samples


def _attention_call(
    case: Case, strategy: Strategy, planner: str, group: SequenceGroup, setting: Setting
) -> Callable[[], object]:
    """Prepares an attention, and returns a call of it on this rank's random q, k, v."""
    mask = case.mask()
    layout = SequenceLayout.named(require_planner(planner).layout, mask.grid, strategy)
    plan = make_plan(mask, strategy, planner, layout=layout)
    attend = DualBalancedAttention.prepare(plan, mask, layout, group, device=setting.device, kernel=setting.kernel)
    q, k, v = (torch.randn(1, case.heads, layout.shard, case.head_dim, **setting.where) for _ in range(3))
    return lambda: attend(q, k, v)


def _kernel_call(case: Case, setting: Setting) -> Callable[[], object]:
    """Returns a call of only the kernel, on all rows of the case, as one rank would see them."""
    mask = case.mask()
    plan = make_plan(mask, "U1R1", "contiguous")
    table = build_tables(table_layout(plan, 0).to(torch.device(setting.device)), mask)[0]
    grid = mask.grid
    q = torch.randn(len(table.kv_count), grid.block_q, case.head_dim, **setting.where)
    k, v = (torch.randn(len(table.kv_len), grid.block_k, case.head_dim, **setting.where) for _ in range(2))
    return lambda: block_attention(q, k, v, **vars(table.expanded()), kernel=setting.kernel)


def _merge_call(elements: int, device: str) -> Callable[[], object]:
    out, part = (torch.randn(elements // 64 // 64, 64, 64, device=device) for _ in range(2))
    lse, part_lse = (torch.randn(out.shape[:2], device=device) for _ in range(2))
    return lambda: merge_states(out, lse, part, part_lse)


def _product(rows: int, width: int, where: dict[str, Any]) -> Callable[[], object]:
    left, right = torch.randn(rows, width, **where), torch.randn(width, width, **where)
    return lambda: left @ right


def _exchange(size: int, group: SequenceGroup, device: str) -> Callable[[], object]:
    """Returns an all-to-all in which each rank sends `size` bytes to the others together, and nothing to itself."""
    each = max(1, size // 4 // (group.size - 1))
    splits = [0 if rank == group.rank else each for rank in range(group.size)]
    sent = torch.zeros(sum(splits), device=device)
    return lambda: group.all_to_all(sent, splits, splits)


def _rotate(size: int, group: SequenceGroup, device: str) -> Callable[[], object]:
    sent = torch.zeros(max(1, size // 4), device=device)
    previous, following = ((group.rank + way) % group.size for way in (-1, 1))
    received, torchs = torch.empty_like(sent), group.group
    if torchs is None:
        raise RuntimeError("a single process has no neighbour")
    ways = [(dist.isend, sent, previous), (dist.irecv, received, following)]
    both = [dist.P2POp(call, what, dist.get_global_rank(torchs, rank), torchs) for call, what, rank in ways]
    return lambda: [work.wait() for work in dist.batch_isend_irecv(both)]
