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


def save_frames(folder: Path, seed: int = 0, frames: int = 3, size: tuple[int, int] = (40, 56)) -> np.ndarray:
    """Saves smooth noise as PNG frames; returns uint8[frames, H, W, 3]."""
    folder.mkdir()
    coarse = torch.from_numpy(np.random.default_rng(seed).random((frames, 3, 5, 7)))
    video = torch.nn.functional.interpolate(coarse, size=size, mode="bilinear")
    pixels = (video.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()
    for number, frame in enumerate(pixels):
        imageio.imwrite(folder / f"{number:03}.png", frame)
    (folder / "balance.png").write_bytes(b"another picture")
    return pixels


def test_measures_are_those_of_scikit_image(tmp_path):
    a, b = (save_frames(tmp_path / str(seed), seed) / 255 for seed in range(2))
    psnr, ssim = compare_videos(tmp_path / "0", tmp_path / "1")
    assert psnr == pytest.approx(peak_signal_noise_ratio(a, b, data_range=1.0))
    setting = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1.0}
    expected = [structural_similarity(x, y, channel_axis=2, **setting) for x, y in zip(a, b, strict=True)]
    assert ssim == pytest.approx(np.mean(expected))
    assert compare_videos(tmp_path / "0", tmp_path / "0") == (math.inf, pytest.approx(1.0))


def test_an_mp4_is_read_and_a_darker_one_differs_as_it_should(tmp_path):
    for name, level in (("a", 100), ("b", 151)):
        (tmp_path / name).mkdir()
        frames = [np.full((32, 48, 3), level, dtype=np.uint8)] * 4
        imageio.mimwrite(tmp_path / name / "v.mp4", frames, fps=16, macro_block_size=1)
    psnr, ssim = compare_videos(tmp_path / "a", tmp_path / "b")
    assert psnr == pytest.approx(20 * math.log10(255 / 51), abs=0.3)
    assert 0.9 < ssim < 1, "brightness counts for little"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"frames": 2}, "the video of .*b has fewer frames than the other"),
        ({"size": (40, 48)}, "the videos have frames of 56×40 and 48×40"),
        (None, "b has no videos; put one there, as mp4 or frames as png"),
        ("two.mp4", "b has 2 videos"),
        ("damaged.mp4", "damaged.mp4 cannot be read as a video or a picture"),
        ("damaged.png", "damaged.png cannot be read as a video or a picture"),
    ],
)
def test_videos_that_cannot_be_compared_are_one_line(tmp_path, other, message):
    save_frames(tmp_path / "a")
    if isinstance(other, dict):
        save_frames(tmp_path / "b", **other)
    else:
        (tmp_path / "b").mkdir()
        for name in {None: (), "two.mp4": ("one.mp4", "two.mp4")}.get(other, (other,)):
            (tmp_path / "b" / name).write_bytes(b"no video")
    with pytest.raises(UserError, match=message) as raised:
        compare_videos(tmp_path / "a", tmp_path / "b")
    assert "\n" not in str(raised.value)


def test_latents_are_compared_by_their_range(tmp_path):
    latents = torch.tensor([[-1.0, 0.0, 3.0]])
    for name, tensor in (("a", latents), ("b", latents + 0.4), ("c", latents[:, :2])):
        (tmp_path / name).mkdir()
        save_file({"latents": tensor}, tmp_path / name / video_quality.LATENTS)
    assert compare_latents(tmp_path / "a", tmp_path / "b") == pytest.approx(20.0, abs=1e-5)
    assert compare_latents(tmp_path / "a", tmp_path / "a") == math.inf
    for folder, message in (("c", r"shapes \[1, 3\] and \[1, 2\]"), ("gone", "gone has no latents.safetensors")):
        with pytest.raises(UserError, match=message):
            compare_latents(tmp_path / "a", tmp_path / folder)
