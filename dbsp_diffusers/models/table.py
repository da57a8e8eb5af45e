"""The transformer classes that db-SP knows, and how others are made known."""

from __future__ import annotations

from torch import nn

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models import (
    cogvideox,
    cosmos,
    ernie,
    flux,
    hunyuan,
    kandinsky,
    krea,
    ltx,
    minimax,
    qwen,
    wan,
    z_image,
)
from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.refused import REFUSED
from dbsp_kernels.errors import page

__all__ = ["ARCHITECTURES", "architecture_of", "known_architecture", "register_architecture"]

ARCHITECTURES: dict[str, Architecture] = {
    **wan.ARCHITECTURES,
    **cogvideox.ARCHITECTURES,
    **hunyuan.ARCHITECTURES,
    **ltx.ARCHITECTURES,
    **cosmos.ARCHITECTURES,
    **flux.ARCHITECTURES,
    **qwen.ARCHITECTURES,
    **z_image.ARCHITECTURES,
    **krea.ARCHITECTURES,
    **ernie.ARCHITECTURES,
    **minimax.ARCHITECTURES,
    **kandinsky.ARCHITECTURES,
}
"""Architectures by class name: diffusers need not be imported to look one up."""


def register_architecture(class_name: str, architecture: Architecture) -> None:
    """Makes a transformer class known, also one that is otherwise refused; see docs/adding-a-model.md.

    Args:
        class_name: The name of the class; its subclasses are known with it.
        architecture: What db-SP must know of it.

    Raises:
        UserError: For a name that is known already, with another architecture.
    """
    if ARCHITECTURES.setdefault(class_name, architecture) != architecture:
        raise UserError(f"{class_name} is known already, with other settings; register a subclass under another name")


def known_architecture(transformer: nn.Module) -> Architecture | None:
    """The architecture of a transformer or of a class it derives from, whether it can be run or not."""
    names = (cls.__name__ for cls in type(transformer).__mro__)
    return next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)


def architecture_of(transformer: nn.Module) -> Architecture:
    """The architecture of a transformer or of a class it derives from. Raises UserError for one that cannot be run."""
    kind = type(transformer).__name__
    for cls in type(transformer).__mro__:
        if cls.__name__ in ARCHITECTURES:
            architecture = ARCHITECTURES[cls.__name__]
            reason = architecture.refused(transformer)
            if reason is not None:
                raise UserError(f"db-SP does not run this {kind}: {reason}")
            return architecture
        if cls.__name__ in REFUSED:
            raise UserError(f"db-SP does not run {kind}: {REFUSED[cls.__name__]}")
    raise UserError(
        f"db-SP does not know {kind}; it knows {', '.join(ARCHITECTURES)} and their subclasses; "
        f"others of their kind need one entry: {page('adding-a-model')}"
    )
