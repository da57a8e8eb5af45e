"""What ranks of several nodes, each with files of its own, take for the videos to make."""

from __future__ import annotations

import torch

from dbsp_cli.generate.ranks import RankInfo
from dbsp_cli.generate.request import GenerationRequest, resolve
from dbsp_cli.generate.videos import outputs_left


def videos_to_make(rank: int, world: int, folder: str) -> list[tuple[str, int]]:
    """Returns prompts and seeds; prompts and videos that are there come from the folder of this rank."""
    own = f"{folder}/{rank}"
    asked = GenerationRequest(
        config="tiny-wan", prompt=f"@{own}/prompts", seed=7, videos=2, out=f"{own}/{{prompt}}{{seed}}.mp4", resume=True
    )
    generation = resolve(asked, RankInfo(rank, world, rank, world))
    return [(output.prompt, output.seed) for output in outputs_left(generation, torch.device("cpu"))]
