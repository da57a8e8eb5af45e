"""One attention on one rank: dispatch, fetch, attend, combine. Backward reads the same tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from dbsp_core.comm.exchange import KeysAtHome, mean_of_tokens
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.block_mask import NO_GRADIENTS, CoarseBranch
from dbsp_core.planning.plan import Plan
from dbsp_core.planning.wire_format import WireFormat
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.runtime.tables import ChunkTable
from dbsp_kernels import (
    Kernel,
    PartialAttention,
    attend_dense_part,
    block_attention,
    fused_kernel,
    merge_into,
)

__all__ = ["PreparedAttention", "forward"]

Keep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes what backward needs at the owner: rows [B·Rq, Bq, D], the first chunk [2, B, Ck, Bk, D], the rows' output and
its log-sum-exp [B·Rq, Bq]."""


@dataclass(eq=False, repr=False)
class PreparedAttention:
    """What does not depend on q, k and v.

    Attributes:
        part: This rank's part in the plan, with its tables on the device.
        plan: The same plan, with the numbers of the mask.
        tables: By chunk, those of the mask.
        group: The ranks that share the sequence.
        coarse: What is added to the output at home; None: nothing.
    """

    part: RankPlan
    plan: Plan
    tables: tuple[ChunkTable, ...]
    group: SequenceGroup
    coarse: CoarseBranch | None = field(default=None, kw_only=True)

    @property
    def wire(self) -> WireFormat:
        """How queries, keys and values are written on their way."""
        return self.plan.wire

    @property
    def no_gradients(self) -> str | None:
        """Why it has no gradients, and what to do. None: it has."""
        return self.wire.no_gradients or (NO_GRADIENTS if self.coarse else None)

    def keys_at_home(self, k: torch.Tensor, v: torch.Tensor) -> KeysAtHome:
        """This rank's k and v [B, H, n_local, D], with what is to be known before they travel. Collective then."""
        return KeysAtHome(k, v, mean_of_tokens(k, self.part.layout, self.group) if self.wire.centred else None)


def forward(
    prepared: PreparedAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    kernel: Kernel,
    keep: Keep | None = None,
) -> torch.Tensor:
    """Computes attention under a prepared plan and mask. Collective.

    Args:
        q, k, v: [B, H, n_local, D].
        keep: Is given what backward needs, of which nothing is held without it.

    Returns:
        [B, H, n_local, D].
    """
    out = [_at_owners(prepared, q, k, v, scale, kernel, keep)]
    # 4. The output returns to where its queries came from.
    home = prepared.part.route.combine(out.pop(), q, prepared.group)
    if prepared.coarse is not None:
        prepared.coarse.add_to(home)
    return home


def _at_owners(
    prepared: PreparedAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    kernel: Kernel,
    keep: Keep | None,
) -> torch.Tensor:
    """[B, Rq·Bq, D], the output of this rank's rows. What they were computed from is released with it."""
    route, group, wire, block_q = prepared.part.route, prepared.group, prepared.wire, prepared.plan.grid.block_q
    batch, _, _, width = q.shape
    keys = prepared.keys_at_home(k, v)
    # 1. Queries go to the owners of rows, and with them the keys and values of the rank's own ring row.
    packed_q, chunk = route.dispatch(q, keys, group)
    first = [chunk]
    rows = wire.read(packed_q, q).view(-1, block_q, width)
    del packed_q, chunk  # or they would be held while all other chunks pass
    kept = None if keep is None else first[0]
    # 2. Keys and values of other ring rows come from their ranks, each chunk beside the kernel on the one before it.
    chunks = route.chunks(first, keys, group)
    # 3. The kernel runs once for each; results merge by log-sum-exp.
    head_tokens, lse = prepared.part.head_tokens, keep is not None or len(prepared.tables) > 1
    running, last = None, prepared.tables[-1]
    for table in prepared.tables:
        dtype = q.dtype if table is last else torch.promote_types(q.dtype, torch.float32)
        running = _attend(running, rows, wire.read(next(chunks), q), table, scale, kernel, head_tokens, dtype, lse)
    if running is None:
        raise ValueError("attention needs at least one chunk of keys")
    out, out_lse = running[0].to(q.dtype), running[1]
    if keep is not None and kept is not None:
        keep(rows, kept, out, out_lse)
    return out.view(batch, -1, width)


def _attend(
    running: PartialAttention | None,
    rows: torch.Tensor,
    kv: torch.Tensor,
    table: ChunkTable,
    scale: float,
    kernel: Kernel,
    head_tokens: int | None,
    out_dtype: torch.dtype,
    lse: bool,
) -> PartialAttention:
    """The running result after one more chunk: out [B·Rq, Bq, D], and its log-sum-exp [B·Rq, Bq].

    Args:
        running: None before the first chunk.
        rows: [B·Rq, Bq, D].
        kv: [2, B, Ck, Bk, D], keys and values of the chunk.
        head_tokens: Tokens of a head, if rows are those of whole heads; see `dbsp_kernels.block_attention`.
        out_dtype: Of the result, which is in at least 32 bits until the last chunk, and where there are dense rows.
        lse: Whether the log-sum-exp is wanted: for other chunks, or for backward.
    """
    batch = kv.shape[1]
    keys, values = kv.flatten(1, 2).unbind(0)
    dense = table.dense if kernel.returns_lse and fused_kernel(rows) else None
    if dense is not None:
        table = replace(table, kv_count=dense.kv_count, kv_full=dense.kv_full)
        lse, out_dtype = True, torch.promote_types(rows.dtype, torch.float32)
    if dense is None or not dense.every:
        running = block_attention(
            rows,
            keys,
            values,
            **vars(table.expanded(batch)),
            scale=scale,
            kernel=kernel,
            partial=running,
            out_dtype=out_dtype,
            head_tokens=head_tokens,
            lse=lse,
        )
    if dense is not None:
        running = _with_dense_rows(running, rows, keys, values, table, batch, scale)
    if running is None:
        raise ValueError("a chunk has either rows for the kernel or dense rows")
    return running


def _with_dense_rows(
    running: PartialAttention | None,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: ChunkTable,
    batch: int,
    scale: float,
) -> PartialAttention:
    """Merges dense rows' attention to this chunk's keys into the running result, which is None before the first."""
    if running is None:
        wide = torch.promote_types(q.dtype, torch.float32)
        running = (
            torch.zeros_like(q, dtype=wide),
            torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device),
        )
    q, keys, values, all_out, all_lse = (t.unflatten(0, (batch, -1)) for t in (q, keys, values, *running))
    for part in table.dense.parts if table.dense else ():
        rows = slice(*part.rows)
        found = attend_dense_part(q, keys, values, part, scale)
        merge_into(all_out[:, rows], all_lse[:, rows], *found)
    return running
