"""What db-SP must know of a transformer class, as data: where self-attention is, what is cut, what the tokens are."""

from dbsp_diffusers.models.architecture import Architecture, Cut, Cuts, DerivedCuts, heads_of
from dbsp_diffusers.models.table import (
    ARCHITECTURES,
    REFUSED,
    architecture_of,
    known_architecture,
    register_architecture,
)
from dbsp_diffusers.models.token_sequence import TokenSequence, sample_grid, valid_tokens

__all__ = [
    "ARCHITECTURES",
    "REFUSED",
    "Architecture",
    "Cut",
    "Cuts",
    "DerivedCuts",
    "TokenSequence",
    "architecture_of",
    "heads_of",
    "known_architecture",
    "register_architecture",
    "sample_grid",
    "valid_tokens",
]
