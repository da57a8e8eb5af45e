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
_SAME_RATE = 0.005
"""Relative difference of rates that are called the same, such as 23.976 and 24 frames a second."""


def fitted(path: Path, video: GenerateSettings) -> Any:
    """Reads an image in the video's size: scaled, and cut off on both sides if it is too wide or too high.

    Raises:
        UserError: The file is not an image, has transparent parts or values of an unknown range, or more than half of
            it would be cut off.
    """
    from PIL import Image, ImageOps

    require_file(path, "image", _ADVICE)
    try:
        opened = Image.open(path)
        message = _colour_message(opened)
        image = ImageOps.exif_transpose(opened)
        image = _in_8_bits(image) if _has_16_bits(opened) else image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image; {_ADVICE}") from error
    if message is not None:
        raise UserError(f"{path} {message}")
    return _cut_to_size(image, str(path), video)


def _cut_to_size(image: Any, shown: str, video: GenerateSettings) -> Any:
    """Scales an image, and cuts off both sides. Raises UserError if that would be more than half of it."""
    from PIL import Image, ImageOps

    width, height = video.width or image.width, video.height or image.height
    ratio = image.width * height / (image.height * width)
    if not 0.5 <= ratio <= 2:
        raise UserError(
            f"{shown} is {image.width}×{image.height}: more than half of it would be cut off in a video of "
            f"{width}×{height}; set generate.width and generate.height, or cut it yourself"
        )
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)


def source_frames(path: Path, video: GenerateSettings, pipeline: Pipeline) -> tuple[tuple[Any, ...], str | None]:
    """Reads the frames of a video to start from, nearest in time to those of the new video, in its size.

    Returns:
        The frames, and a line about what is used of a source of another rate or length, or None.

    Raises:
        UserError: The file has no pictures, too few of them, or more than half of each would be cut off.
    """
    import imageio_ffmpeg
    from PIL import Image

    shown, fps = f"--video {path}", video.fps or 16
    frames: list[Any] = []
    try:
        with closing(imageio_ffmpeg.read_frames(str(path.absolute()))) as pictures:
            # 1. The number of each frame in the source.
            about = next(pictures)
            size, rate = about["size"], about["fps"] or fps
            step = 1.0 if abs(rate / fps - 1) < _SAME_RATE else rate / fps
            wanted = [round(number * step) for number in range(video.num_frames or 1)]
            if size[0] * size[1] > (Image.MAX_IMAGE_PIXELS or np.inf):
                raise UserError(f"{shown} has frames of {size[0]}×{size[1]}, more than can be read; scale it down")
            # 2. Those frames.
            for number, picture in enumerate(pictures):
                if number in wanted[len(frames) : len(frames) + 1]:
                    frame = _cut_to_size(Image.frombytes("RGB", size, picture), shown, video)
                    frames += [frame] * wanted.count(number)
                if len(frames) == len(wanted):
                    break
    except (OSError, RuntimeError, StopIteration, LookupError, AttributeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{shown} has no pictures that ffmpeg can read; {VIDEO}") from error
    if len(frames) < len(wanted):
        fewer = max(0, len(frames) - 1) // pipeline.frame_stride * pipeline.frame_stride + 1
        fix = f"set generate.num_frames={fewer}, or give a longer one" if frames else VIDEO
        raise UserError(
            f"{shown} has too few frames: {in_number(len(frames), 'frame')} at {fps} a second, and the video has "
            f"{len(wanted)}; {fix}"
        )
    used, whole = len(wanted) / fps, float(about["duration"] or 0)
    if step == 1 and whole - used < 1 / fps:
        return tuple(frames), None
    return tuple(frames), (
        f"{shown}: of {whole:.2f} s at {rate:g} frames a second, the first {used:.2f} s are used, at {fps} a second"
    )


def _has_16_bits(image: Any) -> bool:
    """Returns True for grey levels of 0 to 65,535, as cameras and renderers write them."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _in_8_bits(image: Any) -> Any:
    """Returns an image of 16 bits in RGB; PIL would clip it at 255."""
    from PIL import Image

    levels = np.asarray(image).astype(np.float64) / 257
    return Image.fromarray(levels.round().clip(0, 255).astype(np.uint8)).convert("RGB")


def _colour_message(image: Any) -> str | None:
    """Returns what is wrong with an image's values, or None."""
    if image.mode in ("I", "F") and not _has_16_bits(image):
        return "has values of 32 bits, and does not say which one is white; save it with 8 or 16 bits"
    if image.mode not in ("LA", "PA", "RGBA", "RGBa") and "transparency" not in image.info:
        return None
    if not _has_16_bits(image) and image.convert("RGBA").getchannel("A").getextrema()[0] == 255:
        return None
    return "has transparent parts, and a video has none; save it on a background, without transparency"
