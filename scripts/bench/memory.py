"""Peak memory of one attention on one rank, counted: db-SP's over that of xfuser's own USP, at Wan2.1-14B's heads.

python -m scripts.bench.memory                     8 ranks, every strategy
python -m scripts.bench.memory --json > FILE       the same numbers for a program

Both codes run for real, but what is sent does not arrive, and kernels compute nothing: only floating-point tensors
that are alive at once are counted, beside q, k and v themselves, in units of one of them.
xfuser 0.7's ring uses torch's ring attention, which gathers all keys and values of the ring at once; "rotating" is the
same with torch's other method, which hands them on as db-SP does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from dbsp_core import SequenceLayout, Strategy, make_plan
from dbsp_core.sources import MaskRequest, SyntheticSource
from dbsp_core.sources.synthetic.presets import PRESETS
from dbsp_xdit.patches import install
from scripts.bench.peak_memory import Alive, peak_of_attention

PRESET, VIDEO, HEAD_DIM, DTYPE = "wan2.1-t2v-14b", (21, 30, 32), 128, torch.bfloat16


def usp_peak(strategy: Strategy, tokens: int, heads: int, rotating: bool) -> float:
    """Of rank 0. Collective in name only."""
    with contextlib.redirect_stdout(sys.stderr):
        install(active=True)  # xfuser is not to be imported where there is no accelerator
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring
        from xfuser.model_executor.layers import usp

    x, y = strategy.ulysses, strategy.ring
    groups = SimpleNamespace(
        ULYSSES_PG=dist.new_group(list(range(x))), RING_PG=dist.new_group(list(range(0, x * y, x)))
    )

    def attention(query: torch.Tensor, *_: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(query), torch.empty(query.shape[:3])

    settings = SimpleNamespace(use_spargeattn_head_balance=False)
    state = SimpleNamespace(runtime_config=settings, attention_backend=None, fp8_comms=None)
    named = {
        "PROCESS_GROUP": groups,
        "get_sequence_parallel_world_size": lambda: x * y,
        "get_ulysses_parallel_world_size": lambda: x,
        "get_ring_parallel_world_size": lambda: y,
        "get_runtime_state": lambda: state,
        "_get_attention_function": lambda backend=None: attention,
    }
    sent = {
        "all_to_all_single": lambda x, *_, **options: torch.empty_like(x),
        "permute_tensor": lambda x, *_: torch.empty_like(x),
        "all_gather_single": lambda x, *_, **options: x.new_empty(y * x.shape[0], *x.shape[1:]),
    }
    method = ring._RotateMethod.ALL_TO_ALL if rotating else ring._RotateMethod.ALL_GATHER
    q, k, v = (torch.empty(1, heads, tokens // strategy.world, HEAD_DIM, dtype=DTYPE) for _ in range(3))
    alive = Alive(q, k, v)
    with contextlib.ExitStack() as stack:
        for name, value in named.items():
            stack.enter_context(mock.patch.object(usp, name, value))
        stack.enter_context(mock.patch.object(ring._cp_options, "rotate_method", method))
        for name, value in sent.items():
            stack.enter_context(mock.patch.object(ring.ft_c, name, value))
        stack.enter_context(alive)
        usp.USP(q, k, v)
    return alive.peak / (q.numel() * q.element_size())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=args.ranks, store=FakeStore())
    preset = PRESETS[PRESET]
    mask = SyntheticSource(preset=PRESET).mask(MaskRequest(0, preset.model.heads, VIDEO))
    rows = []
    for strategy in Strategy.all_for(args.ranks):
        layout = SequenceLayout.striped(mask.grid, strategy)
        plan = make_plan(mask, strategy, layout=layout)
        usp = [usp_peak(strategy, mask.grid.tokens, mask.heads, rotating) for rotating in (False, True)]
        ours = [peak_of_attention(plan, mask, layout, rank, HEAD_DIM, DTYPE) for rank in range(args.ranks)]
        row: dict[str, Any] = {"strategy": str(strategy), "usp": usp[0], "usp_rotating": usp[1]}
        row |= {"dbsp_least": min(ours), "dbsp_most": max(ours)}
        row |= {"over_usp": max(ours) / usp[0], "over_usp_rotating": max(ours) / usp[1]}
        rows.append(
            row | {"rows_most_over_mean": float((plan.heads * mask.grid.nq) ** -1 * rows_most(plan) * args.ranks)}
        )
    dist.destroy_process_group()
    if args.json:
        about = {"label": "counted", "dtype": str(DTYPE), "heads": mask.heads, "tokens": mask.grid.tokens}
        print(json.dumps({**about, "head_dim": HEAD_DIM, "ranks": args.ranks, "rows": rows}, indent=1))
        return
    table = Table(title="peak beside q, k, v, in tensors of q's size, counted")
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.2f}" for value in row.values()))
    Console(width=max(120, Console().width)).print(table)


def rows_most(plan: Any) -> int:
    return int(max(len(plan.assignment.rows_of(rank)[0]) for rank in range(plan.strategy.world)))


if __name__ == "__main__":
    main()
