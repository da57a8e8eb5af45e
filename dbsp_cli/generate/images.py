"""Images and frames that a video is made from, cut to its size."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.signature import Pipeline
from dbsp_core.utils.errors import UserError, in_number
from dbsp_core.utils.files import require_file

_ADVICE = "name a file such as a PNG or JPEG"
VIDEO = "give a video file, such as an mp4"
"""Advice for `--video`."""


def fitted(path: Path, video: GenerateSettings) -> Any:
    """Reads an image in the video's size: scaled, and cut off on both sides if it is too wide or too high.

    Raises:
        UserError: The file is not an image of 8 bits, is transparent, or more than half of it would be cut off.
    """
    from PIL import Image, ImageOps

    require_file(path, "image", _ADVICE)
    try:
        image = ImageOps.exif_transpose(Image.open(path))
        has_8_bits = not image.mode.startswith(("I", "F"))
        transparent = has_8_bits and image.has_transparency_data
        if transparent:
            transparent = np.asarray(image.convert("RGBA"))[..., 3].min() < 255
        pixels = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image; {_ADVICE}") from error
    if not has_8_bits:
        raise UserError(f"{path} has values of more than 8 bits, and it is not clear which one is white; save 8 bits")
    if transparent:
        raise UserError(f"{path} has transparent parts, and a video has none; save it on a background")
    return _cut_to_size(pixels, str(path), video)


def _cut_to_size(image: Any, shown: str, video: GenerateSettings) -> Any:
    """Scales an image, and cuts off both sides. Raises UserError if that would be more than half of it."""
    from PIL import Image, ImageOps

    width, height = video.width or image.width, video.height or image.height
    if not 0.5 <= image.width * height / (image.height * width) <= 2:
        raise UserError(
            f"{shown} is {image.width}×{image.height}: more than half of it would be cut off in a video of "
            f"{width}×{height}; set generate.width and generate.height, or cut it yourself"
        )
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)


def source_frames(path: Path, video: GenerateSettings, pipeline: Pipeline) -> tuple[Any, ...]:
    """Reads the frames of a video to start from, nearest in time to those of the new video, in its size.

    Raises:
        UserError: The file has no pictures, too few of them, or more than half of each would be cut off.
    """
    import imageio_ffmpeg
    from PIL import Image

    shown, fps, frames = f"--video {path}", video.fps or 16, list[Any]()
    try:
        with closing(imageio_ffmpeg.read_frames(str(path.absolute()))) as pictures:
            about = next(pictures)
            wanted = [round(number * about["fps"] / fps) for number in range(video.num_frames or 1)]
            for number, picture in zip(range(wanted[-1] + 1), pictures, strict=False):
                image = Image.frombytes("RGB", about["size"], picture)
                frames += [_cut_to_size(image, shown, video)] * wanted.count(number)
    except (OSError, RuntimeError, StopIteration, LookupError, AttributeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{shown} has no pictures that ffmpeg can read; {VIDEO}") from error
    if len(frames) < len(wanted):
        fewer = max(0, len(frames) - 1) // pipeline.frame_stride * pipeline.frame_stride + 1
        raise UserError(
            f"{shown} has too few frames: {in_number(len(frames), 'frame')} at {fps} a second, and the video has "
            f"{len(wanted)}; set generate.num_frames={fewer}, or give a longer one"
        )
    return tuple(frames)
