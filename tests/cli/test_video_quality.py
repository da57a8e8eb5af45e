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

from dbsp_cli import video_quality
from dbsp_cli.video_quality import compare_latents, compare_videos
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


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"frames": 2}, "the video of .*b has fewer frames than the other"),
        ({"size": (40, 48)}, "the videos have different frame sizes, 56×40 and 48×40"),
        ((), "b has no videos, expected one; put exactly one mp4 there"),
        (("one.mp4", "two.mp4"), "b has 2 videos"),
        (("damaged.mp4",), "damaged.mp4 cannot be read as a video"),
    ],
)
def test_videos_that_cannot_be_compared_are_one_line(tmp_path, other, message):
    save_video(tmp_path / "a")
    if isinstance(other, dict):
        save_video(tmp_path / "b", **other)
    else:
        (tmp_path / "b").mkdir()
        for name in other:
            (tmp_path / "b" / name).write_bytes(b"no video")
    with pytest.raises(UserError, match=message) as raised:
        compare_videos(tmp_path / "a", tmp_path / "b")
    assert "\n" not in str(raised.value)


def test_latents_are_compared_by_their_range(tmp_path):
    latents = torch.tensor([[-1.0, 0.0, 3.0]])
    for name, tensor in (("a", latents), ("b", latents + 0.4), ("c", latents[:, :2])):
        (tmp_path / name).mkdir()
        save_file({"latents": tensor}, tmp_path / name / video_quality.LATENTS)
    assert compare_latents(tmp_path / "a", tmp_path / "b")["latents_psnr"] == pytest.approx(20.0, abs=1e-5)
    assert compare_latents(tmp_path / "a", tmp_path / "a") == {"latents_psnr": math.inf}
    for folder, message in (("c", r"shapes, \[1, 3\] and \[1, 2\]"), ("gone", "gone has no readable latents")):
        with pytest.raises(UserError, match=message):
            compare_latents(tmp_path / "a", tmp_path / folder)
