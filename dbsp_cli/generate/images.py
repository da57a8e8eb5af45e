"""Images that a video is made from, cut to its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dbsp_core.models.video import VideoSettings
from dbsp_core.utils.errors import UserError

__all__ = ["fitted"]


def fitted(path: Path, video: VideoSettings) -> Any:
    """Reads an image in the video's size: scaled, and cut off evenly where it is too wide or too high.

    Raises:
        UserError: The file is no image, or more than half of it would be cut off.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not path.exists():
        raise UserError(f"{path} does not exist; name a file such as a PNG or JPEG")
    try:
        image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image; name a file such as a PNG or JPEG") from error
    width, height = video.width or image.width, video.height or image.height
    ratio = image.width * height / (image.height * width)
    if not 0.5 <= ratio <= 2:
        raise UserError(
            f"{path} is {image.width}×{image.height}: more than half of it would be cut off in a video of "
            f"{width}×{height}; set video.width and video.height, or cut it yourself"
        )
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
