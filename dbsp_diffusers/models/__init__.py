"""Descriptions of transformer classes: self-attention modules, sharded tensors, tokens."""

from dbsp_diffusers.models.architecture import Architecture, ShardPlan, ShardSpec, heads_of
from dbsp_diffusers.models.table import (
    ARCHITECTURES,
    architecture_of,
    known_architecture,
    register_architecture,
)
from dbsp_diffusers.models.token_sequence import (
    TokenSequence,
    on_sample_grid,
    sample_grid,
    text_before_padding,
    text_length,
    valid_tokens,
)

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
