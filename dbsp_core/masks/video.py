"""The size of one sequence, in tokens."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Video"]


class Video(NamedTuple):
    """A video or an image as attention sees it, with the text of its sequence.

    Attributes:
        thw: Frames, rows and columns of its token grid; an image has one frame.
        text: Tokens of text in the same sequence.
    """

    thw: tuple[int, int, int]
    text: int = 0

    @property
    def grid_tokens(self) -> int:
        """Tokens of the video alone."""
        frames, height, width = self.thw
        return frames * height * width

    @property
    def tokens(self) -> int:
        """Tokens of video and text."""
        return self.text + self.grid_tokens
