"""One transformer class, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from dbsp_core.layout.sequence_layout import Streams
from dbsp_core.sources import MaskSource
from dbsp_diffusers.models.cuts import Cuts, DerivedCuts, modules_at
from dbsp_diffusers.models.token_sequence import TokenSequence

__all__ = ["Architecture", "OwnMask"]


@dataclass(frozen=True)
class OwnMask:
    """A sparse mask that a transformer class brings.

    Attributes:
        argument: That of its forward which asks for it. Without, attention is dense and tokens are in (t, h, w) order:
            so it is left out, and db-SP's mask takes its place.
        source: Returns the mask of a transformer by its configuration, or None where it is dense.
    """

    argument: str
    source: Callable[[Any], MaskSource | None]


def _num_attention_heads(transformer: Any) -> int:
    return int(transformer.config.num_attention_heads)


@dataclass(frozen=True)
class Architecture:
    """What db-SP must know of a transformer class.

    Attributes:
        attention: Paths of the self-attention modules, in the order of their layers; "*" is each element of a list.
        sequence: Returns the tokens of a forward pass, given the transformer and the pass's arguments by name; raises
            UserError for arguments that db-SP does not know.
        cuts: The tensors that hold tokens.
        text: Place of text in the sequence that is attended over: "first", "last", or None, not in it.
        padded_text: Whether a mask of its self-attention says only which text is padding, which `sequence` leaves out.
        pipeline: Class name of the pipeline that it is usually in, where published checkpoints are known by it.
        heads: Returns the heads of its self-attentions.
        own_mask: The sparse mask that it brings, if any.
        refused: Returns why a transformer of the class cannot be run, or None.
    """

    attention: tuple[str, ...]
    sequence: Callable[[Any, Mapping[str, Any]], TokenSequence]
    cuts: Cuts | DerivedCuts
    text: Streams = None
    padded_text: bool = False
    pipeline: str = ""
    heads: Callable[[Any], int] = _num_attention_heads
    own_mask: OwnMask | None = None
    refused: Callable[[Any], str | None] = lambda transformer: None

    def attentions_of(self, transformer: nn.Module) -> list[nn.Module]:
        """The self-attention of each layer."""
        return [module for path in self.attention for module in modules_at(transformer, path)]

    def blocks_of(self, transformer: nn.Module) -> list[nn.Module]:
        """The block of each layer, of which the self-attention is a part."""
        blocks = (path.rpartition(".")[0] for path in self.attention)
        return [module for path in blocks for module in modules_at(transformer, path)]
