"""`dbsp generate` of HunyuanVideo, HunyuanVideo-1.5 and LTX-2 on two ranks, compared with stock diffusers.

The checkpoints are tiny and have random weights; tests/support/models/tiny_checkpoints.py makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import diffusers
import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image, ImageOps
from safetensors.torch import load_file

from dbsp_cli.generate.inputs import Features
from dbsp_cli.generate.ranks import RankInfo
from dbsp_cli.generate.request import GenerationRequest, resolve
from dbsp_cli.generate.videos import _make_videos
from dbsp_core.reports.run_report import RunReport
from dbsp_core.utils.errors import UserError
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.single_process import attach_single_process

MASK = {"source": "synthetic", "density": 0.4, "block_q": 4, "block_k": 4}
SIZE = {"height": 64, "width": 96, "num_frames": 17, "steps": 2, "seed": 3}
PROMPT = "a red ball bounces over a blue floor"
GUIDANCE = {"hunyuanvideo": 6.0, "hunyuanvideo-1.5": 2.0, "ltx-2": 2.0}
"""An input of HunyuanVideo's transformer; a scale of the others, which multiplies rounding by as much."""
TOLERANCE = 1e-5


def _changes(model: str) -> tuple[str, ...]:
    mask = [f"mask.{name}={value}" for name, value in MASK.items()]
    return (*mask, "generate.dtype=float32", f"generate.guidance_scale={GUIDANCE[model]}", "generate.fps=24")


def make_on_ranks(rank: int, world: int, model: str, folder: str, images: Sequence[Path]) -> None:
    """Makes a video as one of the ranks of `dbsp generate` does."""
    request = GenerationRequest(
        model=f"{folder}/checkpoint",
        prompt=PROMPT,
        images=images,
        changes=_changes(model),
        out=f"{folder}/video.mp4",
        report=Path(folder, "report"),
        **SIZE,
    )
    generation = resolve(request, RankInfo(rank, world, rank, world))
    made = _make_videos(generation, generation.left, generation.model, torch.device("cpu"), Path(folder, "unwanted"))
    assert len(made) == (dist.get_rank() == 0)


def make_by_stock(model: str, folder: Path, image: Path | None) -> tuple[torch.Tensor, Any]:
    """Returns the latents after the last step of stock diffusers under the same mask, and the pipeline's output."""
    index = diffusers.DiffusionPipeline.load_config(str(folder / "checkpoint"))["_class_name"]
    cls = diffusers.LTX2ImageToVideoPipeline if image else getattr(diffusers, index)
    pipe = cls.from_pretrained(str(folder / "checkpoint"), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    attach_single_process(pipe.transformer, {"mask": MASK})
    latents: list[torch.Tensor] = []

    class Kept(type(pipe.scheduler)):  # type: ignore[misc]
        def step(self, *args: Any, **kwargs: Any) -> Any:
            output = super().step(*args, **kwargs)
            if self is pipe.scheduler:  # LTX-2 copies it for the sound
                latents.append(output[0])
            return output

    pipe.scheduler.__class__ = Kept
    call = {{"steps": "num_inference_steps"}.get(name, name): value for name, value in SIZE.items() if name != "seed"}
    if "guider" in pipe.components:
        pipe.guider = pipe.guider.new(guidance_scale=GUIDANCE[model])
    else:
        call["guidance_scale"] = GUIDANCE[model]
    if model == "ltx-2":
        call["frame_rate"] = 24
    if image:
        call["image"] = ImageOps.fit(Image.open(image), (SIZE["width"], SIZE["height"]), Image.Resampling.LANCZOS)
    output = pipe(prompt=PROMPT, generator=torch.Generator().manual_seed(SIZE["seed"]), **call)
    return latents[-1], output


def sound_of(path: Path) -> tuple[int, np.ndarray]:
    """Returns samples a second of a file's sound, and float[channels, samples]; the file has a video next to it."""
    with av.open(str(path)) as file:
        (video,), (sound,) = file.streams.video, file.streams.audio
        assert (video.frames, video.average_rate) == (SIZE["num_frames"], 24)
        samples = [frame.to_ndarray() for frame in file.decode(sound)]
        return sound.rate, np.concatenate(samples, axis=1)


def check(model: str, folder: Path, image: Path | None) -> None:
    """Compares what the ranks have written with stock diffusers."""
    expected, output = make_by_stock(model, folder, image)
    found = load_file(folder / "report" / "latents.safetensors")["latents"]
    assert float((found - expected).abs().max()) <= TOLERANCE
    report = RunReport.read(folder / "report")
    assert (report.world_size, report.totals.steps) == (2, SIZE["steps"])
    assert report.totals.density < 0.9, "the mask must matter"
    if model != "ltx-2":
        return
    diffusers.utils.encode_video(output.frames[0], 24, str(folder / "stock.mp4"), output.audio[0], 24000)
    (rate, sound), (_, stock) = sound_of(folder / "video.mp4"), sound_of(folder / "stock.mp4")
    assert rate == 24000
    assert abs(sound.shape[1] / rate - SIZE["num_frames"] / 24) < 0.1
    assert float(np.abs(stock).max()) > 0.1, "the sound is not silence"
    assert float(np.abs(sound - stock).max()) < 1e-3


CASES = [
    *(pytest.param(model, False, marks=pytest.mark.long) for model in ("hunyuanvideo", "ltx-2")),
    ("hunyuanvideo-1.5", False),
    ("ltx-2", True),
]


@pytest.fixture
def first_image(tmp_path):
    pixels = np.random.RandomState(0).rand(70, 110, 3) * 255
    Image.fromarray(pixels.astype("uint8")).save(tmp_path / "first.png")
    return tmp_path / "first.png"


@pytest.mark.parametrize(("model", "from_image"), CASES)
def test_two_ranks_make_what_stock_diffusers_makes(tmp_path, pool, first_image, model, from_image):
    make_checkpoint(model, tmp_path / "checkpoint")
    pool(2).run(make_on_ranks, model, str(tmp_path), (first_image,) if from_image else ())
    check(model, tmp_path, first_image if from_image else None)


def test_a_size_that_ltx2_would_reject_is_rejected_before_weights_are_loaded(tmp_path):
    folder = make_checkpoint("ltx-2", tmp_path / "checkpoint")
    request = GenerationRequest(model=folder, prompt=PROMPT, **SIZE | {"height": 48})
    with pytest.raises(UserError, match=r"^--height: generate.height=48 must be a multiple of 32"):
        resolve(request, RankInfo())


@pytest.mark.parametrize("model", ["hunyuanvideo-1.5", "ltx-2"])
def test_a_cache_that_diffusers_lacks_is_rejected_before_weights_are_loaded(tmp_path, model):
    folder = make_checkpoint(model, tmp_path / "checkpoint")
    request = GenerationRequest(model=folder, prompt=PROMPT, features=Features(cache="first-block"), **SIZE)
    with pytest.raises(UserError, match=r"^--cache: diffusers cannot cache a .* remove --cache$"):
        resolve(request, RankInfo())
