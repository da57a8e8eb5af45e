"""One transformer class as data: where self-attention is, and which tensors ranks cut along tokens and gather."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from dbsp_core.layout.sequence_layout import Streams
from dbsp_core.sources import MaskSource
from dbsp_diffusers.models.token_sequence import TokenSequence

Stream = Literal["video", "text", "packed"]
"""Whose tokens: "packed" for all of a model with one packed sequence, in that sequence's order."""


@dataclass(frozen=True)
class ShardSpec:
    """A tensor, or a list or mapping of tensors, of whose tokens a rank keeps its share.

    Attributes:
        stream: Whose tokens. Text after the tokens that count is padding, and is left out.
        dim: The dimension of the tokens.
        ndim: Number of dimensions that a tensor must have to be cut; None: any.
        grid: True if the tokens are along three dimensions, (t, h, w) from `dim` on, which sharding makes one.
        after_text: True if whole text, which stays as it is, precedes the video along `dim`.
    """

    stream: Stream
    dim: int
    ndim: int | None = None
    grid: bool = False
    after_text: bool = False


@dataclass(frozen=True)
class ShardPlan:
    """All cuts of a transformer, like diffusers' `_cp_plan`: modules by path (`modules_at`).

    Attributes:
        inputs: Arguments of each module by name; "" is the transformer itself.
        outputs: Outputs of each module by index.
        gathered: The output of each module that holds a rank's share of the transformer's, and is made whole.
        gathered_early: Outputs of each module by index that are made whole for modules after it, which every rank then
            computes identically.
        gathered_inputs: Arguments that hold a rank's share and are made whole for a module that mixes tokens: every
            rank computes it identically, and its output is sharded again.
        whole: Modules whose output every rank computes whole, and that is the transformer's, or a part of it.
    """

    inputs: Mapping[str, Mapping[str, ShardSpec]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[int, ShardSpec]] = field(default_factory=dict)
    gathered: Mapping[str, ShardSpec] = field(default_factory=dict)
    gathered_early: Mapping[str, Mapping[int, ShardSpec]] = field(default_factory=dict)
    gathered_inputs: Mapping[str, Mapping[str, ShardSpec]] = field(default_factory=dict)
    whole: tuple[str, ...] = ()


VIDEO, TEXT, PACKED = ShardSpec("video", 1), ShardSpec("text", 1), ShardSpec("packed", 1)
"""Tensors [B, tokens, …] of each stream."""
OUTPUT = {"proj_out": VIDEO}
"""The output that most transformers gather."""
STREAMS = {"hidden_states": VIDEO, "encoder_hidden_states": TEXT}
"""Arguments of most blocks whose streams are apart."""
ROTARY = {0: ShardSpec("video", 0), 1: ShardSpec("video", 0)}
"""Outputs of most modules that make rotary tables: cosines and sines [tokens, D]."""
BATCHED_ROTARY = {0: VIDEO, 1: VIDEO}
"""Cosines and sines [B, tokens, …]."""


def modules_at(root: nn.Module, path: str) -> list[nn.Module]:
    """Returns the modules that a path names: "" is the root, "*" each element of a list, "-1" its last one."""
    modules = [root]
    for part in filter(None, path.split(".")):
        parents, modules = modules, []
        for parent in parents:
            if part == "*":
                modules += parent.children()
            elif part == "-1":
                modules += list(parent.children())[-1:]
            else:
                modules.append(parent.get_submodule(part))
    return modules


@dataclass(frozen=True)
class OwnMask:
    """A sparse mask that a transformer class brings.

    Attributes:
        argument: That of its forward which asks for it. Without, attention is dense and tokens are in (t, h, w) order:
            so it is left out, and db-SP's mask takes its place. "" if its attention modules make the mask themselves.
        source: Returns the mask of a transformer by its configuration, or None where it is dense.
        processor: What such modules compute with instead of their own processor, without a mask; None: their own.
    """

    argument: str
    source: Callable[[Any], MaskSource | None]
    processor: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True)
class Architecture:
    """Data that db-SP needs of a transformer class.

    Attributes:
        attention: Paths of the self-attention modules, in the order of their layers; "*" is each element of a list.
        sequence: Returns the tokens of a forward pass, given the transformer and the pass's arguments by name; raises
            UserError for arguments that db-SP does not know.
        shard_plan: The tensors that hold tokens.
        attention_to_video: Paths of cross-attention modules whose queries every rank has whole, such as audio's, and
            whose keys are the video's tokens: each rank attends to its own, and the ranks' outputs are merged.
        skipped_by: Argument that makes the self-attention modules attend to nothing.
        skipped: Returns the layers that may be skipped so, given a pass's arguments by name.
        sizes: Returns the size of each item of a batch by a pass's arguments, where one batch may have items of
            several sizes, such as prompts of different length: those of each size are then run by themselves.
        text: Position of text in the sequence that is attended over: "first", "last", or None, not in it.
        padded_text: True if a mask of its self-attention says only which text is padding, which `sequence` leaves out.
        pipeline: Class name of the pipeline that it is usually in, where published checkpoints are known by it.
        own_mask: The sparse mask that it brings, if any.
        branch_layers: Checkpoints' names, from the block on, of layers of branches that the class lacks: VSA's gate,
            SLA's projection.
        guidance: How diffusers' pipelines run classifier-free guidance: "calls", under `cache_context("cond")` and
            ("uncond"); "batch", both in one batch; or None, in another way or not at all.
        unsupported: Returns why a transformer of the class cannot be run, or None.
    """

    attention: tuple[str, ...]
    sequence: Callable[[Any, Mapping[str, Any]], TokenSequence]
    shard_plan: ShardPlan
    attention_to_video: tuple[str, ...] = ()
    skipped_by: str = ""
    skipped: Callable[[Mapping[str, Any]], Collection[int]] = lambda inputs: ()
    sizes: Callable[[Mapping[str, Any]], Sequence[Hashable]] | None = None
    text: Streams = None
    padded_text: bool = False
    pipeline: str = ""
    own_mask: OwnMask | None = None
    branch_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    guidance: Literal["calls", "batch"] | None = None
    unsupported: Callable[[Any], str | None] = lambda transformer: None

    def attentions_of(self, transformer: nn.Module) -> list[nn.Module]:
        """Returns the self-attention of each layer."""
        return [module for path in self.attention for module in modules_at(transformer, path)]

    def attentions_to_video_of(self, transformer: nn.Module) -> list[nn.Module]:
        """Returns the modules by which whole sequences attend to the video."""
        return [module for path in self.attention_to_video for module in modules_at(transformer, path)]

    def blocks_of(self, transformer: nn.Module) -> list[nn.Module]:
        """Returns the block of each layer, of which the self-attention is a part."""
        blocks = (path.rpartition(".")[0] for path in self.attention)
        return [module for path in blocks for module in modules_at(transformer, path)]


def heads_of(attention: nn.Module) -> int:
    """Returns the number of heads of an attention module, by any of diffusers' names for it."""
    numbers = (getattr(attention, name, None) for name in ("heads", "num_heads", "n_heads"))
    return next(heads for heads in numbers if isinstance(heads, int))
