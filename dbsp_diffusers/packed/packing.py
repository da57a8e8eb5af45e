"""Which transformers take samples of several sizes in one call."""

from __future__ import annotations

from torch import nn

from dbsp_diffusers.packed.flux import FLUX
from dbsp_diffusers.packed.hunyuan import HUNYUAN
from dbsp_diffusers.packed.tokens import Packing
from dbsp_diffusers.packed.wan import WAN

__all__ = ["PACKINGS", "packing_of"]

PACKINGS = {
    "WanTransformer3DModel": WAN,
    "FluxTransformer2DModel": FLUX,
    "HunyuanVideoTransformer3DModel": HUNYUAN,
}
"""Packings by class name."""


def packing_of(transformer: nn.Module) -> Packing | None:
    """How a transformer takes samples of several sizes, or None where it takes one size at a time."""
    return next((PACKINGS[cls.__name__] for cls in type(transformer).__mro__ if cls.__name__ in PACKINGS), None)
