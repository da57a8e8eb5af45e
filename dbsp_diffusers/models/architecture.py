"""Description of a transformer class as data: self-attention modules, and tensors to shard and gather."""

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
"""Which tokens; "packed": all tokens of a model with one packed sequence, in its order."""


@dataclass(frozen=True)
class ShardSpec:
    """A tensor (or list or mapping of tensors) of which a rank keeps its tokens."""

    stream: Stream  # which tokens; text padding is dropped
    dim: int  # dimension of tokens
    ndim: int | None = None  # required number of dimensions (other tensors are not cut); None: any
    grid: bool = False  # True if tokens have three dimensions (t, h, w) from `dim` on, which are flattened
    after_text: bool = False  # True if unsharded text precedes the video along `dim`


@dataclass(frozen=True)
class ShardPlan:
    """Tensors of a transformer to shard and gather, by module path (`modules_at`), like diffusers' `_cp_plan`.

    Attributes:
        inputs: Arguments to shard, by module and name; "" is the transformer itself.
        outputs: Outputs to shard, by module and index.
        gathered: Modules whose output is a shard of the transformer's output and is gathered.
        gathered_early: Outputs to gather, by module and index, for later modules that every rank computes identically.
        gathered_inputs: Arguments to gather for a module that mixes tokens, which every rank computes identically; its
            output is sharded again.
        whole: Modules whose output is computed on every rank and is (part of) the transformer's output.
    """

    inputs: Mapping[str, Mapping[str, ShardSpec]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[int, ShardSpec]] = field(default_factory=dict)
    gathered: Mapping[str, ShardSpec] = field(default_factory=dict)
    gathered_early: Mapping[str, Mapping[int, ShardSpec]] = field(default_factory=dict)
    gathered_inputs: Mapping[str, Mapping[str, ShardSpec]] = field(default_factory=dict)
    whole: tuple[str, ...] = ()


VIDEO, TEXT, PACKED = ShardSpec("video", 1), ShardSpec("text", 1), ShardSpec("packed", 1)
"""Tensors [B, tokens, …] of each stream."""
OUTPUT = {"proj_out": VIDEO}  # output to gather in most transformers
STREAMS = {"hidden_states": VIDEO, "encoder_hidden_states": TEXT}  # arguments of most two-stream blocks
ROTARY = {0: ShardSpec("video", 0), 1: ShardSpec("video", 0)}
"""Outputs of most rotary embedding modules: cosines and sines [tokens, D]."""
BATCHED_ROTARY = {0: VIDEO, 1: VIDEO}  # cosines and sines [B, tokens, …]


def modules_at(root: nn.Module, path: str) -> list[nn.Module]:
    """Returns the modules at a path: "" is the root, "*" each element of a list, "-1" the last."""
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
    """A sparse mask built into a transformer class.

    db-SP drops the argument that requests it (attention is then dense in (t, h, w) order), and applies its own.
    """

    argument: str  # of forward, which requests the mask; "" if attention modules make the mask themselves
    source: Callable[[Any], MaskSource | None]  # returns a transformer's equivalent mask source, or None if dense
    processor: Callable[..., torch.Tensor] | None = None  # of such modules, without a mask; None: keep theirs


@dataclass(frozen=True)
class Architecture:
    """Description of a transformer class."""

    attention: tuple[str, ...]  # paths of the self-attention modules in layer order; "*" is each element of a list
    sequence: Callable[[Any, Mapping[str, Any]], TokenSequence]
    """Returns the tokens of a forward pass from the transformer and the pass's arguments by name; raises UserError for
    unsupported arguments."""
    shard_plan: ShardPlan  # the tensors to shard and gather
    attention_to_video: tuple[str, ...] = ()
    """Paths of cross-attention modules with replicated queries (such as audio) and the video's tokens as keys: each
    rank attends to its own keys, and outputs are merged."""
    skipped_by: str = ""  # argument that makes self-attention modules skip attention
    skipped: Callable[[Mapping[str, Any]], Collection[int]] = lambda inputs: ()  # layers that a pass may skip
    sizes: Callable[[Mapping[str, Any]], Sequence[Hashable]] | None = None
    """Returns the size of each batch item from a pass's arguments, if items may differ in size (such as prompt
    length); items of each size then run separately."""
    text: Streams = None  # position of text in the attended sequence: "first", "last", or None (not in it)
    padded_text: bool = False  # True if the self-attention mask only marks text padding, which `sequence` drops
    pipeline: str = ""  # class name of its usual pipeline, by which published checkpoints are known
    own_mask: OwnMask | None = None  # its built-in sparse mask, if any
    branch_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names in checkpoints (relative to the block) of branch layers that the class lacks: VSA's gate, SLA's
    projection."""
    guidance: Literal["calls", "batch"] | None = None
    """How diffusers runs classifier-free guidance: "calls" under `cache_context("cond")` and ("uncond"); "batch", both
    in one batch; None: differently or not at all."""
    unsupported: Callable[[Any], str | None] = lambda transformer: None  # why a transformer cannot run, or None

    def attentions_of(self, transformer: nn.Module) -> list[nn.Module]:
        """Returns the self-attention of each layer."""
        return [module for path in self.attention for module in modules_at(transformer, path)]

    def blocks_of(self, transformer: nn.Module) -> list[nn.Module]:
        """Returns the block that contains each layer's self-attention."""
        blocks = (path.rpartition(".")[0] for path in self.attention)
        return [module for path in blocks for module in modules_at(transformer, path)]


def heads_of(attention: nn.Module) -> int:
    """Returns the number of heads of an attention module, under any of diffusers' names."""
    numbers = (getattr(attention, name, None) for name in ("heads", "num_heads", "n_heads"))
    return next(heads for heads in numbers if isinstance(heads, int))
