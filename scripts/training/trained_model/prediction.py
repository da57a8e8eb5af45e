"""What a low-rank predictor finds (DSV, Figs. 16 to 18, in kind): accuracy on the small trained model, and its speed.

Accuracy: projections are fitted on one video of the small trained model and tested on another: how much attention is
in the blocks that they choose, and how many of the blocks of most attention are among them, beside the predictor by
means that `sparge` has. Speed: one attention on one core, of random queries and keys, over sparsity and over tokens.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from dbsp_cli.mask_tools.fit import fit_recording
from dbsp_core import BlockMask, DualBalancedAttention, SequenceGroup, SequenceLayout, make_plan
from dbsp_core.config.config import DbspConfig
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.reports.style import INK, MASKS
from dbsp_core.sources import DenseSource, LocalQK, LowRankSource, MaskRequest, RecordQKSource
from dbsp_core.sources.base import Changes
from dbsp_core.sources.lowrank import LowRankProjections, predicted_mass
from scripts.results.figures import grouped_bars, legend_below, panels
from scripts.results.result import FOLDER, Result
from scripts.training.trained_model.small_model import FRAMES, HEIGHT, MEASURED_HERE, PROMPTS, WIDTH, load_pipeline
from tests.support.single_process import attach_single_process

BLOCK, STEPS = 16, 6
SHARES = (0.1, 0.2, 0.3)
ON_CPU = "measured on one CPU core"


@dataclass(frozen=True)
class Accuracy:
    """Means over rows, heads and the tested steps. share: of each row's blocks that are chosen.

    mass:   attention in the chosen blocks;  of_best: over that of the best choice
    found:  share of the best choice's blocks that are chosen
    """

    predictor: str
    layer: str
    share: float
    mass: float
    of_best: float
    found: float
    label: str = MEASURED_HERE


@dataclass
class Kept:
    """A dense mask source that keeps queries and keys of some steps, by (step, layer)."""

    steps: tuple[int, ...]
    tensors: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, float]] = field(default_factory=dict)
    changes: Changes = "per_call"
    dense: DenseSource = field(default_factory=lambda: DenseSource(BLOCK, BLOCK))

    def grid(self, request: MaskRequest) -> BlockGrid:
        return self.dense.grid(request)

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        if request.step in self.steps and request.cfg_branch == 0:
            self.tensors[request.step, request.layer] = (tokens.q[0].clone(), tokens.k[0].clone(), tokens.scale)
        return self.dense.mask(request)


def run_model(pipeline: Any, source: Any, prompt: str, seed: int) -> None:
    attachment = attach_single_process(pipeline.transformer, DbspConfig(mask=source))
    try:
        pipeline(
            prompt=prompt,
            negative_prompt="",
            height=HEIGHT,
            width=WIDTH,
            num_frames=FRAMES,
            num_inference_steps=STEPS,
            guidance_scale=3.0,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
        )
    finally:
        attachment.detach()


def masses(kept: Kept, layer: int, step: int, fitted: dict[int, LowRankProjections]) -> dict[str, torch.Tensor]:
    """By predictor, the attention of each block, float64[H, nq, nk]; "truth" is the attention itself."""
    q, k, scale = kept.tensors[step, layer]
    grid = BlockGrid.uniform(q.shape[1], BLOCK)
    lengths = torch.from_numpy(grid.q_axis.lengths)[:, None]
    places = torch.from_numpy(grid.q_axis.block_of)

    def of(query: torch.Tensor, key: torch.Tensor, every_query: bool) -> torch.Tensor:
        heads = zip(query, key, strict=True)
        return torch.stack([predicted_mass(*head, grid, scale, every_query=every_query) for head in heads])

    def means(tokens: torch.Tensor) -> torch.Tensor:
        return tokens.new_zeros(len(tokens), grid.nq, tokens.shape[2]).index_add(1, places, tokens) / lengths

    found = {"truth": of(q, k, True), "means": torch.softmax(means(q) @ means(k).transpose(1, 2) * scale, -1).double()}
    for rank, one in fitted.items():
        query, key = q @ one.query[layer], k @ one.key[layer]
        found[f"rank {rank}, mean query"] = of(query, key, False)
        found[f"rank {rank}, all queries"] = of(query, key, True)
    return found


def accuracy(ranks: tuple[int, ...], test_steps: tuple[int, ...]) -> list[Accuracy]:
    pipeline, kept = load_pipeline(), Kept(test_steps)
    with tempfile.TemporaryDirectory() as folder:
        recorder = RecordQKSource(BLOCK, BLOCK, path=folder)
        run_model(pipeline, recorder, PROMPTS[1], seed=1)
        recorder.write()
        fitted = {}
        for rank in ranks:
            fit_recording([Path(folder)], Path(folder) / f"{rank}.safetensors", rank)
            fitted[rank] = LowRankProjections.load(f"{folder}/{rank}.safetensors")
    run_model(pipeline, kept, PROMPTS[0], seed=0)
    sums: dict[tuple[str, str, float], list[tuple[float, float, float]]] = {}
    for step, layer in sorted(kept.tensors):
        found = masses(kept, layer, step, fitted)
        truth = found["truth"]
        for share in SHARES:
            count = max(1, int(share * truth.shape[-1]))
            best = torch.zeros_like(truth).scatter(-1, truth.topk(count).indices, 1.0)
            for name, mass in found.items():
                chosen = torch.zeros_like(truth).scatter(-1, mass.topk(count).indices, 1.0)
                held, most = ((truth * one).sum(-1) for one in (chosen, best))
                values = (
                    float(held.mean()),
                    float(held.mean() / most.mean()),
                    float((chosen * best).sum(-1).mean() / count),
                )
                for place in ("all", str(layer)):
                    sums.setdefault((name, place, share), []).append(values)
    return [
        Accuracy(*key, *(sum(column) / len(column) for column in zip(*rows, strict=True)))
        for key, rows in sums.items()
    ]


LINES = {
    "truth": ("attention itself", MASKS["dense"], ":"),
    "means": ("pooled means (sparge)", MASKS["sparge"], "-"),
    "rank 4, mean query": ("rank 4, mean query", MASKS["lowrank, mean query"], "--"),
    "rank 4, all queries": ("rank 4, all queries", MASKS["lowrank"], "--"),
    "rank 8, mean query": ("rank 8, mean query", MASKS["lowrank, mean query"], "-"),
    "rank 8, all queries": ("rank 8, all queries", MASKS["lowrank"], "-"),
}
"""By predictor: in words, colour, and kind of line."""


def draw_accuracy(rows: list[Accuracy]) -> Figure:
    figure, axes = panels(
        "Which blocks matter: do a few dimensions tell?",
        f"Low-rank prediction, {rows[0].label}",
        columns=2,
        height=4.8,
    )
    left, right = axes[0]
    for name in dict.fromkeys(row.predictor for row in rows):
        words, colour, style = LINES.get(name, (name, INK, "-"))
        look = {"color": colour, "linestyle": style, "marker": "o", "markersize": 5}
        every = [row for row in rows if row.predictor == name and row.layer == "all"]
        left.plot([100 * row.share for row in every], [row.mass for row in every], label=words, **look)
        by_layer = [row for row in rows if row.predictor == name and row.layer != "all" and row.share == 0.2]
        right.plot([row.layer for row in by_layer], [row.found for row in by_layer], **look)
    left.set(xlabel="blocks that are chosen in each row, %", ylabel="attention in them", title="Attention caught")
    right.set(xlabel="layer", ylabel="share", ylim=(0, 1.04), title="Of the best 20 % of blocks, found")
    legend_below(figure, left, columns=3)
    return figure


ACCURACY = Result("prediction", "Low-rank prediction of blocks", Accuracy, draw_accuracy)


@dataclass(frozen=True)
class Speed:
    """Milliseconds of a core's time for one attention, least of some repetitions.

    dense_ms: full attention by torch's kernel;  predict_ms: projections, scores and choice of blocks (forward only)
    prepare_ms: plan and kernel tables;  sparse_ms: block-sparse attention under a given mask;  backward: what the
    gradient of either takes, after its forward
    speedup: of forward, over full attention, with predicting and preparing
    """

    tokens: int
    sparsity: float
    dense_ms: float
    sparse_ms: float
    predict_ms: float
    prepare_ms: float
    dense_backward_ms: float
    sparse_backward_ms: float
    speedup: float
    backward_speedup: float
    label: str = ON_CPU


def least_ms(function: Callable[[], Any], repeats: int) -> float:
    """Of the process's own time: what others do on the machine is not in it."""
    times = []
    for _ in range(repeats + 1):  # the first warms up
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return 1e3 * min(times[1:])


def speed(tokens: int, sparsity: float, heads: int, width: int, rank: int, repeats: int) -> Speed:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(1, heads, tokens, width, generator=generator) for _ in range(3))
    request, local = MaskRequest(0, heads, (tokens // 64, 8, 8)), LocalQK.alone(q, k)
    with tempfile.TemporaryDirectory() as folder:
        recorder = RecordQKSource(path=folder)
        recorder.mask(request, local)
        recorder.write()
        fit_recording([Path(folder)], Path(folder) / "fitted.safetensors", rank)
        source = LowRankSource(path=f"{folder}/fitted.safetensors", topk=1 - sparsity)
        predict_ms = least_ms(lambda: source.mask(request, local), repeats)
        mask = source.mask(request, local)
    layout = SequenceLayout.contiguous(tokens, 1)

    def prepare() -> DualBalancedAttention:
        fresh = BlockMask(mask.bits.clone(), mask.grid)
        return DualBalancedAttention.prepare(make_plan(fresh, "U1R1"), fresh, layout, SequenceGroup(0, 1))

    attend, full = prepare(), torch.nn.functional.scaled_dot_product_attention
    forward = [least_ms(lambda f=f: f(q, k, v), repeats) for f in (full, attend)]
    given = [t.clone().requires_grad_() for t in (q, k, v)]

    def backward_ms(function: Callable[..., torch.Tensor]) -> float:
        out = function(*given)
        return least_ms(lambda: torch.autograd.grad(out.sum(), given, retain_graph=True), repeats)

    backward = backward_ms(full), backward_ms(attend)
    prepare_ms = least_ms(prepare, repeats)
    spent = forward[1] + predict_ms + prepare_ms
    times = (forward[0], forward[1], predict_ms, prepare_ms, *backward)
    return Speed(tokens, sparsity, *times, forward[0] / spent, backward[0] / backward[1])


def speeds(options: argparse.Namespace) -> Iterator[Speed]:
    """Fig. 17 at the largest number of tokens, Fig. 18 at 90 %."""
    setting = options.heads, 64, options.rank, options.repeats
    for sparsity in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98):
        yield speed(max(options.tokens), sparsity, *setting)
    for tokens in sorted(options.tokens)[:-1]:
        yield speed(tokens, 0.9, *setting)


PARTS = {"sparse_ms": "attention", "predict_ms": "prediction", "prepare_ms": "plan and tables"}
COLOURS = dict(zip(PARTS.values(), (MASKS["sparge"], MASKS["lowrank"], "#c9b27a"), strict=True))


def draw_speed(rows: list[Speed]) -> Figure:
    most = max(row.tokens for row in rows)
    figure, axes = panels(
        "How much faster than full attention, and where does time go?",
        f"Block-sparse attention under low-rank prediction, {ON_CPU} (DSV's Figs. 17 and 18, in small)",
        columns=3,
        height=4.6,
    )
    left, middle, right = axes[0]
    over = sorted((row for row in rows if row.tokens == most), key=lambda row: row.sparsity)
    at = [100 * row.sparsity for row in over]
    look = {"marker": "o", "color": MASKS["sparge"]}
    given = [row.dense_ms / row.sparse_ms for row in over]
    left.plot(at, [row.backward_speedup for row in over], **{**look, "color": INK}, label="backward")
    left.plot(at, given, **look, label="forward, mask given")
    left.plot(at, [row.speedup for row in over], **{**look, "color": MASKS["lowrank"]}, label="forward, predicting")
    left.axhline(1, color=INK, linewidth=0.8)
    left.set(xlabel="sparsity, %", ylabel="times as fast", title=f"{most:,} tokens", ylim=(0, None))
    left.legend(loc="upper left")
    ninety = sorted((row for row in rows if row.sparsity == 0.9), key=lambda row: row.tokens)
    names = [f"{row.tokens:,}" for row in ninety]
    bottom = [0.0] * len(ninety)
    for part, words in PARTS.items():
        share = [getattr(row, part) / row.dense_ms for row in ninety]
        middle.bar(names, share, 0.6, bottom=bottom, color=COLOURS[words], label=words)
        bottom = [a + b for a, b in zip(bottom, share, strict=True)]
    middle.set(xlabel="tokens", ylabel="share of full attention's time", title="Forward at 90 %")
    backward = {"attention, backward": [row.sparse_backward_ms / row.dense_backward_ms for row in ninety]}
    grouped_bars(right, names, backward, [INK], number="%.2f")
    right.set(xlabel="tokens", ylabel="share of full attention's time", title="Backward at 90 %")
    for axis in (middle, right):
        axis.axhline(1, color=INK, linewidth=0.8)
        axis.grid(axis="x", visible=False)
    legend_below(figure, (middle, right))
    return figure


SPEED = Result("prediction-speed", "Attention under low-rank prediction", Speed, draw_speed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--part", choices=("all", "accuracy", "speed"), default="all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="of the fit, for accuracy")
    parser.add_argument("--test-steps", type=int, nargs="+", default=[1, 4], help="denoising steps that are tested")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096], help="for speed; multiples of 64")
    parser.add_argument("--heads", type=int, default=2, help="for speed")
    parser.add_argument("--rank", type=int, default=8, help="for speed")
    parser.add_argument("--repeats", type=int, default=3, help="for speed")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSVs and PNGs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part != "speed":
        with torch.no_grad():
            rows = accuracy(tuple(options.ranks), tuple(options.test_steps))
        ACCURACY.publish(rows, options.out)
    if options.part != "accuracy":
        times = list(speeds(options))
        SPEED.publish(times, options.out)


if __name__ == "__main__":
    main()
