"""Seconds of a video on 8 GPUs, modelled: dense Ulysses, and sparse attention split equally and by db-SP.

What `dbsp plan --model NAME --gpus 8` says of each machine, with the density that each mask has on that model, and the
steps that its settings keep dense. What all ways have in common but decoding is included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dbsp_cli.commands.plan import ModelledVideo, modelled_videos, usual_masks
from dbsp_core.cost.machine import load_hardware
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.models.table import MODEL_SPECS, ModelSpec
from dbsp_core.sources import MaskRequest, SyntheticSource
from scripts.reproduce.authors.measured import DENSITIES, PARO
from scripts.reproduce.authors.runs import UNKNOWNS
from scripts.results.result import Result, Row, arguments

WAN, COGVIDEOX = "wan2.1-t2v-14b", "cogvideox1.5-5b"
MACHINES = ("a800", "h800", "h100", "h200")
GPUS, LAYERS = 8, 2


@dataclass(frozen=True)
class Mask:
    """A mask, and how many steps its shipped settings keep dense."""

    model: str
    name: str  # its source
    density: float | None  # share of blocks that it keeps on this model; None: as its settings say
    origin: Literal["published", "fitted", "its setting"]  # of the density
    style: str = ""  # the preset whose imbalance and blocks its synthetic stand-in has; "": rows are equal
    dense_steps: int = 0

    def masks(self, spec: ModelSpec) -> list[BlockMask]:
        if not self.style:
            return usual_masks(spec)
        block_q = 128 if self.style.endswith("-sparge") else 64
        source = SyntheticSource(preset=self.style, density=self.density, block_q=block_q)
        return [source.mask(MaskRequest(layer, spec.heads, spec.thw, spec.text_tokens)) for layer in range(LAYERS)]


MASKS = (
    Mask(WAN, "sparge", UNKNOWNS.sparge_density[WAN], "fitted", f"{WAN}-sparge", dense_steps=5),
    Mask(WAN, "paro", DENSITIES[WAN, f"{PARO} 0.414"], "published", WAN),
    Mask(WAN, "subblock", None, "its setting", dense_steps=10),
    Mask(COGVIDEOX, "sparge", UNKNOWNS.sparge_density[COGVIDEOX], "fitted", f"{COGVIDEOX}-sparge", dense_steps=5),
    Mask(COGVIDEOX, "paro", DENSITIES[COGVIDEOX, f"{PARO} 0.414"], "published", COGVIDEOX),
)
"""Densities are those of the db-SP paper's authors: PAROAttention's as they published it; SpargeAttn's fitted to their
bars, at cdf 0.9 and similarity 0.1. SubBlock's settings are SGLang's, for MiniMax-H3."""


def rows() -> Iterator[Row]:
    """The modelled times of each model's usual video on each kind of machine.

    dense_s: dense attention, Ulysses over all GPUs
    blind_s: sparse attention, by the fastest UxRy with heads and tokens in equal numbers, as USP does
    dbsp_s: sparse attention, by db-SP's fastest UxRy, `strategy`
    break_even: the density from which dense attention is faster
    """
    for mask in MASKS:
        spec = MODEL_SPECS[mask.model]
        masks, video = mask.masks(spec), spec.video
        grid = masks[0].grid
        for machine in MACHINES:
            hardware = load_hardware(machine)
            videos = modelled_videos(
                spec, GPUS, hardware, masks, dense_steps=mask.dense_steps, predicted=mask.name != "paro"
            )
            dense, blind, ours = videos[0], _fastest(videos, "contiguous"), _fastest(videos, "dbsp")
            limit = hardware.with_kernel("auto").break_even(grid.block_q, grid.block_k, spec.head_dim, spec.tokens)
            yield Row(
                model=mask.model,
                machine=machine,
                gpus=GPUS,
                size=f"{video.num_frames} frames of {video.width} × {video.height}",
                steps=video.steps or 0,
                mask=mask.name,
                density=masks[0].density,
                origin=mask.origin,
                dense_steps=mask.dense_steps,
                dense_s=dense.seconds,
                blind_s=blind.seconds,
                dbsp_s=ours.seconds,
                strategy=ours.strategy,
                by_sparsity=dense.seconds / blind.seconds,
                by_balance=blind.seconds / ours.seconds,
                break_even=limit or 0.0,
                gigabytes=ours.gigabytes,
                label="modelled",
            )


def _fastest(videos: list[ModelledVideo], planner: str) -> ModelledVideo:
    sparse = [video for video in videos if (video.attention, video.planner) == ("sparse", planner)]
    return min(sparse, key=lambda video: video.seconds)


if __name__ == "__main__":
    Result("seconds", "Seconds per video").run(arguments(__doc__), lambda _: rows())
