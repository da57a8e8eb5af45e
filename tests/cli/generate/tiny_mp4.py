"""A real video for ranks that are stubs."""

from __future__ import annotations

import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path

import imageio_ffmpeg


@cache
def tiny_mp4() -> bytes:
    """Returns a file of three frames, as ffmpeg writes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        with closing(imageio_ffmpeg.write_frames(str(path), (16, 16))) as writer:
            writer.send(None)
            for _ in range(3):
                writer.send(bytes(16 * 16 * 3))
        return path.read_bytes()
