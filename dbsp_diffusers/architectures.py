"""What db-SP must know about a diffusers transformer: its blocks, and the token grid of its input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dbsp_core.utils.errors import UserError

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of", "register_architecture"]


@dataclass(frozen=True)
class Architecture:
    """One transformer class.

    blocks:       attribute that lists the blocks; each has its self-attention in `attn1`
    frames_first: whether the sample is [B, F, C, H, W] rather than [B, C, F, H, W]
    joint_text:   whether text is in the same sequence, before video
    embedding:    the module that makes tokens of the sample: [B, C, t, h, w], or [B, text and video tokens, C]
    pipeline:     class name of the pipeline that it is usually in, where published checkpoints are known by it
    """

    blocks: str
    frames_first: bool
    joint_text: bool
    embedding: str = "patch_embedding"
    pipeline: str = ""

    def blocks_of(self, transformer: nn.Module) -> nn.ModuleList:
        blocks: nn.ModuleList = getattr(transformer, self.blocks)
        return blocks

    def token_grid(self, transformer: Any, inputs: Mapping[str, Any]) -> tuple[tuple[int, int, int], int]:
        """(t, h, w) and the number of text tokens in the sequence, from a forward call's arguments by name."""
        sample: torch.Tensor = inputs["hidden_states"]
        frames, height, width = sample.shape[1 if self.frames_first else 2], *sample.shape[3:]
        patch = transformer.config.patch_size
        if isinstance(patch, int):
            patch = (getattr(transformer.config, "patch_size_t", None) or 1, patch, patch)
        text = inputs["encoder_hidden_states"].shape[1] if self.joint_text else 0
        return (frames // patch[0], height // patch[1], width // patch[2]), text


ARCHITECTURES = {
    "WanTransformer3DModel": Architecture("blocks", frames_first=False, joint_text=False, pipeline="WanPipeline"),
    "CogVideoXTransformer3DModel": Architecture(
        "transformer_blocks",
        frames_first=True,
        joint_text=True,
        embedding="patch_embed",
        pipeline="CogVideoXPipeline",
    ),
}
"""By class name: diffusers need not be imported to look one up."""


def register_architecture(class_name: str, architecture: Architecture) -> None:
    """Makes a transformer class known; see docs/adding-a-model.md.

    Args:
        class_name: The name of the class; its subclasses are known with it.
        architecture: How it is built.

    Raises:
        UserError: For a name that is known already, with another architecture.
    """
    if ARCHITECTURES.setdefault(class_name, architecture) != architecture:
        raise UserError(f"{class_name} is known already, with other settings; register a subclass under another name")


def architecture_of(transformer: nn.Module) -> Architecture:
    """The architecture of a transformer or of a class it derives from. Raises UserError for an unknown one."""
    for cls in type(transformer).__mro__:
        if cls.__name__ in ARCHITECTURES:
            return ARCHITECTURES[cls.__name__]
    raise UserError(
        f"db-SP does not know {type(transformer).__name__}; it knows {', '.join(ARCHITECTURES)} and their subclasses; "
        "others of their kind need one entry: docs/adding-a-model.md"
    )
