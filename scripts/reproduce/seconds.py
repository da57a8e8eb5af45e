"""Seconds of a video on 8 GPUs, modelled: dense Ulysses, sparse attention split blindly, and sparse by db-SP.

What `dbsp plan --model NAME --gpus 8` says of each machine, for the models whose imbalance the paper measured. Masks
are synthetic, of density 0.41, as imbalanced as PAROAttention's (the paper's Table 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dbsp_cli.modelled import ModelledVideo, modelled_videos
from dbsp_core.cost.machine import load_hardware
from dbsp_core.models.table import MODEL_SPECS
from scripts.results.result import Result, arguments

MODELS = ("wan2.1-t2v-14b", "cogvideox1.5-5b")
MACHINES = ("a800", "h800", "h100")
GPUS = 8


@dataclass(frozen=True)
class Row:
    """The modelled time of one model's usual video on one kind of machine.

    Attributes:
        dense_s: Dense attention, Ulysses over all GPUs.
        blind_s: Sparse attention, by the fastest UxRy with heads and tokens in equal numbers, as USP does.
        dbsp_s: Sparse attention, by db-SP's fastest UxRy, `strategy`.
    """

    model: str
    machine: str
    gpus: int
    size: str
    steps: int
    dense_s: float
    blind_s: float
    dbsp_s: float
    strategy: str
    label: str = "modelled"


def rows() -> Iterator[Row]:
    for model in MODELS:
        spec = MODEL_SPECS[model]
        size = f"{spec.video.num_frames} frames of {spec.video.width} × {spec.video.height}"
        for machine in MACHINES:
            videos = modelled_videos(spec, GPUS, load_hardware(machine))
            blind, ours = (_fastest(videos, planner) for planner in ("contiguous", "dbsp"))
            seconds = videos[0].seconds, blind.seconds, ours.seconds
            yield Row(model, machine, GPUS, size, spec.video.steps or 0, *seconds, ours.strategy)


def _fastest(videos: list[ModelledVideo], planner: str) -> ModelledVideo:
    sparse = [video for video in videos if (video.attention, video.planner) == ("sparse", planner)]
    return min(sparse, key=lambda video: video.seconds)


if __name__ == "__main__":
    Result("seconds", "Seconds per video", Row).run(arguments(__doc__), lambda _: rows())
