"""Compares the videos and latents of two runs: PSNR and SSIM. Needs imageio and scikit-image."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file

from dbsp_core.utils.errors import UserError
from dbsp_kernels.errors import install_command

VIDEO, LATENTS = "video.mp4", "latents.safetensors"  # the files in a report's folder to compare


def compare_videos(a: Path, b: Path) -> dict[str, float | None]:
    """Compares the videos of two report folders, which must have one mp4 each, of equal size and number of frames.

    Returns "psnr" in dB over all frames, infinite for equal videos, and "ssim", the mean over frames.
    """
    try:
        import imageio.v3  # noqa: F401  read by _frames
        from skimage.metrics import structural_similarity
    except ImportError as error:
        raise UserError(f"{error.name} is needed to compare videos; {install_command('diffusers')}") from error
    squared_error, values, similarities = 0.0, 0, []
    for frame, other in zip_longest(_frames(a), _frames(b)):
        if frame is None or other is None:
            raise UserError(f"the video of {a if frame is None else b} has fewer frames than the other")
        if frame.shape != other.shape:
            sizes = " and ".join(f"{image.shape[1]}×{image.shape[0]}" for image in (frame, other))
            raise UserError(f"the videos have different frame sizes, {sizes}")
        if min(frame.shape[:2]) < 11:  # SSIM's Gaussian window in pixels (Wang et al., 2004, §III.B)
            raise UserError(f"frames of {frame.shape[1]}×{frame.shape[0]} are smaller than SSIM's window of 11×11")
        squared_error += float(((frame - other) ** 2).sum())
        values += frame.size
        setting = {"gaussian_weights": True, "use_sample_covariance": False, "data_range": 1.0}
        similarities.append(float(structural_similarity(frame, other, channel_axis=2, **setting)))
    return {"psnr": _psnr(squared_error / values, 1.0), "ssim": math.fsum(similarities) / len(similarities)}


def compare_latents(a: Path, b: Path) -> dict[str, float | None]:
    """Compares the final latents of two report folders: "latents_psnr" in dB, relative to the value range in a."""
    both = []
    for folder in (a, b):
        try:
            both.append(load_file(folder / LATENTS)["latents"].double())
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(f"{folder} has no readable {LATENTS}") from error
    expected, latents = both
    if expected.shape != latents.shape:
        raise UserError(f"the latents have different shapes, {list(expected.shape)} and {list(latents.shape)}")
    value_range = float(expected.max() - expected.min())
    return {"latents_psnr": _psnr(float((expected - latents).square().mean()), value_range)}


def _frames(folder: Path) -> Iterator[np.ndarray]:
    """Yields frames, float64[H, W, 3] in [0, 1]. Raises UserError unless exactly one mp4 can be read."""
    import imageio.v3 as imageio

    videos = list(folder.glob("*.mp4"))
    if len(videos) != 1:
        raise UserError(f"{folder} has {len(videos) or 'no'} videos, expected one; put exactly one mp4 there")
    try:
        for frame in imageio.imiter(videos[0], plugin="FFMPEG"):
            yield np.asarray(frame, dtype=np.float64) / 255
    except (OSError, RuntimeError, ValueError, IndexError, SyntaxError) as error:
        raise UserError(f"{videos[0]} cannot be read as a video") from error


def _psnr(mean_squared_error: float, value_range: float) -> float:
    return 10 * math.log10(value_range**2 / mean_squared_error) if mean_squared_error else math.inf
