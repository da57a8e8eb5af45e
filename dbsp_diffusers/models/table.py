"""The transformer classes that db-SP knows, and how others are registered."""

from __future__ import annotations

from torch import nn

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.image_models import IMAGE_MODELS
from dbsp_diffusers.models.video_models import VIDEO_MODELS
from dbsp_kernels.errors import page

ARCHITECTURES: dict[str, Architecture] = {**VIDEO_MODELS, **IMAGE_MODELS}
"""Architectures by class name: diffusers need not be imported to look one up."""


def register_architecture(class_name: str, architecture: Architecture) -> None:
    """Registers a transformer class; see docs/adding-a-model.md.

    Args:
        class_name: The name of the class; its subclasses are known with it.
        architecture: Data that db-SP needs of it.

    Raises:
        UserError: For a name that is known already, with another architecture.
    """
    if ARCHITECTURES.setdefault(class_name, architecture) != architecture:
        raise UserError(f"{class_name} is known already, with other settings; register a subclass under another name")


def known_architecture(transformer: nn.Module) -> Architecture | None:
    """Returns the architecture of a transformer or of a class it derives from, whether it is supported or not."""
    names = (cls.__name__ for cls in type(transformer).__mro__)
    return next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)


def architecture_of(transformer: nn.Module) -> Architecture:
    """Returns the architecture of a transformer or of a class it derives from. Raises UserError if not supported."""
    kind = type(transformer).__name__
    for cls in type(transformer).__mro__:
        if cls.__name__ in ARCHITECTURES:
            architecture = ARCHITECTURES[cls.__name__]
            reason = architecture.unsupported(transformer)
            if reason is not None:
                raise UserError(f"db-SP does not run this {kind}: {reason}")
            return architecture
    raise UserError(
        f"db-SP does not know {kind}; it knows {', '.join(ARCHITECTURES)} and their subclasses; "
        f"others of their kind need one entry: {page('adding-a-model')}"
    )
