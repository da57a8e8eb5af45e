"""The shipped weights follow the caption, their masks have the numbers of the results, and so have their programs."""

from __future__ import annotations

import csv
import itertools

import numpy as np
import pytest
import torch

from dbsp_cli.mask_tools.info import MaskSeries
from dbsp_cli.tiny_models import trained_weights
from dbsp_core import make_plan
from scripts.training.world import COLOURS
from tests.support.programs import output_of
from tests.support.repository import ROOT

MASKS = ROOT / "tests" / "data" / "learned-masks.safetensors"
CAPTIONS = {
    "red": "a red ball bounces over a blue checkered floor",
    "green": "a green square slides left over a yellow plain floor",
    "blue": "a blue triangle turns over a green plain floor",
    "yellow": "a yellow ball slides right over a red checkered floor",
}


def dominant_colour(frames: torch.Tensor) -> str | None:
    """Returns the colour of most coloured pixels over the floor; None: hardly any. frames: float32[F, 3, H, W]"""
    wall = frames[:, :, : int(0.58 * frames.shape[2])].transpose(0, 1).flatten(1)  # [3, pixels]
    coloured = wall[:, (wall.amax(0) - wall.amin(0)) > 0.35]
    if coloured.shape[1] < 0.005 * wall.shape[1]:
        return None
    chroma = coloured - coloured.mean(0)
    palette = torch.tensor(list(COLOURS.values())).T
    nearest = (torch.nn.functional.normalize(palette - palette.mean(0), dim=0).T @ chroma).argmax(0)
    return list(COLOURS)[int(torch.bincount(nearest, minlength=4).argmax())]


@pytest.mark.long
@torch.no_grad()
def test_the_shipped_weights_follow_the_caption():
    diffusers = pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    pipe = diffusers.WanPipeline.from_pretrained(trained_weights(), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    size = {"height": 144, "width": 240, "num_frames": 9}
    asked = {"negative_prompt": "", "num_inference_steps": 8, "guidance_scale": 3.0, "output_type": "pt"}
    seen = {}
    for (name, caption), seed in itertools.product(CAPTIONS.items(), (0, 1)):
        generator = torch.Generator().manual_seed(seed)
        (video,) = pipe(prompt=caption, generator=generator, **size, **asked).frames
        seen[name, seed] = dominant_colour(video.float())
    right = sum(colour == name for (name, _), colour in seen.items())
    assert right >= 6, seen  # of 8; by chance, 2


def test_tiny_writes_the_trained_pipeline_in_float32(dbsp, tmp_path):
    diffusers = pytest.importorskip("diffusers")
    code, out, err = dbsp("tiny", "wan-trained", tmp_path / "wan")
    assert (code, out) == (0, "")
    assert err.endswith(f"wrote a tiny wan-trained checkpoint to {tmp_path / 'wan'}\n")
    written = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "wan" / "transformer")
    shipped = diffusers.WanTransformer3DModel.from_pretrained(trained_weights() / "transformer")
    assert {p.dtype for p in written.parameters()} == {torch.float32}
    assert all(torch.equal(a, b.float()) for a, b in zip(written.parameters(), shipped.parameters(), strict=True))


@pytest.mark.parametrize(("strategy", "unequal"), [("U8R1", 1.1), ("U1R8", 1.05)])
def test_learned_masks_are_unequal_and_db_sp_evens_them_out(strategy, unequal):
    series = MaskSeries.read(MASKS)
    masks = [series.get(step, layer) for step in series.steps for layer in series.layers]
    plans = [make_plan(mask, strategy) for mask in masks]
    assert np.mean([plan.rho_before for plan in plans]) > unequal
    assert np.mean([plan.rho for plan in plans]) < 1.01


@pytest.mark.long
def test_denser_masks_give_videos_nearer_to_the_dense_one(tmp_path):
    few = ("--prompts", 1, "--seeds", 1, "--steps", 1, "--every", 2, "--sources", "window")
    output_of("scripts.training.trained_model.quality", *few, "--out", tmp_path)
    with (tmp_path / "quality.csv").open(newline="") as file:
        sparse, denser = csv.DictReader(file)
    assert sparse["label"] == denser["label"] == "measured on the small trained model"
    assert 0 < float(sparse["density"]) < float(denser["density"]) < 1
    assert float(sparse["psnr"]) < float(denser["psnr"])
    assert float(sparse["ssim"]) < float(denser["ssim"]) < 1
    assert float(sparse["relative_l1"]) > float(denser["relative_l1"]) > 0
    for name in ("quality.png", "quality-frames.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
