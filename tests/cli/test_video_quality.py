"""PSNR and SSIM of videos: those of scikit-image, and a clear line where two cannot be compared."""

from __future__ import annotations

import math
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from dbsp_cli.commands.report import compare_latents, compare_videos
from dbsp_core.reports.collect import LATENTS
from dbsp_core.utils.errors import UserError


def save_video(folder: Path, seed: int = 0, frames: int = 3, size: tuple[int, int] = (40, 56)) -> None:
    """Saves smooth noise as an mp4."""
    folder.mkdir()
    coarse = torch.from_numpy(np.random.default_rng(seed).random((frames, 3, 5, 7)))
    video = torch.nn.functional.interpolate(coarse, size=size, mode="bilinear")
    pixels = (video.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()
    imageio.mimwrite(folder / "v.mp4", [*pixels], fps=16, macro_block_size=1)


def test_measures_are_those_of_scikit_image(tmp_path):
    for seed in range(2):
        save_video(tmp_path / str(seed), seed)
    a, b = (np.stack(imageio.mimread(tmp_path / str(seed) / "v.mp4")) / 255 for seed in range(2))
    found = compare_videos(tmp_path / "0", tmp_path / "1")
    assert found["psnr"] == pytest.approx(peak_signal_noise_ratio(a, b, data_range=1.0))
    setting = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1.0}
    expected = [structural_similarity(x, y, channel_axis=2, **setting) for x, y in zip(a, b, strict=True)]
    assert found["ssim"] == pytest.approx(np.mean(expected))
    assert compare_videos(tmp_path / "0", tmp_path / "0") == {"psnr": math.inf, "ssim": pytest.approx(1.0)}


def test_videos_and_latents_that_cannot_be_compared_are_one_line(tmp_path):
    save_video(tmp_path / "a")
    save_video(tmp_path / "short", frames=2)
    save_video(tmp_path / "narrow", size=(40, 48))
    latents = torch.tensor([[-1.0, 0.0, 3.0]])
    for name, tensor in (("a", latents), ("short", latents + 0.4), ("narrow", latents[:, :2]), ("damaged", latents)):
        (tmp_path / name).mkdir(exist_ok=True)
        save_file({"latents": tensor}, tmp_path / name / LATENTS)
    (tmp_path / "damaged" / "v.mp4").write_bytes(b"no video")
    (tmp_path / "none").mkdir()
    for compare, other, message in (
        (compare_videos, "short", "the video of .*short has fewer frames than the other"),
        (compare_videos, "narrow", "the videos have different frame sizes, 56×40 and 48×40"),
        (compare_videos, "none", "none has no videos, expected one; put exactly one mp4 there"),
        (compare_videos, "damaged", "v.mp4 cannot be read as a video"),
        (compare_latents, "narrow", r"shapes, \[1, 3\] and \[1, 2\]"),
        (compare_latents, "none", "none has no readable latents"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            compare(tmp_path / "a", tmp_path / other)
        assert "\n" not in str(raised.value)
    assert compare_latents(tmp_path / "a", tmp_path / "short")["latents_psnr"] == pytest.approx(20.0, abs=1e-5)
