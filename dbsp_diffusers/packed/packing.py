"""Which transformers take samples of several sizes in one call, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dbsp_core.runtime.session.session import AttentionSession
from dbsp_diffusers.packed.wan import attach_packed_wan, wan_alone
from dbsp_diffusers.packed_samples import PackedBatch
from dbsp_diffusers.patching import PatchSet

__all__ = ["Packing", "packing_of"]


@dataclass(frozen=True)
class Packing:
    """How a transformer is called with samples of several sizes at once.

    Attributes:
        alone: (transformer, batch) -> predictions, one a sample, on one process without db-SP.
        attach: (transformer, session, patches) lets calls of the transformer itself take a `PackedBatch`, with db-SP.
    """

    alone: Callable[[Any, PackedBatch], list[torch.Tensor]]
    attach: Callable[[Any, AttentionSession, PatchSet], None]


PACKINGS = {"WanTransformer3DModel": Packing(wan_alone, attach_packed_wan)}
"""Packings by class name."""


def packing_of(transformer: nn.Module) -> Packing | None:
    """How a transformer takes samples of several sizes, or None where it takes one size at a time."""
    return next((PACKINGS[cls.__name__] for cls in type(transformer).__mro__ if cls.__name__ in PACKINGS), None)
