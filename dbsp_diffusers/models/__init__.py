"""Descriptions of transformer classes (self-attention modules, sharded tensors, tokens), and their table."""

from torch import nn

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import Architecture, ShardPlan, ShardSpec, heads_of
from dbsp_diffusers.models.image_models import IMAGE_MODELS
from dbsp_diffusers.models.token_sequence import (
    TokenSequence,
    on_sample_grid,
    sample_grid,
    text_before_padding,
    text_length,
    valid_tokens,
)
from dbsp_diffusers.models.video_models import VIDEO_MODELS
from dbsp_kernels.errors import page

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "ShardPlan",
    "ShardSpec",
    "TokenSequence",
    "architecture_of",
    "heads_of",
    "known_architecture",
    "on_sample_grid",
    "register_architecture",
    "sample_grid",
    "text_before_padding",
    "text_length",
    "valid_tokens",
]

ARCHITECTURES: dict[str, Architecture] = {**VIDEO_MODELS, **IMAGE_MODELS}
"""Architectures by class name, so that diffusers need not be imported."""


def register_architecture(class_name: str, architecture: Architecture) -> None:
    """Registers a transformer class; see docs/adding-a-model.md.

    Args:
        class_name: Name of the class; also covers its subclasses.
        architecture: Its description.

    Raises:
        UserError: The name is already registered with another architecture.
    """
    if ARCHITECTURES.setdefault(class_name, architecture) != architecture:
        raise UserError(f"{class_name} is already registered; register a subclass under another name")


def known_architecture(transformer: nn.Module) -> Architecture | None:
    """Returns the architecture of a transformer's class or base class (maybe unsupported), or None."""
    names = (cls.__name__ for cls in type(transformer).__mro__)
    return next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)


def architecture_of(transformer: nn.Module) -> Architecture:
    """Returns the architecture of a transformer's class or base class. Raises UserError if not supported."""
    kind, architecture = type(transformer).__name__, known_architecture(transformer)
    if architecture is None:
        raise UserError(
            f"db-SP does not know {kind}; it knows {', '.join(ARCHITECTURES)} and their subclasses; "
            f"others of their kind need one entry: {page('adding-a-model')}"
        )
    reason = architecture.unsupported(transformer)
    if reason is not None:
        raise UserError(f"db-SP does not support this {kind}: {reason}")
    return architecture
