"""What the workers run: a pipeline whose video all ranks decode together."""

from __future__ import annotations

import torch

import dbsp_diffusers
import dbsp_para
from tests.support.models.tiny_pipelines import SIZE, load, state_of

CONFIG = {"mask": {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}}


def decoded_by_pipelines(rank: int, world: int, folder: str) -> tuple[bool, bool, str]:
    """(frames are those of one process's tiled decode, undone without a trace, what a transformer alone is given)."""
    pipe = load("wan", folder)
    call = {"prompt": "the sea at dusk", "max_sequence_length": 16, **SIZE, "num_frames": 5, "num_inference_steps": 1}
    pipe(**call, output_type="pt")  # a call leaves attributes of its own
    before = [*state_of(pipe), sorted(vars(pipe.vae))]
    pipe.vae.enable_tiling(32, 32, 24, 24)
    frames = []
    for vae in (False, True):
        dbsp_para.parallelize_pipe(pipe, config=CONFIG | {"vae": vae})
        frames.append(pipe(**call, generator=torch.Generator().manual_seed(3), output_type="pt").frames)
        dbsp_diffusers.disable(pipe)
    dbsp_diffusers.enable(pipe, CONFIG, vae=True)
    frames.append(pipe(**call, generator=torch.Generator().manual_seed(3), output_type="pt").frames)
    dbsp_diffusers.disable(pipe)
    undone = [*state_of(pipe), sorted(vars(pipe.vae))] == before
    try:
        dbsp_diffusers.enable(pipe.transformer, CONFIG, vae=True)
    except ValueError as error:
        unsupported = f"ValueError: {error}"
    return all(torch.equal(one, frames[0]) for one in frames), undone, unsupported
