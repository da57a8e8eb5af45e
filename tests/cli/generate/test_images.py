"""The first and last frame of a video, as files of many kinds have them."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from dbsp_cli.generate.images import fitted
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.utils.errors import UserError

SIZE = (96, 64)
VIDEO = GenerateSettings(width=SIZE[0], height=SIZE[1])
RAMP = np.linspace(0, 1, SIZE[0] * SIZE[1]).reshape(SIZE[1], SIZE[0])
GREY = (RAMP * 255).round().astype(np.uint8)


def frame_of(image, path, **options):
    image.save(path, **options)
    frame = fitted(path, VIDEO)
    assert (frame.mode, frame.size) == ("RGB", SIZE)
    return np.asarray(frame).astype(int)


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
def test_16_bits_are_scaled_to_8(tmp_path, suffix):
    wide = Image.fromarray((RAMP * 65535).round().astype(np.uint16))
    frame = frame_of(wide, tmp_path / f"first.{suffix}")
    assert abs(frame - GREY[..., None]).max() <= 1


@pytest.mark.parametrize(
    ("mode", "suffix", "most"),
    [
        ("L", "png", 0),
        ("RGB", "png", 0),
        ("P", "png", 0),
        ("LA", "png", 0),
        ("RGBA", "png", 0),
        ("CMYK", "tiff", 0),
        ("CMYK", "jpg", 16),
        ("YCbCr", "jpg", 16),
        ("LAB", "tiff", 2),
        ("1", "png", 0),
    ],
)
def test_images_of_8_bits_or_1_look_as_they_do(tmp_path, mode, suffix, most):
    grey = Image.fromarray(GREY)
    if mode in ("P", "1"):
        image = grey.convert(mode, dither=Image.Dither.NONE)
    else:
        image = grey.convert("RGB").convert(mode)
    frame = frame_of(image, tmp_path / f"first.{suffix}")
    expected = np.where(GREY > 127, 255, 0) if mode == "1" else GREY
    assert abs(frame - expected[..., None]).max() <= most


@pytest.mark.parametrize("values", [(RAMP * 70000).astype(np.int32), RAMP.astype(np.float32)])
def test_values_of_an_unknown_range_are_rejected(tmp_path, values):
    Image.fromarray(values).save(tmp_path / "first.tiff")
    with pytest.raises(UserError, match=r"first.tiff has values of 32 bits, .*; save it with 8 or 16 bits"):
        fitted(tmp_path / "first.tiff", VIDEO)


def with_alpha(mode):
    image = Image.fromarray(GREY).convert(mode)
    image.putalpha(Image.fromarray(GREY))
    return image


TRANSPARENT = {
    "RGBA": (with_alpha("RGB"), {}),
    "LA": (with_alpha("L"), {}),
    "a colour of a palette": (Image.fromarray(GREY).convert("P"), {"transparency": 0}),
    "a grey level": (Image.fromarray(GREY), {"transparency": 0}),
    "a grey level of 16 bits": (Image.fromarray(GREY.astype(np.uint16)), {"transparency": 0}),
}


@pytest.mark.parametrize("what", TRANSPARENT)
def test_transparent_parts_are_rejected(tmp_path, what):
    image, options = TRANSPARENT[what]
    image.save(tmp_path / "first.png", **options)
    with pytest.raises(UserError, match=r"first.png has transparent parts, .*; save it on a background"):
        fitted(tmp_path / "first.png", VIDEO)


def test_what_is_no_image_is_rejected(tmp_path):
    (tmp_path / "first.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 60)
    with pytest.raises(UserError, match=r"first.png cannot be read as an image; name a file such as a PNG"):
        fitted(tmp_path / "first.png", VIDEO)
    with pytest.raises(UserError, match=r"image .* is a folder, not a file; name a file such as a PNG"):
        fitted(tmp_path, VIDEO)
    with pytest.raises(UserError, match=r"image .*/gone.png does not exist; name a file such as a PNG"):
        fitted(tmp_path / "gone.png", VIDEO)
