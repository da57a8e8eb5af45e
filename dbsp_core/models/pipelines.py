"""What the models of one of diffusers' pipeline classes share."""

from __future__ import annotations

from dataclasses import dataclass

from dbsp_core.models.video import TOKEN_PIXELS

__all__ = ["PIPELINES", "Pipeline", "token_grid"]


@dataclass(frozen=True)
class Pipeline:
    """What the models of one of diffusers' pipeline classes share.

    Attributes:
        title: Its name in messages.
        frame_stride: By how many frames videos get longer: Wan's VAE makes 4 of one latent frame, CogVideoX decodes
            two of those at a time.
        text_tokens: Number of text tokens in self-attention's sequence.
        images: The fewest and the most that a video is made from: its first frame, and its last.
    """

    title: str
    frame_stride: int
    text_tokens: int
    images: tuple[int, int] = (0, 0)

    def frames_complaint(self, frames: int) -> str | None:
        """What is wrong with a number of frames, which such a pipeline would change or refuse; None: nothing."""
        if frames > 0 and (frames - 1) % self.frame_stride == 0:
            return None
        less = max(0, (frames - 1) // self.frame_stride) * self.frame_stride + 1
        return f"must be {self.frame_stride}k + 1 for {self.title}, for example {less} or {less + self.frame_stride}"


PIPELINES = {
    "WanPipeline": Pipeline("Wan text-to-video", 4, 0),
    "WanImageToVideoPipeline": Pipeline("Wan image-to-video", 4, 0, images=(1, 2)),
    "WanVACEPipeline": Pipeline("Wan VACE", 4, 0, images=(2, 2)),
    "CogVideoXPipeline": Pipeline("CogVideoX text-to-video", 8, 226),
}
"""Pipelines by the name of diffusers' class."""


def token_grid(
    num_frames: int, height: int, width: int, patch_frames: int, token_pixels: int = TOKEN_PIXELS
) -> tuple[int, int, int]:
    """Frames, rows and columns of the tokens of a video, whose size is given in frames and pixels."""
    latent_frames = (num_frames - 1) // 4 + 1  # all models' VAEs make one latent frame of 4, after the first
    return -(-latent_frames // patch_frames), height // token_pixels, width // token_pixels
