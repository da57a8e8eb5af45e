"""The rank program of `dbsp generate --host xdit`: `python -m dbsp_xdit.generate CONFIG VIDEO SECONDS`.

It runs xfuser's own runner with db-SP in it, as dbsp_xdit.run does, but rank 0 rather than the last rank writes the
video, under the given name and with the configured frames per second.
"""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.models.signature import ModelSignature
from dbsp_core.models.table import signature_of_model
from dbsp_diffusers.group_timeouts import limit_group_timeouts
from dbsp_diffusers.rank_program import exit_on_failure
from dbsp_xdit.models import preflight
from dbsp_xdit.patches import install

__all__ = ["check", "runner_arguments"]


def check(config: DbspConfig, model: str, identity: ModelSignature) -> None:
    """Raises UserError, before any rank is started, where `xdit --sp-backend dbsp` would with this configuration.

    The caller checks the place of its report.
    """
    config = replace(config, report=None, model=model)
    preflight(runner_arguments(Path(), config, 1), config)


def runner_arguments(folder: Path, config: DbspConfig, world: int) -> list[str]:
    """xdit's arguments for the video that a configuration describes; `folder` is for what else xfuser writes."""
    video = config.generate
    strategy = config.strategy_or(Strategy(world, 1)) or Strategy(world, 1)  # "auto" needs degrees for their product
    options = {
        "model": config.model,
        "sp_backend": "dbsp",
        "ulysses_degree": strategy.ulysses,
        "ring_degree": strategy.ring,
        "prompt": video.prompt,
        "negative_prompt": video.negative_prompt,
        "height": video.height,
        "width": video.width,
        "num_frames": video.num_frames,
        "num_inference_steps": video.steps,
        "guidance_scale": video.guidance_scale,
        "guidance_scale_2": video.guidance_scale_2,
        "flow_shift": video.flow_shift,
        "seed": video.seed,
        "output_directory": folder,
    }
    identity = signature_of_model(config.model or "")
    return [*(f"--{name}={value}" for name, value in options.items() if value is not None), *_images(config, identity)]


def _images(config: DbspConfig, identity: ModelSignature | None) -> list[str]:
    video = config.generate
    images = [image for image in (video.image, video.last_image) if image is not None]
    task = [f"--task={'i2v' if images else 't2v'}"] if identity is not None and identity.variant == "ti2v" else []
    return [*task, *(["--input_images", *images] if images else [])]


def main(arguments: list[str]) -> None:
    """Runs xfuser's runner. The last argument is how long a rank waits for others."""
    config_file, video, seconds = arguments
    limit_group_timeouts(float(seconds))  # xfuser says nothing of timeouts
    config = DbspConfig.load(config_file)
    install(active=True, config=config)
    _save_on_rank_0(Path(video), config.generate.fps or 16)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    sys.argv = ["xfuser.runner", *runner_arguments(Path(config_file).parent, config, world)]
    with exit_on_failure():  # xfuser sets the device itself, and destroys its groups after a success alone
        runpy.run_module("xfuser.runner", run_name="__main__", alter_sys=True)


def _save_on_rank_0(path: Path, fps: int) -> None:
    """This process runs nothing else and ends with the run: nothing needs to be undone."""
    from diffusers.utils import export_to_video
    from xfuser.core.utils import runner_utils

    runner_utils.is_last_process = lambda: os.environ.get("RANK") == "0"  # the rank that xfuser lets save and log
    from xfuser.model_executor.models.runner_models.base_model import xFuserModel

    def save_output(self: Any, output: Any) -> None:
        (frames,) = output.videos
        export_to_video(frames, str(path), fps=fps)

    xFuserModel.save_output = save_output


if __name__ == "__main__":
    main(sys.argv[1:])
