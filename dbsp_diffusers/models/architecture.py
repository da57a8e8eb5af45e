"""One transformer class, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from dbsp_core.layout.sequence_layout import Streams
from dbsp_diffusers.models.cuts import Cuts, DerivedCuts, modules_at
from dbsp_diffusers.models.token_sequence import TokenSequence

__all__ = ["Architecture"]


@dataclass(frozen=True)
class Architecture:
    """What db-SP must know of a transformer class. Its self-attentions have `config.num_attention_heads` heads.

    Attributes:
        attention: Paths of the self-attention modules, in the order of their layers; "*" is each element of a list.
        sequence: Returns the tokens of a forward pass, given the transformer and the pass's arguments by name; raises
            UserError for arguments that db-SP does not know.
        cuts: The tensors that hold tokens.
        text: Place of text in the sequence that is attended over: "first", "last", or None, not in it.
        padded_text: Whether a mask of its self-attention says only which text is padding, which `sequence` leaves out.
        pipeline: Class name of the pipeline that it is usually in, where published checkpoints are known by it.
        refused: Returns why a transformer of the class cannot be run, or None.
    """

    attention: tuple[str, ...]
    sequence: Callable[[Any, Mapping[str, Any]], TokenSequence]
    cuts: Cuts | DerivedCuts
    text: Streams = None
    padded_text: bool = False
    pipeline: str = ""
    refused: Callable[[Any], str | None] = lambda transformer: None

    def attentions_of(self, transformer: nn.Module) -> list[nn.Module]:
        """The self-attention of each layer."""
        return [module for path in self.attention for module in modules_at(transformer, path)]

    def blocks_of(self, transformer: nn.Module) -> list[nn.Module]:
        """The block of each layer, of which the self-attention is a part."""
        blocks = (path.rpartition(".")[0] for path in self.attention)
        return [module for path in blocks for module in modules_at(transformer, path)]
