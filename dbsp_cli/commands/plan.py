"""`dbsp plan`: predicts time and counts memory of a model's video, dense Ulysses and sparse attention per strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Annotated

import numpy as np
import torch
import typer

from dbsp_cli.output import MOST_GPUS, JsonFlag, TextTable, print_json, print_tables
from dbsp_core.config import default_config
from dbsp_core.cost.machine import Hardware, hardware_for, load_hardware
from dbsp_core.cost.prediction import AttentionShape, candidates, predict
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.models.settings import side_message
from dbsp_core.models.signature import PIPELINES
from dbsp_core.models.table import ModelSpec, find_model_spec, unknown_model
from dbsp_core.planning.plan import Plan, make_plan, usual_layout
from dbsp_core.sources import MaskRequest, SyntheticSource
from dbsp_core.sources.subblock import SubBlockSource
from dbsp_core.sources.synthetic.source import PRESETS
from dbsp_core.utils.errors import UserError, in_number

_LAYERS = 2  # layers whose masks represent all layers


def plan_command(
    model: Annotated[str, typer.Option(help="Model whose video to predict.")],
    gpus: Annotated[int, typer.Option(min=1, max=MOST_GPUS, help="Number of GPUs.")],
    machine: Annotated[
        str | None, typer.Option(help="GPU: a800, h100, … or a file. Default: measured here, or h100.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="HEIGHTxWIDTH[xFRAMES]. Default: the model's.")] = None,
    density: Annotated[
        float | None, typer.Option(min=0, max=1, help="Fraction of active blocks. Default: of the shipped mask.")
    ] = None,
    dense_steps: Annotated[
        int | None, typer.Option(min=0, help="Dense steps. Default: as shipped, or 0 with --density.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="UxRy, or all.")] = "all",
    as_json: JsonFlag = False,
) -> None:
    """Predict the time and memory of a model's video by strategy, without a GPU."""
    # 1. The machine, the model with its video's size, and the strategies
    measured = hardware_for(machine, "cuda", "auto") if machine or torch.cuda.is_available() else None
    hardware = measured or load_hardware("h100")
    spec = find_model_spec(model)
    if spec is None:
        raise unknown_model(model)
    spec = spec if size is None else sized(spec, size)
    if dense_steps is None:
        dense_steps = default_config(None, spec).dense_schedule.first_steps if density is None else 0
    elif dense_steps > (spec.video.steps or 0):
        raise UserError(
            f"--dense-steps must be at most the {spec.video.steps} steps of {spec.name}, got {dense_steps}"
        )
    strategies = None if strategy == "all" else [Strategy.parse(strategy)]
    for parsed in strategies or ():
        parsed.require_world(gpus)
    # 2. Predict each strategy's time, with masks like those shipped or of the given density
    masks = usual_masks(spec, density)
    videos = modelled_videos(spec, gpus, hardware, masks, strategies=strategies, dense_steps=dense_steps)
    grid = masks[0].grid
    break_even = hardware.with_kernel("auto").break_even(grid.block_q, grid.block_k, spec.head_dim, spec.tokens)
    # 3. Print them
    if as_json:
        memory = {str(way): asdict(memory_of(spec, way)) for way in strategies or candidates(gpus, grid)}
        names = {"model": spec.name, "gpus": gpus, "machine": hardware.name, "label": "modelled"}
        asked = {"density": masks[0].density, "dense_steps": dense_steps, "break_even": break_even}
        print_json(**names, **asked, memory=memory, videos=[asdict(video) for video in videos])
        return
    table = modelled_table(
        spec,
        gpus,
        hardware,
        videos,
        density=masks[0].density,
        dense_steps=dense_steps,
        break_even=break_even,
        by_default=measured is None,
    )
    print_tables([table])


@dataclass(frozen=True)
class Memory:
    """Counted bytes of one GPU, without VAE, libraries and allocator overhead."""

    weights: int  # of all transformers and the text encoder in 16 bits, on every GPU
    activations: int  # peak within a layer

    @property
    def gigabytes(self) -> float:
        return (self.weights + self.activations) / 1e9


BEYOND = {"one GPU": 1.0, "Ulysses": 6.0, "ring": 9.1}
"""Tensors of q's size at an attention's peak, besides q, k and v: 6 and 8 by count
(tests/core/runtime/test_memory.py), 6.0 and 9.1 measured (`peak memory` in docs/results/gpu-h200.csv)."""


def memory_of(spec: ModelSpec, strategy: Strategy) -> Memory:
    """Counts a GPU's memory: its shard of the hidden states, and the larger of attention and MLP."""
    batch = 2 if spec.pipeline == "CogVideoXPipeline" and is_guided(spec) else 1  # both CFG passes in one call
    values = 2 * batch * -(-spec.tokens // strategy.world)  # bytes of one channel
    stream, q = values * (spec.hidden or spec.attention_dim), values * spec.attention_dim
    way = "one GPU" if strategy.world == 1 else "ring" if strategy.ring > 1 else "Ulysses"
    attention = round((3 + BEYOND[way]) * q)
    mlp = stream + 2 * values * spec.ffn  # normed input, and the intermediate before and after activation
    return Memory(2 * spec.parameters, stream + max(attention, mlp))


@dataclass(frozen=True)
class ModelledVideo:
    """The predicted time of one video."""

    attention: str  # "dense" or "sparse"
    strategy: str
    planner: str
    rho: float  # Mean over layers
    attention_s: float  # all self-attention, including mask prediction
    seconds: float  # Without decoding
    speedup: float  # of the whole video, over dense Ulysses
    gigabytes: float  # per GPU, see `Memory`


def sized(spec: ModelSpec, size: str) -> ModelSpec:
    """Returns the model with a video of HEIGHTxWIDTH[xFRAMES]. Raises UserError for unsupported sizes."""
    parts = size.replace("×", "x").split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts):
        raise UserError(f"--size must be HEIGHTxWIDTH or HEIGHTxWIDTHxFRAMES, got {size!r}; for example 480x832x81")
    height, width, *rest = map(int, parts)
    frames = rest[0] if rest else spec.video.num_frames or 1
    for name, pixels in (("height", height), ("width", width)):
        if (message := side_message(pixels, spec.token_pixels)) is not None:
            raise UserError(f"--size: {name} {message}, got {pixels}")
    message = PIPELINES[spec.pipeline].frames_message(frames) if spec.pipeline in PIPELINES else None
    if message is not None or frames < 1:
        raise UserError(f"--size: frames {message or 'must be at least 1'}, got {frames}")
    return replace(spec, video=replace(spec.video, height=height, width=width, num_frames=frames), paper_thw=None)


def usual_masks(spec: ModelSpec, density: float | None = None) -> list[BlockMask]:
    """Returns masks of two layers in blocks of 64 tokens: uneven synthetic ones, or like the model's shipped ones.

    The latter are SubBlock's, which keep the same number of blocks in each row, or the model's preset.
    """
    source = SyntheticSource(preset=spec.name if spec.name in PRESETS else None, density=density)
    requests = [MaskRequest(layer, spec.heads, spec.thw, spec.text_tokens) for layer in range(_LAYERS)]
    shipped = default_config(None, spec).mask
    if density is not None or not isinstance(shipped, SubBlockSource):
        return [source.mask(request) for request in requests]
    grid = source.grid(requests[0])
    kept = round((1 - float(np.mean(shipped.sparsity))) * grid.nk)
    in_band = (np.arange(grid.nk) - np.arange(grid.nq)[:, None]) % grid.nk < kept  # [nq, nk]
    bits = torch.from_numpy(in_band)
    return [BlockMask(bits.expand(spec.heads, -1, -1).contiguous(), grid) for _ in requests]


def modelled_videos(
    spec: ModelSpec,
    gpus: int,
    hardware: Hardware,
    masks: Sequence[BlockMask],
    *,
    strategies: Sequence[Strategy] | None = None,
    dense_steps: int = 0,
    predicted: bool = True,
) -> list[ModelledVideo]:
    """Predicts dense Ulysses, then plain and db-SP's sparse attention for each strategy (by default all that fit).

    `masks` are those of some layers, which represent all; `predicted` if they are predicted at each attention.
    """
    hardware, of_dense = hardware.with_kernel("auto"), hardware.with_dense_attention()
    known, steps = hardware.constants, spec.video.steps or 1
    nodes = [rank // (hardware.gpus_per_node or 8) for rank in range(gpus)]
    shape = AttentionShape(1, spec.heads, spec.head_dim)
    dense = BlockMask.dense(spec.heads, masks[0].grid)

    def attention(mask: BlockMask, strategy: Strategy, planner: str, machine: Hardware) -> tuple[Plan, float]:
        layout = usual_layout(planner, mask.grid, strategy)
        plan = make_plan(mask, strategy, planner, layout=layout, compare=False)
        return plan, predict(plan, shape, machine, nodes, layout).total_s

    # 1. Common time, and time of predicting masks
    calls = passes(spec) * spec.layers
    other_s = passes(spec) * linear_flops(spec) / known.linear_flops_per_s / gpus + known.serial_s
    predict_s = (known.predict_s or 0.0) * spec.tokens * spec.heads / gpus if predicted else 0.0
    # 2. Dense Ulysses
    ulysses = Strategy(gpus, 1)
    plan, dense_s = attention(dense, ulysses, "contiguous", of_dense)
    rows = [("dense", ulysses, "contiguous", plan.rho, calls * dense_s)]
    # 3. Sparse attention, with some dense steps under the same strategy
    for strategy in strategies or candidates(gpus, dense.grid):
        dense_s = attention(dense, strategy, "contiguous", of_dense)[1] if dense_steps else 0.0
        for planner in ("contiguous", "dbsp"):
            plans, seconds = zip(*(attention(mask, strategy, planner, hardware) for mask in masks), strict=True)
            sparse_s = fmean(seconds) + predict_s
            attention_s = calls * (dense_steps * dense_s + (steps - dense_steps) * sparse_s) / steps
            rows.append(("sparse", strategy, planner, fmean(plan.rho for plan in plans), attention_s))
    return [
        ModelledVideo(
            attention=kind,
            strategy=str(strategy),
            planner=planner,
            rho=rho,
            attention_s=attention_s,
            seconds=attention_s + other_s,
            speedup=(rows[0][-1] + other_s) / (attention_s + other_s),
            gigabytes=memory_of(spec, strategy).gigabytes,
        )
        for kind, strategy, planner, rho, attention_s in rows
    ]


def is_guided(spec: ModelSpec) -> bool:
    """Returns True with classifier-free guidance (scale above 1)."""
    scales = (spec.video.guidance_scale, spec.video.guidance_scale_2)
    return any(scale is not None and scale > 1 for scale in scales)


def passes(spec: ModelSpec) -> int:
    """Returns the number of forward passes of a model's video (in most pipelines two per step with guidance)."""
    under_guidance = PIPELINES[spec.pipeline].passes if spec.pipeline in PIPELINES else 2
    return (under_guidance if is_guided(spec) else 1) * (spec.video.steps or 0)


def linear_flops(spec: ModelSpec) -> float:
    """Returns the FLOP of one forward pass except self-attention's scores: projections, MLP, cross-attention.

    Neglects keys and values of cross-attention's text: 512 tokens against tens of thousands.
    """
    hidden = spec.hidden or spec.attention_dim
    projections = 4 * hidden * spec.attention_dim + 2 * hidden * spec.ffn
    if spec.cross_text:
        projections += 2 * spec.attention_dim**2 + 2 * spec.attention_dim * spec.cross_text
    return 2.0 * spec.layers * spec.tokens * projections


def modelled_table(
    spec: ModelSpec,
    gpus: int,
    hardware: Hardware,
    videos: Sequence[ModelledVideo],
    *,
    density: float,
    dense_steps: int,
    break_even: float | None,
    by_default: bool,
) -> TextTable:
    """Returns the table of predictions, with the fastest strategy and the source of constants below.

    Above density `break_even` dense attention is faster; `by_default` if hardware was neither chosen nor measured.
    """
    # 1. The fastest strategy, or that sparse attention is not faster
    dense, *sparse = videos
    best = min(sparse, key=lambda video: (video.seconds, video.planner != "dbsp"))
    of_best = f"{best.strategy}, {best.planner}"
    verdict = f"fastest, modelled: sparse {of_best}: {best.seconds:.0f} s, dense Ulysses {dense.seconds:.0f} s"
    if best.seconds >= dense.seconds:
        verdict = f"not worth it: sparse attention takes {best.seconds:.0f} s at best ({of_best}), "
        verdict += f"dense Ulysses {dense.seconds:.0f} s"
    # 2. The table
    rows = [
        (
            *(row.attention, row.strategy, row.planner, f"{row.rho:.3f}"),
            *(f"{row.attention_s:.1f}", f"{row.seconds:.1f}", f"{row.speedup:.2f}×", f"{row.gigabytes:.1f}"),
        )
        for row in videos
    ]
    video = spec.video
    size = f"{video.num_frames} frames of {video.height}×{video.width}, {in_number(video.steps or 0, 'step')}"
    masks = f"density {density:.3f}" + (f", {in_number(dense_steps, 'step')} dense" if dense_steps else "")
    held = memory_of(spec, Strategy(gpus, 1))
    encoder = " and text encoder" if spec.pipeline in PIPELINES else ""
    below = "unknown (no rate of dense attention)" if break_even is None else f"{max(0.0, break_even):.2f}"
    note = (
        f"{verdict}\ndensity below which masks are faster than dense attention: {below}\n"
        f"GB: per GPU, counted: {held.weights / 1e9:.1f} of transformer{encoder}, and activations; without VAE\n"
        f"not measured: synthetic masks, no decoding; constants of {hardware.name}"
        f"{', the default (--machine: others)' if by_default else ''}; dbsp bench measures your GPUs"
    )
    return TextTable(
        f"{spec.name} on {gpus} GPUs ({hardware.name}), modelled: {size}, {spec.tokens:,} tokens, {masks}",
        ("attention", "strategy", "planner", "ρ_s", "attention s", "video s", "over dense", "GB"),
        rows,
        note,
        left=("attention", "strategy", "planner"),
    )
