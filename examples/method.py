"""db-SP's method from scratch: balanced sequence parallelism for block-sparse attention, exact, in one file.

    torchrun --nproc-per-node 4 examples/method.py --ulysses 2

A *row* is one (head, query block) with the key blocks that its mask lists. A *plan* is one table, `owner[head, query
block]`: the rank that computes the row. Plain USP is a plan; db-SP's plan gives all ranks the same work. Outputs don't
depend on the plan, because a row needs only its own q and the k and v that it attends to.

Shapes: P ranks, of which rank r * U + u is in ring row r and column u; H heads, N blocks of B tokens, head_dim D. Each
rank holds a shard of b blocks of the sequence with all heads. `source`, int [N], is the rank that holds each block.

Forward only: db-SP's backward (`dbsp_core/runtime/backward.py`) reads the same tables in the other direction.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# ---- 1. Plan: which rank computes which row ----
TOLERANCE = 1.002  # planning stops at this ρ_s


def plan_usp(heads: int, source: np.ndarray, ulysses: int) -> np.ndarray:
    """Returns plain USP's owner [H, N]: equal numbers of heads per column; rows stay in their ring row."""
    return source // ulysses * ulysses + (np.arange(heads) * ulysses // heads)[:, None]


def plan_balanced(work: np.ndarray, source: np.ndarray, ulysses: int, ring: int) -> np.ndarray:
    """Returns a balanced owner [H, N]. `work`, int [H, N], is the number of key blocks of each row."""
    # 1. Heads to columns: the heaviest head first, each to the column with the least work.
    column, load = np.zeros_like(work), np.zeros(ulysses)
    for h in np.argsort(-work.sum(1), kind="stable"):
        column[h] = load.argmin()
        load[load.argmin()] += work[h].sum()
    # 2. Split heads where whole heads don't balance. A split has a price: both columns receive the head's k and v.
    head = np.arange(len(work)).repeat(len(source))
    column = balance(column.ravel(), work.ravel(), head, ulysses).reshape(work.shape)
    # 3. Rows to the ring ranks of their column: they stay in the ring row of their source if balance allows.
    ring_row = np.tile(source // ulysses, (len(work), 1))
    for u in range(ulysses):
        here = column == u
        ring_row[here] = balance(ring_row[here], work[here], np.zeros(here.sum()), ring)
    return ring_row * ulysses + column


def balance(part: np.ndarray, work: np.ndarray, head: np.ndarray, parts: int) -> np.ndarray:
    """Moves rows from the heaviest part to the lightest, one at a time, until no step helps. Returns each row's part.

    A step may swap two rows of one head. Heads with rows in both parts are preferred, so that few heads are split.
    All arrays are [R], for R rows; parts are numbers below `parts`.
    """
    part = part.copy()
    while True:
        load = np.bincount(part, work, parts)
        full, empty, mean = load.argmax(), load.argmin(), load.mean()
        give, take = np.flatnonzero((part == full) & (work > 0)), np.flatnonzero(part == empty)
        change = work[give, None] - np.append(0, work[take])  # [give, 1 + take]: in column 0 nothing is swapped
        allowed = (change > 0) & (change < load[full] - load[empty])
        allowed[:, 1:] &= head[give, None] == head[take]
        if load[full] <= TOLERANCE * mean or not allowed.any():
            return part
        # The best change brings one of both parts to the mean. A step that splits another head comes last.
        miss = abs(change - min(load[full] - mean, mean - load[empty]))
        miss += work.sum() * ~np.isin(head[give], head[take])[:, None]
        i, j = np.unravel_index(np.where(allowed, miss, np.inf).argmin(), miss.shape)
        part[give[i]] = empty
        if j > 0:
            part[take[j - 1]] = full


def imbalance(work: np.ndarray, owner: np.ndarray) -> float:
    """Returns ρ_s, the work of the slowest rank over the mean. No step is in lockstep, so totals decide."""
    load = np.bincount(owner.ravel(), work.ravel(), dist.get_world_size())
    return float(load.max() / load.mean()) if load.any() else 1.0


# ---- 2. Routes: what a plan says about messages ----
Route = tuple[list[np.ndarray], list[np.ndarray]]  # (sends, receives): (head, block) pairs, int [n, 2], by peer


def make_route(wants: np.ndarray, source: np.ndarray) -> Route:
    """Returns this rank's part in sending the pairs wants, bool [P, H, N], from their sources to each rank.

    All ranks know the plan, so no sizes are exchanged. In `sends`, blocks are numbered within the shard.
    """
    rank = dist.get_rank()
    sends = [np.argwhere(theirs[:, source == rank]) for theirs in wants]
    return sends, [np.argwhere(wants[rank] & (source == peer)) for peer in range(len(wants))]


def make_routes(owner: np.ndarray, source: np.ndarray, ulysses: int) -> tuple[Route, list[Route]]:
    """Returns the route of q rows, and one route per chunk of keys and values."""
    ranks = np.arange(dist.get_world_size())
    owns = owner == ranks[:, None, None]  # [P, H, N]
    keys = np.broadcast_to(owns.any(2, keepdims=True), owns.shape)  # all blocks of a head of which a rank owns rows
    # Chunk i comes directly from the ranks i ring rows before: chunk 0 from the rank's own ring row.
    distance = (ranks[:, None] // ulysses - source // ulysses) % (len(ranks) // ulysses)  # [P, N]
    chunks = [make_route(keys & (distance == i)[:, None], source) for i in range(len(ranks) // ulysses)]
    return make_route(owns, source), chunks


def index(pairs: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Returns the heads and the blocks of all peers' pairs, int [n] each."""
    return tuple(np.concatenate(pairs).T)


def exchange(packed: Tensor, sends: list, receives: list) -> Callable[[], Tensor]:
    """Starts an all-to-all of blocks [n, B, ...], any number per rank. Returns a function that waits for them."""
    arrived = packed.new_empty(sum(map(len, receives)), *packed.shape[1:])
    work = dist.all_to_all_single(arrived, packed, [*map(len, receives)], [*map(len, sends)], async_op=True)
    return lambda: (work.wait(), arrived)[1]


# ---- 3. Attention ----
def attention(q: Tensor, kv: Tensor, mask: np.ndarray, tokens: int, route: Route, chunks: list[Route]) -> Tensor:
    """Returns block-sparse attention of this rank's shard, [H, b, B, D].

    Takes q [H, b, B, D], k and v joined [H, b, B, 2D], and the mask, bool [H, N, N]; keys beyond `tokens` are padding.
    """
    sends, receives = route
    # 1. Dispatch: q rows to their owners.
    rows, (head, block) = exchange(q[index(sends)], sends, receives)(), index(receives)  # [R, B, D], [R], [R]
    # 2. Fetch: k and v in chunks. Two are in flight: the next one is requested before the kernel runs on this one.
    requests = (exchange(kv[index(pairs)], pairs, arrivals) for pairs, arrivals in chunks)
    out, lse = torch.zeros_like(rows), rows.new_full(rows.shape[:2], -torch.inf)
    upcoming = next(requests)
    for _, arrivals in chunks:
        current, upcoming = upcoming, next(requests, upcoming)
        keys, values = current().chunk(2, -1)  # [C, B, D]
        # 3. Attend: every row to its key blocks in this chunk. Partial outputs merge by log-sum-exp.
        key_head, key_block = index(arrivals)
        seen = mask[head[:, None], block[:, None], key_block] & (head[:, None] == key_head)  # [R, C]
        real = key_block[:, None] * q.shape[2] + np.arange(q.shape[2]) < tokens  # [C, B]
        attend(out, lse, rows, keys, values, torch.from_numpy(seen[..., None] & real))
    # 4. Combine: outputs go back the way that the q rows came.
    local = torch.zeros_like(q)
    local[index(sends)] = exchange(out, receives, sends)()
    return local


def attend(out: Tensor, lse: Tensor, rows: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> None:
    """Merges attention of q rows [R, B, D] to a chunk [C, B, D] into out and lse [R, B]. Seen keys: bool [R, C, B]."""
    for r in seen.any(2).any(1).nonzero().flatten().tolist():
        scores = rows[r] @ keys[seen[r]].T * rows.shape[-1] ** -0.5
        total = torch.logaddexp(lse[r], scores.logsumexp(-1))
        out[r] = (lse[r] - total).exp()[:, None] * out[r] + (scores - total[:, None]).exp() @ values[seen[r]]
        lse[r] = total


# ---- 4. Comparison with dense attention in one process ----
def compare(ulysses: int, heads: int, tokens: int, block: int) -> dict[str, list[float]]:
    """Runs both plans on a random mask. Returns ρ_s, most bytes received, and largest difference, by plan."""
    rank, ranks, blocks = dist.get_rank(), dist.get_world_size(), -(-tokens // block)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)  # equal on all ranks
    mask = rng.random((heads, blocks, blocks)) < rng.random((heads, 1, 1)) * rng.uniform(0.5, 1.5, (blocks, 1))
    mask[rng.random((heads, blocks)) < 0.1] = False  # empty rows
    q, k, v = torch.randn(3, heads, blocks * block, 32, generator=generator)
    seen = torch.from_numpy(mask).repeat_interleave(block, 1).repeat_interleave(block, 2)[..., :tokens]
    scores = (q @ k[:, :tokens].mT * 32**-0.5).masked_fill(~seen, -torch.inf)
    dense = scores.softmax(-1).nan_to_num() @ v[:, :tokens]
    source = np.arange(blocks) * ranks // blocks  # unequal shards
    q, kv, dense = (x.unflatten(1, (blocks, block))[:, source == rank] for x in (q, torch.cat((k, v), -1), dense))
    work, results, usp = mask.sum(2), {}, plan_usp(heads, source, ulysses)
    balanced = plan_balanced(work, source, ulysses, ranks // ulysses)
    for name, owner in {"plain USP": usp, "balanced": balanced}.items():
        route, chunks = make_routes(owner, source, ulysses)
        out = attention(q, kv, mask, tokens, route, chunks)
        difference = (out - dense).abs().nan_to_num(torch.inf).numpy().max(initial=0)
        pairs = sum(len(pairs) for _, arrivals in chunks for peer, pairs in enumerate(arrivals) if peer != rank)
        worst = torch.tensor([pairs * block * kv.shape[-1] * kv.itemsize, difference], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        results[name] = [imbalance(work, owner), *worst.tolist()]
    return results


def main() -> None:
    """Compares both plans and prints the results."""
    parser = argparse.ArgumentParser(description="Balanced sequence parallelism for block-sparse attention.")
    for option, default in {"--ulysses": 2, "--heads": 5, "--tokens": 790, "--block": 16}.items():
        parser.add_argument(option, type=int, default=default)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_world_size() % options.ulysses:
        parser.error(f"--ulysses {options.ulysses} does not divide {dist.get_world_size()} ranks; choose a divisor")
    for name, (rho, received, difference) in compare(**vars(options)).items():
        if dist.get_rank() == 0:
            print(f"{name}: ρ_s {rho:.3f}, K/V received {received / 1e6:.2f} MB, difference {difference:.1e}")
        if not difference <= 1e-5:
            raise SystemExit(f"{name}: largest difference from dense attention is {difference:.1e}, above 1e-5")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
