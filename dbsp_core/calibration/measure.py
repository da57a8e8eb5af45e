"""What each rank runs: one part of an attention at a time, in step with the others."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from dbsp_core.attention import DualBalancedAttention
from dbsp_core.calibration.samples import Case, Sizes
from dbsp_core.groups import SequenceGroup
from dbsp_core.home import HomeLayout
from dbsp_core.mask import BlockMask
from dbsp_core.plan import Plan, make_plan
from dbsp_core.planners import require_planner
from dbsp_core.strategy import Strategy
from dbsp_core.tables import build_tables
from dbsp_kernels import block_attention, merge_states

__all__ = ["attention_call", "measure_attentions", "measure_parts", "timed"]

Times = list[float]


def timed(action: Callable[[], object], device: str, repeats: int, warm_up: int = 1) -> Times:
    """Seconds of each repetition, on this rank; all ranks begin each together."""
    times = []
    for repetition in range(warm_up + repeats):
        _synchronize(device)
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        action()
        _synchronize(device)
        if repetition >= warm_up:
            times.append(time.perf_counter() - start)
    return times


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_parts(
    rank: int, world: int, sizes: Sizes, device: str, dtype: torch.dtype, kernel: str
) -> dict[str, list[Times]]:
    """Times of every sample by part, in the order of `sizes`; communication and overlap with several ranks alone."""
    group = SequenceGroup.of()
    where = {"device": device, "dtype": dtype}
    found = {
        "compute": [timed(_kernel_call(case, where, kernel), device, sizes.repeats) for case in sizes.compute],
        "merge": [timed(_merge_call(elements, device), device, sizes.repeats) for elements in sizes.merges],
        "linear": [timed(_product(rows, width, where), device, sizes.repeats) for rows, width in sizes.linear],
    }
    if world > 1:
        found["exchange"] = [timed(_exchange(size, group, device), device, sizes.repeats) for size in sizes.transfers]
        found["p2p"] = [timed(_hand_over(size, group, device), device, sizes.repeats) for size in sizes.transfers]
    strategies = [(Strategy(world, 1), sizes.call)]
    if world > 1:
        strategies.append((Strategy(1, world), sizes.overlap))
    for name, (strategy, cases) in zip(("call", "overlap"), strategies, strict=False):
        calls = (attention_call(case, case.mask(), strategy, "contiguous", group, where, kernel)[1] for case in cases)
        found[name] = [timed(call, device, sizes.repeats) for call in calls]
    return found


def measure_attentions(
    rank: int,
    world: int,
    cases: tuple[tuple[Case, str, str], ...],
    repeats: int,
    device: str,
    dtype: torch.dtype,
    kernel: str,
) -> list[Times]:
    """Times of whole attentions, (case, strategy, planner) each: one of each in turn, so that drift hits all alike."""
    group, where = SequenceGroup.of(), {"device": device, "dtype": dtype}
    calls = [
        attention_call(case, case.mask(), Strategy.parse(strategy), planner, group, where, kernel)[1]
        for case, strategy, planner in cases
    ]
    times: list[Times] = [[] for _ in calls]
    for turn in range(repeats):
        for mine, call in zip(times, calls, strict=True):
            mine += timed(call, device, 1, warm_up=int(turn == 0))
    return times


def attention_call(
    case: Case, mask: BlockMask, strategy: Strategy, planner: str, group: SequenceGroup, where: dict, kernel: str
) -> tuple[Plan, Callable[[], object]]:
    """The plan, and a call of the attention on random q, k, v of this rank."""
    home = HomeLayout.named(require_planner(planner).home, mask.grid, strategy)
    plan = make_plan(mask, strategy, planner, home=home)
    attend = DualBalancedAttention.prepare(plan, mask, home, group, device=where["device"], kernel=kernel)
    q, k, v = (torch.randn(1, case.heads, home.shard, case.head_dim, **where) for _ in range(3))
    return plan, lambda: attend(q, k, v)


def _kernel_call(case: Case, where: dict, kernel: str) -> Callable[[], object]:
    """The kernel alone on all rows of the case, as one rank would see them."""
    mask = case.mask()
    plan = make_plan(mask, "U1R1", "contiguous")
    table = build_tables(plan, mask, 0, torch.device(where["device"]))[0]
    grid = mask.grid
    q = torch.randn(len(table.kv_count), grid.block_q, case.head_dim, **where)
    k, v = (torch.randn(len(table.kv_len), grid.block_k, case.head_dim, **where) for _ in range(2))
    return lambda: block_attention(q, k, v, table.kv_index, table.kv_count, table.kv_len, kernel=kernel)


def _merge_call(elements: int, device: str) -> Callable[[], object]:
    out, part = (torch.randn(elements // 64 // 64, 64, 64, device=device) for _ in range(2))
    lse, part_lse = (torch.randn(out.shape[:2], device=device) for _ in range(2))
    return lambda: merge_states(out, lse, part, part_lse)


def _product(rows: int, width: int, where: dict) -> Callable[[], object]:
    left, right = torch.randn(rows, width, **where), torch.randn(width, width, **where)
    return lambda: left @ right


def _exchange(size: int, group: SequenceGroup, device: str) -> Callable[[], object]:
    """All-to-all in which each rank sends `size` bytes to the others together, and nothing to itself."""
    each = max(1, size // 4 // (group.size - 1))
    splits = [0 if rank == group.rank else each for rank in range(group.size)]
    sent = torch.zeros(sum(splits), device=device)
    return lambda: group.all_to_all(sent, splits, splits)


def _hand_over(size: int, group: SequenceGroup, device: str) -> Callable[[], object]:
    sent = torch.zeros(max(1, size // 4), device=device)
    previous, following = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    return lambda: group.shift(sent, to=previous, received_shape=sent.shape, source=following).wait()
