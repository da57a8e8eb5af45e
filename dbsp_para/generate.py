"""The rank program of `dbsp generate --host diffusers`: `python -m dbsp_para.generate CONFIG VIDEO SECONDS`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dbsp_core.config import DbspConfig
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.signature import PIPELINES, ModelSignature
from dbsp_core.models.table import model_title, signature_of_model
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import exit_on_user_error
from dbsp_diffusers.group_timeouts import limit_group_timeouts
from dbsp_diffusers.patching import in_float64
from dbsp_diffusers.preflight import local_checkpoint
from dbsp_diffusers.rank_program import exit_on_failure, process_group, use_local_device

__all__ = ["check", "generate"]


def check(config: DbspConfig, model: str, identity: ModelSignature) -> None:
    """Raises UserError, before any rank is started, for a pipeline that this host does not run."""
    if identity.pipeline not in PIPELINES:
        raise UserError(f"--model {model} is {model_title(identity)}; db-SP generates with {', '.join(PIPELINES)}")


def generate(config: DbspConfig, video: Path) -> None:
    """Makes the video that `config` describes, on the current device. Rank 0 writes the video and the report.

    Needs a process group.
    """
    import diffusers
    from diffusers.utils import export_to_video

    from dbsp_diffusers import enable

    wanted = config.generate
    cls = diffusers.DiffusionPipeline
    identity = signature_of_model(config.model or "")
    if wanted.image is not None and identity is not None and identity.variant == "ti2v":
        cls = diffusers.WanImageToVideoPipeline  # the checkpoint names the other one
    model = config.model or ""
    checkpoint = local_checkpoint(model)
    variant = None if checkpoint is None else checkpoint.variant
    pipe = cls.from_pretrained(model, torch_dtype=config.generate.torch_dtype, variant=variant)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    pipe.to(device)
    if config.generate.torch_dtype == torch.float64:
        pipe = in_float64(pipe)
    if wanted.flow_shift is not None and "flow_shift" in pipe.scheduler.config:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=wanted.flow_shift)
    pipe.set_progress_bar_config(disable=dist.get_rank() != 0)
    enable(pipe, config)
    frames = pipe(
        prompt=wanted.prompt,
        negative_prompt=wanted.negative_prompt,
        height=wanted.height,
        width=wanted.width,
        num_frames=wanted.num_frames,
        num_inference_steps=wanted.steps,
        guidance_scale=wanted.guidance_scale,
        **_options(pipe, wanted),
        generator=torch.Generator(device).manual_seed(wanted.seed or 0),
    ).frames[0]
    if dist.get_rank() == 0:
        export_to_video(frames, str(video), fps=wanted.fps or 16)


def _options(pipe: Any, wanted: GenerateSettings) -> dict[str, Any]:
    """Arguments that only some pipelines have. Images have the video's size already."""
    from PIL import Image

    options: dict[str, Any] = {}
    if wanted.guidance_scale_2 is not None and pipe.config.get("boundary_ratio") is not None:
        options["guidance_scale_2"] = wanted.guidance_scale_2
    images = [Image.open(path).convert("RGB") for path in (wanted.image, wanted.last_image) if path is not None]
    if "reference_images" not in inspect.signature(type(pipe).__call__).parameters:
        return options | dict(zip(("image", "last_image"), images, strict=False))
    # VACE invents the frames between, as in xDiT
    first, last = images
    between, size = (wanted.num_frames or 0) - 2, first.size
    options["video"] = [first, *[Image.new("RGB", size, (128, 128, 128))] * between, last]
    options["mask"] = [Image.new("L", size, 0), *[Image.new("L", size, 255)] * between, Image.new("L", size, 0)]
    return options


def main(arguments: list[str]) -> Any:
    """Joins the ranks, generates, and leaves the group. SECONDS is how long a rank waits for others."""
    config_file, video, seconds = arguments
    limit_group_timeouts(float(seconds))
    with process_group(use_local_device()), exit_on_failure(), exit_on_user_error():
        generate(DbspConfig.load(config_file), Path(video))


if __name__ == "__main__":
    main(sys.argv[1:])
