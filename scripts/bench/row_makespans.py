"""Time of a rank's rows on a GPU over the mean of its slots: by head, in our order, and with long rows cut.

Counted: rows start in order, each on the first slot that is free, and take a step for each of their blocks; a part
takes 2 steps more. The slowest rank's end over the mean work per slot of all ranks, so ρ_s is in it.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.plan import Plan, plan_from_counts
from dbsp_core.sources.base import MaskRequest
from dbsp_core.sources.synthetic.source import SyntheticSource
from dbsp_kernels.row_parts import LONG_ROW, PART_BLOCKS
from dbsp_kernels.schedule import cut_rows, order_rows
from scripts.results.result import Result, Row, arguments

HUNYUAN, HUNYUAN_480, MINIMAX, MINIMAX_480 = (31, 45, 80), (31, 30, 52), (52, 48, 84), (24, 30, 52)
WAN, WAN_480, COG = (21, 45, 80), (21, 30, 52), (21, 51, 80)
GPUS = (("H100", 128, 132), ("H100", 64, 264), ("A800", 128, 216), ("B200", 128, 148))
"""A GPU, queries of a block, and rows at a time: multiprocessors × programs on each / programs of a row."""


class Case(NamedTuple):
    """A model's video: masks of a preset, or as many blocks in each row of video and all in those of text."""

    name: str
    heads: int
    thw: tuple[int, int, int]
    text_tokens: int
    density: float
    world: int = 8
    preset: str | None = None

    def row_work(self, block_q: int) -> tuple[np.ndarray, BlockGrid]:
        """Returns int64[H, nq], the blocks of each row, and the grid."""
        if self.preset is not None:
            source = SyntheticSource(preset=self.preset, density=self.density, block_q=block_q, block_k=64)
            mask = source.mask(MaskRequest(0, self.heads, self.thw, self.text_tokens))
            return mask.counts.rows, mask.grid
        grid = BlockGrid(int(np.prod(self.thw)) + self.text_tokens, self.text_tokens, block_q, 64)
        text_q, text_k = (-(-self.text_tokens // block) for block in (block_q, 64))
        work = np.full((self.heads, grid.nq), text_k + int(np.ceil(self.density * (grid.nk - text_k))))
        work[:, :text_q] = grid.nk
        return work, grid


CASES = (
    Case("Wan-14B 720p sparge .41", 40, WAN, 0, 0.41, preset="wan2.1-t2v-14b-sparge"),
    Case("Wan-14B 720p sparge .20", 40, WAN, 0, 0.20, preset="wan2.1-t2v-14b-sparge"),
    Case("Wan-1.3B 480p sparge .41", 12, WAN_480, 0, 0.41, preset="wan2.1-t2v-14b-sparge"),
    Case("Wan-1.3B 480p sparge .20", 12, WAN_480, 0, 0.20, preset="wan2.1-t2v-14b-sparge"),
    Case("Wan-1.3B 480p VSA .20", 12, WAN_480, 0, 0.20),
    Case("Wan-1.3B 480p VSA .10", 12, WAN_480, 0, 0.10),
    Case("CogVideoX1.5 sparge .41", 48, COG, 226, 0.41, preset="cogvideox1.5-5b-sparge"),
    Case("CogVideoX1.5 sparge .20", 48, COG, 226, 0.20, preset="cogvideox1.5-5b-sparge"),
    Case("HunyuanVideo-1.5 720p SSTA .15", 16, HUNYUAN, 1000, 0.15),
    Case("HunyuanVideo-1.5 480p SSTA .15", 16, HUNYUAN_480, 1000, 0.15),
    Case("HunyuanVideo-1.5 480p sparge .20", 16, HUNYUAN_480, 1000, 0.20, preset="wan2.1-t2v-14b-sparge"),
    Case("MiniMax-H3 1344×768 VSA .20", 56, MINIMAX, 512, 0.20),
    Case("MiniMax-H3 1344×768 VSA .20", 56, MINIMAX, 512, 0.20, world=16),
    Case("MiniMax-H3 832×480 VSA .20", 56, MINIMAX_480, 512, 0.20),
    Case("MiniMax-H3 832×480 VSA .20", 56, MINIMAX_480, 512, 0.20, world=16),
    Case("MiniMax-H3 832×480 VSA .10", 56, MINIMAX_480, 512, 0.10),
    Case("MiniMax-H3 832×480 VSA .10", 56, MINIMAX_480, 512, 0.10, world=16),
)


def last_end(times: np.ndarray, slots: int) -> int:
    """Returns when the last of int64[n] ends, if each starts in order on the first slot that is free."""
    free = [0] * slots
    for steps in times.tolist():
        heapq.heapreplace(free, free[0] + steps)
    return max(free)


def ends_of_rank(plan: Plan, work: np.ndarray, rank: int, slots: int, cut: bool) -> tuple[int, int, int, int]:
    """Returns when a rank's rows end head by head, in order and with long ones cut; and how many parts that adds."""
    head, block = plan.rows_of(rank)
    count = work[head, block]
    by_head = np.lexsort((-count, head))
    counts, spans = torch.from_numpy(count).int()[None], torch.from_numpy(head)
    ordered = count[order_rows(counts, spans, slots)[0].numpy()]
    ends = last_end(count[by_head], slots), last_end(ordered, slots)
    if not cut:
        return *ends, ends[1], 0
    (parts,) = cut_rows(counts, counts, spans, slots)
    items = parts.items[parts.items[:, 0] >= 0].numpy()
    return *ends, last_end(items[:, 2] + PART_BLOCKS * (items[:, 4] >= 0), slots), len(items) - len(count)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    for block_q in sorted({block_q for _, block_q, _ in GPUS}):
        for case in CASES[: options.cases]:
            work, grid = case.row_work(block_q)
            plan = plan_from_counts(work, grid, f"U{case.world}R1", compare=False)
            for gpu, _, slots in (gpu for gpu in GPUS if gpu[1] == block_q):
                share = plan.row_share(slots)
                ends = [ends_of_rank(plan, work, rank, slots, share >= LONG_ROW) for rank in range(case.world)]
                by_head, ordered, cut, added = (max(of_rank) for of_rank in zip(*ends, strict=True))
                mean = plan.work.sum() / (case.world * slots)
                yield Row(
                    case=case.name,
                    gpus=case.world,
                    gpu=gpu,
                    block_q=block_q,
                    slots=slots,
                    rows=int(np.bincount(plan.owner.ravel()).max()),
                    row_share=f"{share:.3f}",
                    rho=f"{plan.rho:.3f}",
                    by_head=f"{by_head / mean:.3f}",
                    ordered=f"{ordered / mean:.3f}",
                    cut=f"{cut / mean:.3f}",
                    added=added,
                )


def summary(rows: list[Row]) -> Iterator[str]:
    for gpu, block_q, slots in GPUS:
        here = [row for row in rows if (row.gpu, row.block_q) == (gpu, block_q)]
        for name in ("by_head", "ordered", "cut"):
            values = [float(getattr(row, name)) for row in here]
            yield f"{gpu}, {block_q}, {slots} slots, {name}: mean {np.mean(values):.3f}, worst {max(values):.3f}"


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=len(CASES), help="of them, the first")
    Result("rows", "Ends of ranks over the mean work of a slot").run(parser, measure, summary)
