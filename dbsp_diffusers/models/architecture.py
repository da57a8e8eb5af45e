"""One transformer class, as data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from dbsp_core.layout.sequence_layout import Streams
from dbsp_core.sources import MaskSource
from dbsp_diffusers.models.cuts import Cuts, DerivedCuts, modules_at
from dbsp_diffusers.models.token_sequence import TokenSequence

__all__ = ["Architecture", "OwnMask", "heads_of"]


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


@dataclass(frozen=True)
class Architecture:
    """What db-SP must know of a transformer class.

    Attributes:
        attention: Paths of the self-attention modules, in the order of their layers; "*" is each element of a list.
        sequence: Returns the tokens of a forward pass, given the transformer and the pass's arguments by name; raises
            UserError for arguments that db-SP does not know.
        cuts: The tensors that hold tokens.
        attention_to_video: Paths of cross-attention modules whose queries every rank has whole, such as audio's, and
            whose keys are the video's tokens: each rank attends to its own, and the ranks' outputs are merged.
        skipped_by: Argument of the self-attention modules by which they may be told to attend to nothing.
        skipped: Returns the layers that may be told so, given a pass's arguments by name.
        text: Place of text in the sequence that is attended over: "first", "last", or None, not in it.
        padded_text: Whether a mask of its self-attention says only which text is padding, which `sequence` leaves out.
        pipeline: Class name of the pipeline that it is usually in, where published checkpoints are known by it.
        own_mask: The sparse mask that it brings, if any.
        gate_names: What checkpoints call the layer of VSA's gate, from the block on, where the class lacks it.
        guidance: How diffusers' pipelines run classifier-free guidance: "calls", under `cache_context("cond")` and
            ("uncond"); "batch", both in one batch; or None, in another way or not at all.
        refused: Returns why a transformer of the class cannot be run, or None.
    """

    attention: tuple[str, ...]
    sequence: Callable[[Any, Mapping[str, Any]], TokenSequence]
    cuts: Cuts | DerivedCuts
    attention_to_video: tuple[str, ...] = ()
    skipped_by: str = ""
    skipped: Callable[[Mapping[str, Any]], Collection[int]] = lambda inputs: ()
    text: Streams = None
    padded_text: bool = False
    pipeline: str = ""
    own_mask: OwnMask | None = None
    gate_names: tuple[str, ...] = ()
    guidance: Literal["calls", "batch"] | None = None
    refused: Callable[[Any], str | None] = lambda transformer: None

    def attentions_of(self, transformer: nn.Module) -> list[nn.Module]:
        """The self-attention of each layer."""
        return [module for path in self.attention for module in modules_at(transformer, path)]

    def attentions_to_video_of(self, transformer: nn.Module) -> list[nn.Module]:
        """The modules by which whole sequences attend to the video."""
        return [module for path in self.attention_to_video for module in modules_at(transformer, path)]

    def blocks_of(self, transformer: nn.Module) -> list[nn.Module]:
        """The block of each layer, of which the self-attention is a part."""
        blocks = (path.rpartition(".")[0] for path in self.attention)
        return [module for path in blocks for module in modules_at(transformer, path)]


def heads_of(attention: nn.Module) -> int:
    """The number of heads of an attention module, by whichever of diffusers' names its class has for it."""
    found = (getattr(attention, name, None) for name in ("heads", "num_heads", "n_heads"))
    return next(heads for heads in found if isinstance(heads, int))
