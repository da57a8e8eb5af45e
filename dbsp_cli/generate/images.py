"""Images that a video is made from, cut to its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dbsp_core.models.settings import GenerateSettings
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import require_file

_ADVICE = "name a file such as a PNG or JPEG"


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
    width, height = video.width or image.width, video.height or image.height
    ratio = image.width * height / (image.height * width)
    if not 0.5 <= ratio <= 2:
        raise UserError(
            f"{path} is {image.width}×{image.height}: more than half of it would be cut off in a video of "
            f"{width}×{height}; set generate.width and generate.height, or cut it yourself"
        )
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)


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
