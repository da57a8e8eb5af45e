"""Images and videos trained in one step: padding, one loader a rank, KnapFormer's bags, and rows over all ranks.

Real gloo ranks with the small trained model, forward and backward of the same samples each way, in turns in one run.
`core` is the time that a rank's own thread computes, without waiting: on a machine with fewer cores than ranks a rank
that waits lends its core to the others, so that wall time hides imbalance; core time does not.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure

import dbsp_diffusers
from dbsp_cli.calibrate.timing import run_ranks
from dbsp_core import SequenceGroup
from dbsp_core.cost.hardware import load_hardware
from dbsp_core.cost.sequences import LayerSize, sequence_cost
from dbsp_core.reports.style import PLANNERS, SOFT
from dbsp_diffusers import LocalPredictions, packed_forward_local
from dbsp_diffusers.packed.wan import WAN
from scripts.results.figures import legend_below, panels
from scripts.results.result import FOLDER, Result
from scripts.training.flow import FewPads
from scripts.training.video.clips import Clips, encode_clips
from scripts.training.video.mixed import Mix, Size, cut_item, sample_of
from scripts.training.video.settings import SYNTHETIC, Settings

MASKS: dict[str, dict[str, Any]] = {
    "dense": {"source": "dense", "block_q": 16, "block_k": 16},
    "sparge": {"source": "sparge", "cdf": 0.85, "similarity": -1.0, "block_q": 16, "block_k": 16},
}
CAPTION = 16  # tokens: the longest caption, its end, and padding
MIX = "17x144x240,9x144x240,3*1x144x240,2*1x96x160"
ALONE = "no bags: one loader a rank"
Given = Sequence[tuple[int, int, Size]]
"""(rank, number in the run, size) of each sample of a step."""


@dataclass(frozen=True)
class Row:
    """One way on one kind of mask. wir, imbalance: largest core time of a rank over the least, and over the mean;
    counted_wir: that of a layer's tokens and dense blocks, forward, by constants of a CPU (nan: a rank has none);
    core_tokens_s: useful tokens over the largest core time; wall_tokens_s: over wall time; core_ratio, wall_ratio:
    those of the last way over this one's. Medians of the rounds; ratios are of each round's own times.
    gradients_differ: from those of one loader a rank, over the largest; padding attends, and is attended to"""

    mask: str
    way: str
    wir: float
    counted_wir: float
    imbalance: float
    core_tokens_s: float
    wall_tokens_s: float
    core_ratio: float
    wall_ratio: float
    gradients_differ: str
    label: str = ""


@dataclass(frozen=True)
class Way:
    """One way to share out a step. bags: as `packed_forward_local` has them; None: samples are assigned in turn, and
    padded to the largest; planner: of attention within a bag"""

    name: str
    bags: dict[str, str] | None
    planner: str = "dbsp"

    def prepared(self, transformer: Any, mask: dict[str, Any]) -> Any:
        """A copy of the transformer with db-SP enabled: over all ranks, or on each alone, to be padded. Collective."""
        made = copy.deepcopy(transformer)
        config = {"mask": mask, "planner": {"name": self.planner}, "reuse": {"mode": "sync"}}
        dbsp_diffusers.enable(made, config, group=SequenceGroup(0, 1) if self.bags is None else None)
        return made

    def loss(
        self, transformer: Any, clips: Clips, given: Given, rank: int, world: int
    ) -> tuple[LocalPredictions | None, torch.Tensor]:
        """(how the step was shared out, if it was; this rank's part of the step's loss)."""
        own = [one for place, one in enumerate(given) if (one[0] if self.bags else place % world) == rank]
        items = [cut_item(clips, number, size) for _, number, size in own]
        samples = [sample_of(item, torch.device("cpu")) for item in items]
        shared = None
        if self.bags is None:
            largest = [max(sides) for sides in zip(*(size for *_, size in given), strict=True)]
            found, zero = _padded(transformer, samples, largest)
        else:
            shared = packed_forward_local(transformer, samples, bags=self.bags)
            found, zero = shared.samples, shared.zero
        wanted = [item.noise - item.latents for item in items]
        parts = [F.mse_loss(one, other, reduction="sum") for one, other in zip(found, wanted, strict=True)]
        return shared, sum(parts, zero) / sum(math.prod(size) for *_, size in given)


def _padded(
    transformer: Any, samples: Sequence[Any], largest: Sequence[int]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    batch = []
    for sample in samples:
        gaps = [whole - side for whole, side in zip(largest, sample.size, strict=True)]
        batch.append(F.pad(sample.latents, (0, gaps[2], 0, gaps[1], 0, gaps[0])))
    if not batch:
        return [], torch.zeros((), requires_grad=True)
    times, text = torch.stack([one.timestep for one in samples]), torch.stack([one.text for one in samples])
    found = transformer(torch.stack(batch), times, text, return_dict=False)[0]
    cut = [
        one[:, : sample.size[0], : sample.size[1], : sample.size[2]]
        for one, sample in zip(found, samples, strict=True)
    ]
    return cut, torch.zeros(())


def _tokens(size: Size) -> int:
    return size[0] * (size[1] // 2) * (size[2] // 2)


def ways(world: int) -> list[Way]:
    """One bag of all ranks last."""

    def bags(topology: str, balancer: str = "dbsp") -> dict[str, str]:
        return {"topology": topology, "balancer": balancer}

    sizes = [f"g{size}n{world // size}" for size in range(1, world) if world % size == 0]
    return [
        Way("padded to the longest", None, "contiguous"),
        Way(ALONE, bags("g1n1")),
        *(Way(f"KnapFormer {each}", bags(each, "knapsack"), "contiguous") for each in (*sizes, f"g{world}n1")),
        *(Way(f"bags {each}", bags(each)) for each in sizes),
        Way("one bag of all ranks", bags(f"g{world}n1")),
    ]


def measure(rank: int, world: int, mask: str, mix: Mix, rounds: int, folder: Path) -> dict[str, Any]:
    """By way: [(core seconds of this rank, wall seconds)] and counted cost of each round, and how far its gradients
    are from those of one loader a rank."""
    from diffusers import WanTransformer3DModel

    from dbsp_cli.tiny_models import TRAINED_WAN

    shared = Clips.read(folder, no_caption=0.0, seed=0, shift=3.0)
    clips = Clips(shared.files, shared.no_text, 0.0, 0, 3.0, text_tokens=CAPTION)
    transformer = WanTransformer3DModel.from_pretrained(TRAINED_WAN / "transformer", torch_dtype=torch.float32).train()
    for block in transformer.blocks:
        block.attn2.set_processor(FewPads(block.attn2.processor))
    every = {way.name: (way, way.prepared(transformer, MASKS[mask])) for way in ways(world)}
    names = list(every)
    laps: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    counts: dict[str, list[int]] = {name: [] for name in names}
    gradients = {}
    for turn in range(rounds + 1):
        given = mix.step(turn, world)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            way, model = every[name]
            model.zero_grad()
            dist.barrier()
            wall, core = time.perf_counter(), time.thread_time()
            shared_out, loss = way.loss(model, clips, given, rank, world)
            loss.backward()
            core = time.thread_time() - core
            dist.barrier()
            if turn:
                laps[name].append((core, time.perf_counter() - wall))
                counts[name].append(_picoseconds(model, shared_out, rank))
            else:
                gradients[name] = _summed(model)
    expected = gradients[ALONE]
    differ = {name: float((grad - expected).abs().max() / expected.abs().max()) for name, grad in gradients.items()}
    return {"laps": laps, "counts": counts, "differ": differ}


def _picoseconds(transformer: Any, shared: LocalPredictions | None, rank: int) -> int:
    """What this rank's tokens and dense blocks of a layer cost by constants of a CPU; 0 where nothing counts them."""
    if shared is None or shared.plan is None:
        return 0
    tokens, blocks = shared.plan.runs.by_rank(shared.plan.topology.world)[rank], 0
    if shared.session is not None:
        plans = shared.session.records.values()
        blocks = sum(int(plan.metrics.work[:, shared.session.group.rank].sum()) for plan in plans) // len(plans)
    sizes = transformer.config.num_attention_heads, transformer.config.attention_head_dim
    layer = LayerSize(len(transformer.blocks), *sizes, WAN.token_flops(transformer))
    cost = sequence_cost(layer, load_hardware("cpu-demo"), 16, 16)
    return int(cost.picoseconds(np.array([tokens]), np.array([blocks]))[0])


def _summed(transformer: Any) -> torch.Tensor:
    """All gradients, over all ranks."""
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in transformer.parameters()]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    return flat


def rows_of(mask: str, found: Sequence[dict[str, Any]], tokens: np.ndarray, label: str) -> list[Row]:
    """found: by rank;  tokens: useful ones of each round"""
    times = {name: np.array([rank["laps"][name] for rank in found]) for name in found[0]["laps"]}  # [ranks, rounds, 2]
    slowest = {name: (laps[..., 0].max(axis=0), laps[..., 1].max(axis=0)) for name, laps in times.items()}
    ours = slowest[list(times)[-1]]
    rows = []
    for name, laps in times.items():
        core, (most, wall) = laps[..., 0], slowest[name]
        counted = np.array([rank["counts"][name] for rank in found])  # [ranks, rounds]
        values = (
            most / core.min(axis=0),
            counted.max(axis=0) / np.where(counted.min(axis=0) > 0, counted.min(axis=0), np.nan),
            most / core.mean(axis=0),
            tokens / most,
            tokens / wall,
            most / ours[0],
            wall / ours[1],
        )
        medians = [float(np.median(value)) for value in values]
        rows.append(Row(mask, name, *medians, f"{found[0]['differ'][name]:.0e}", label))
    return rows


def draw(rows: list[Row]) -> Figure:
    masks = list(dict.fromkeys(row.mask for row in rows))
    names = list(dict.fromkeys(row.way for row in rows))
    figure, axes = panels(
        "Images and videos in one training step: which way is fastest?",
        f"Useful tokens per second of the busiest rank's core; on the bars: WIR, busiest over idlest\n{rows[0].label}",
        columns=len(masks),
        height=4.8,
        sharex=True,
        sharey=True,
    )
    for axis, mask in zip(axes[0], masks, strict=True):
        for row in (row for row in rows if row.mask == mask):
            place = names.index(row.way)
            axis.barh(place, row.core_tokens_s, 0.72, color=_colour(row.way))
            axis.text(
                row.core_tokens_s - 60, place, f"{row.wir:.2f}", va="center", ha="right", size=9.5, color="white"
            )
        axis.set(xlabel="tokens per second", title=f"{mask} attention", ylim=(len(names) - 0.5, -0.5))
        axis.grid(axis="y", visible=False)
    axes[0, 0].set_yticks(range(len(names)), names)
    for label, way in (("no exchange", ALONE), ("KnapFormer's greedy", "KnapFormer"), ("planner dbsp", "bags")):
        axes[0, 0].barh(0, 0, color=_colour(way), label=label)
    legend_below(figure, axes[0, 0])
    return figure


def _colour(way: str) -> str:
    if way.startswith("KnapFormer"):
        return "#8c6bb1"
    return PLANNERS["dbsp"] if way.startswith(("bags", "one bag")) else SOFT


WAYS = Result("mixed-training", "Images and videos in one step", Row, draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4, help="steps measured each way; medians stand")
    parser.add_argument("--mix", default=MIX, help="as scripts/train_video's")
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--work", type=Path, default=Path("out/mixed"), help="folder for clips")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV and the PNG")
    options = parser.parse_args()
    mix = Mix.parse(options.mix)
    frames, height, width = (
        max(sides) for sides in zip(*(size for loader in mix.loaders for size in loader), strict=True)
    )
    sides = {"--frames": frames * 4 - 3, "--height": height * 8, "--width": width * 8, "--out": options.work}
    given = [str(part) for pair in sides.items() for part in pair]
    folder = encode_clips(Settings.parse(["--data", f"{SYNTHETIC}:8", *given]))
    steps = [mix.step(turn, options.ranks) for turn in range(1, options.rounds + 1)]
    tokens = np.array([sum(_tokens(size) for *_, size in step) for step in steps])
    label = f"measured on a CPU, {options.ranks} gloo ranks, small trained model"
    rows = []
    for mask in options.masks:
        found = run_ranks(measure, options.ranks, "cpu", mask, mix, options.rounds, folder)
        rows += rows_of(mask, found, tokens, label)
    WAYS.publish(rows, options.out)


if __name__ == "__main__":
    main()
