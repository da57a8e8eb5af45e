"""Modelled seconds of a model's usual video: dense Ulysses, and sparse attention under each strategy, by constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from dbsp_cli.output import TextTable
from dbsp_core.cost.machine import Hardware
from dbsp_core.cost.prediction import AttentionShape, candidates, predict
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.table import ModelSpec
from dbsp_core.planning.plan import make_plan, usual_layout
from dbsp_core.sources import MaskRequest, SyntheticSource
from dbsp_core.sources.synthetic.source import PRESETS
from dbsp_core.utils.errors import in_number

_LAYERS = 2
"""Layers whose masks represent all."""


_HUNYUAN = ModelSpec(
    name="hunyuanvideo",
    hub="hunyuanvideo-community/HunyuanVideo",
    aliases=("tencent/HunyuanVideo",),
    pipeline="HunyuanVideoPipeline",
    layers=60,  # 20 with two streams, 40 with one; each token meets as many weights in either
    heads=24,
    head_dim=128,
    patch_frames=1,
    ffn=12288,
    cross_text=0,
    parameters=12_821_012_544,
    video=GenerateSettings(None, "", 720, 1280, num_frames=129, steps=50, guidance_scale=1.0, flow_shift=7.0, fps=24),
    other_tokens=256,
)
_MINIMAX_H3 = ModelSpec(
    name="minimax-h3",
    hub="MiniMaxAI/MiniMax-H3",
    aliases=(),
    pipeline="MiniMaxH3ModularPipeline",
    layers=50,
    heads=56,
    head_dim=128,
    patch_frames=1,
    ffn=21504,
    cross_text=0,
    parameters=33_122_992_896,
    video=GenerateSettings(None, "", 768, 1344, num_frames=124, steps=50, guidance_scale=1.0, fps=24),
    paper_thw=(37, 24, 42),  # 17 frames become 5
    hidden=5376,
    other_tokens=512 + 416,  # text, and 40 latents a second of two channels of sound
)
MODELLED_ONLY = {spec.name: spec for spec in (_HUNYUAN, _MINIMAX_H3)}
"""Models whose time is modelled, and whose pipelines `dbsp generate` does not run; `enable` takes them. Sizes and
videos are the defaults of diffusers' classes (0.42), parameters are the transformer's alone; 256 text tokens are
diffusers' for HunyuanVideo, 512 are assumed for H3, whose text has any length."""


@dataclass(frozen=True)
class ModelledVideo:
    """The modelled time of one video."""

    attention: str  # "dense" or "sparse"
    strategy: str
    planner: str
    rho: float  # Mean over layers
    attention_s: float  # Of all self-attentions
    seconds: float
    speedup: float  # Over dense Ulysses, of the whole video


def modelled_videos(spec: ModelSpec, gpus: int, hardware: Hardware) -> list[ModelledVideo]:
    """Predicts dense Ulysses, then plain and db-SP's sparse attention for each strategy.

    Masks are synthetic, of the model's preset where there is one; their blocks are of 64 tokens.
    """
    source = SyntheticSource(preset=spec.name) if spec.name in PRESETS else SyntheticSource()
    requests = [MaskRequest(layer, spec.heads, spec.thw, spec.text_tokens) for layer in range(_LAYERS)]
    sparse = [source.mask(request) for request in requests]
    dense = [BlockMask.dense(spec.heads, sparse[0].grid)]
    runs = [("dense", dense, Strategy(gpus, 1), "contiguous")]
    for strategy in candidates(gpus, sparse[0].grid):
        runs += [("sparse", sparse, strategy, planner) for planner in ("contiguous", "dbsp")]
    known = hardware.constants
    other_s = passes(spec) * linear_flops(spec) / known.linear_flops_per_s / gpus + known.serial_s
    nodes = [rank // (hardware.gpus_per_node or 8) for rank in range(gpus)]
    shape = AttentionShape(1, spec.heads, spec.head_dim)
    videos: list[ModelledVideo] = []
    for attention, masks, strategy, planner in runs:
        rho, layer_s = [], []
        for mask in masks:
            layout = usual_layout(planner, mask.grid, strategy)
            plan = make_plan(mask, strategy, planner, layout=layout, compare=False)
            rho.append(plan.rho)
            layer_s.append(predict(plan, shape, hardware, nodes, layout).total_s)
        attention_s = passes(spec) * spec.layers * fmean(layer_s)
        seconds = attention_s + other_s
        speedup = (videos[0].seconds if videos else seconds) / seconds
        videos.append(ModelledVideo(attention, str(strategy), planner, fmean(rho), attention_s, seconds, speedup))
    return videos


def passes(spec: ModelSpec) -> int:
    """Returns the forward passes of a model's usual video: two a step under guidance, whose scale is over 1."""
    scales = (spec.video.guidance_scale, spec.video.guidance_scale_2)
    guided = any(scale is not None and scale > 1 for scale in scales)
    return (2 if guided else 1) * (spec.video.steps or 0)


def linear_flops(spec: ModelSpec) -> float:
    """Returns the FLOP of one forward pass but for self-attention's scores: projections, MLP, cross-attention.

    The keys and values of cross-attention's text are left out: 512 tokens against tens of thousands.
    """
    hidden = spec.hidden or spec.attention_dim
    projections = 4 * hidden * spec.attention_dim + 2 * hidden * spec.ffn
    if spec.cross_text:
        projections += 2 * spec.attention_dim**2 + 2 * spec.attention_dim * spec.cross_text
    return 2.0 * spec.layers * spec.tokens * projections


def modelled_table(
    spec: ModelSpec, gpus: int, hardware: Hardware, videos: Sequence[ModelledVideo], by_default: bool = False
) -> TextTable:
    """Returns the table that a newcomer reads; its last lines name the fastest way and whose constants were used.

    Args:
        by_default: Whether nobody has chosen the hardware, and nothing was measured here.
    """
    rows = [
        (
            *(row.attention, row.strategy, row.planner, f"{row.rho:.3f}"),
            *(f"{row.attention_s:.1f}", f"{row.seconds:.1f}", f"{row.speedup:.2f}×"),
        )
        for row in videos
    ]
    best = min(videos, key=lambda row: row.seconds)
    video = spec.video
    size = f"{video.num_frames} frames of {video.height}×{video.width}, {in_number(video.steps or 0, 'step')}"
    return TextTable(
        f"{spec.name} on {gpus} GPUs ({hardware.name}), modelled: {size}, {spec.tokens:,} tokens",
        ("attention", "strategy", "planner", "ρ_s", "attention s", "video s", "over dense"),
        rows,
        f"fastest, modelled: {best.attention} {best.strategy}, {best.planner}: {best.seconds:.0f} s, dense Ulysses "
        f"{videos[0].seconds:.0f} s\nnot measured: synthetic masks, constants of {hardware.name}"
        f"{', the default (--machine: others)' if by_default else ''}; dbsp bench measures your GPUs",
        left=("attention", "strategy", "planner"),
    )
