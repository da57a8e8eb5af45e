"""Decoding a video on all ranks together against the serial tiled decode, alternately in one run.

python -m scripts.bench.video_decode                     two gloo ranks with one core each
python -m scripts.bench.video_decode --out FILE          and the rows as CSV

Each autoencoder of diffusers, with fewer channels than the published ones and the tiles of its class made smaller.
The serial decode runs on rank 0 while the others wait. `wall` is a median of turns; on a machine whose cores others
use, it says little. `core` is the processor time of a rank's own thread, of the rank that has most: what wall time
comes to where every rank has a core for itself, but for what is waited for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dbsp_core import SequenceGroup
from dbsp_core.cost.machine import device_class
from dbsp_diffusers.patching import PatchSet
from dbsp_diffusers.sharding.generation_checks import GenerationChecks
from dbsp_diffusers.sharding.tiled_decode import share_decoding
from scripts.bench.timing import run_ranks
from scripts.checks.csv_table import update_table
from scripts.results.result import print_table

CASES = ("wan", "cogvideox", "hunyuan")


@dataclass(frozen=True)
class Row:
    """One autoencoder. Seconds; ratios are serial over parallel, of medians. core: of the rank with most"""

    autoencoder: str
    latents: str
    ranks: int
    turns: int
    serial_wall_s: float
    parallel_wall_s: float
    wall_ratio: float
    serial_core_s: float
    parallel_core_s: float
    core_ratio: float
    equal: bool
    label: str


def small(case: str) -> tuple[Any, torch.Tensor]:
    """An autoencoder and latents of some twenty tiles, the last ones short."""
    import diffusers

    torch.manual_seed(0)
    if case == "wan":
        vae = diffusers.AutoencoderKLWan(base_dim=16, num_res_blocks=1)
        vae.enable_tiling(96, 96, 72, 72)
        size = (1, 16, 2, 30, 40)
    elif case == "cogvideox":
        vae = diffusers.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(32, 32, 64, 64),
            layers_per_block=1,
        )
        vae.enable_tiling(96, 96)
        size = (1, 16, 2, 30, 40)
    else:
        vae = diffusers.AutoencoderKLHunyuanVideo(block_out_channels=(32, 32, 64, 64), layers_per_block=1)
        vae.enable_tiling(96, 96, 16, 72, 72, 12)
        size = (1, 16, 3, 30, 40)
    return vae.eval(), torch.randn(size)


def decode_cases(
    rank: int, world: int, cases: tuple[str, ...], turns: int
) -> dict[str, tuple[list[list[float]], bool]]:
    """What `decode_alternately` returns, by case."""
    return {case: decode_alternately(rank, world, case, turns) for case in cases}


@torch.no_grad()
def decode_alternately(rank: int, world: int, case: str, turns: int) -> tuple[list[list[float]], bool]:
    """(serial wall, serial core, parallel wall, parallel core) of each turn, and whether the bits are equal."""
    torch.set_num_threads(1)
    vae, latents = small(case)
    group = SequenceGroup.from_group()
    control, found, equal = group.control(), [], True
    for turn in range(turns + 1):  # the first warms up
        control.barrier()
        start, core = time.perf_counter(), time.thread_time()
        serial = vae.decode(latents).sample if rank == 0 else None
        times = [time.perf_counter() - start, time.thread_time() - core]
        control.barrier()
        patches = PatchSet()
        share_decoding(SimpleNamespace(vae=vae), GenerationChecks(group), patches)
        control.barrier()
        start, core = time.perf_counter(), time.thread_time()
        shared = vae.decode(latents).sample
        times += [time.perf_counter() - start, time.thread_time() - core]
        patches.detach()
        equal = equal and (serial is None or torch.equal(serial, shared))
        if turn:
            found.append(times)
    return found, equal


def measured(case: str, ranks: int, turns: int, by_rank: list[tuple[list[list[float]], bool]]) -> Row:
    serial_wall, serial_core = (statistics.median(turn[part] for turn in by_rank[0][0]) for part in (0, 1))
    parallel_wall, parallel_core = (
        max(statistics.median(turn[part] for turn in turns_of_rank) for turns_of_rank, _ in by_rank) for part in (2, 3)
    )
    return Row(
        autoencoder=case,
        latents="x".join(map(str, small(case)[1].shape)),
        ranks=ranks,
        turns=turns,
        serial_wall_s=round(serial_wall, 3),
        parallel_wall_s=round(parallel_wall, 3),
        wall_ratio=round(serial_wall / parallel_wall, 2),
        serial_core_s=round(serial_core, 3),
        parallel_core_s=round(parallel_core, 3),
        core_ratio=round(serial_core / parallel_core, 2),
        equal=all(equal for _, equal in by_rank),
        label=f"measured, {device_class('cpu')}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--out", type=Path, help="CSV file in which rows are replaced")
    args = parser.parse_args()
    by_rank = run_ranks(decode_cases, args.ranks, "cpu", tuple(args.cases), args.turns)
    rows = [measured(case, args.ranks, args.turns, [one[case] for one in by_rank]) for case in args.cases]
    if args.out is not None:
        update_table(args.out, [asdict(row) for row in rows], ("autoencoder", "ranks"))
    print_table("Seconds, and serial over parallel", [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
