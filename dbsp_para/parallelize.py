"""Sharding a stock diffusers transformer over ranks, its self-attention dual-balanced, by hooks that can be undone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dbsp_core.architectures import Architecture, architecture_of
from dbsp_core.config import ConfigLike, DbspConfig
from dbsp_core.groups import SequenceGroup
from dbsp_core.hosts import Attachment, intercept_self_attention, steps_of
from dbsp_core.session import AttentionSession
from dbsp_core.strategy import Strategy
from dbsp_core.streams import StreamShards
from dbsp_para.seeds import share_seeds

__all__ = ["parallelize_pipe", "parallelize_transformer", "unparallelize"]

_attached: WeakKeyDictionary[nn.Module, tuple[Attachment, AttentionSession]] = WeakKeyDictionary()


def parallelize_pipe(pipe: Any, *, mesh: Any = None, config: ConfigLike = None) -> Any:
    """Parallelizes `pipe.transformer` (see there), and gives calls without a generator the same noise on every rank.

    returns: the pipe
    """
    if getattr(pipe, "transformer_2", None) is not None:
        raise ValueError("db-SP runs pipelines with one transformer, this one has two")
    parallelize_transformer(pipe.transformer, mesh=mesh, config=config, steps=lambda: steps_of(pipe))
    attachment, session = _attached[pipe.transformer]
    share_seeds(pipe, session.group, attachment)
    return pipe


def parallelize_transformer(
    transformer: Any, *, mesh: Any = None, config: ConfigLike = None, steps: Callable[[], int | None] = lambda: None
) -> Any:
    """Shards the sequence over ranks between the first block and the projection, and balances self-attention.

    transformer: a diffusers WanTransformer3DModel or CogVideoXTransformer3DModel
    mesh:        para-attn's device mesh with dimensions (batch, ring, ulysses); default: all ranks, Ulysses alone
    config:      a DbspConfig, a mapping, the path of a YAML file, or None; its strategy overrides the mesh's
    steps:       tells how many denoising steps there will be, for settings that depend on it
    returns:     the transformer
    Raises ValueError for an unknown or already parallelized transformer, or a strategy that does not fit the ranks.
    """
    architecture = architecture_of(transformer)
    if transformer in _attached or getattr(transformer, "_is_parallelized", False):
        raise ValueError("this transformer is parallelized already; undo that first (dbsp_para.unparallelize)")
    config = DbspConfig.load(config)
    group, strategy = _ranks(mesh)
    heads, layers = transformer.config.num_attention_heads, len(architecture.blocks_of(transformer))
    session = AttentionSession(config, group, config.strategy_or(strategy), heads, layers, steps)
    attachment = Attachment()
    _Sharding(transformer, architecture, session).attach(attachment)
    attachment.set_attribute(transformer, "_is_parallelized", True)  # para-attn looks for it
    _attached[transformer] = attachment, session
    return transformer


def unparallelize(pipe: Any) -> None:
    """Undoes `parallelize_pipe`: attributes, hooks and classes are as before. `pipe` may be the transformer itself."""
    attachment, _ = _attached.pop(getattr(pipe, "transformer", pipe), (None, None))
    if attachment is not None:
        attachment.detach()


def _ranks(mesh: Any) -> tuple[SequenceGroup, Strategy]:
    if mesh is None:
        group = SequenceGroup.of()
        return group, Strategy(group.size, 1)
    if mesh["batch"].size() != 1:
        raise ValueError("db-SP shards sequences, not batches; make the mesh with a batch dimension of 1")
    sequence = mesh["ring", "ulysses"]._flatten()
    return SequenceGroup.of(sequence.get_group()), Strategy(mesh["ulysses"].size(), mesh["ring"].size())


class _Sharding:
    """The hooks on one transformer. Text, where it is in the sequence, is a stream of its own, sharded like video."""

    def __init__(self, transformer: Any, architecture: Architecture, session: AttentionSession) -> None:
        self._transformer = transformer
        self._architecture = architecture
        self._session = session
        self._video: StreamShards | None = None
        self._text: StreamShards | None = None

    def attach(self, attachment: Attachment) -> None:
        blocks = self._architecture.blocks_of(self._transformer)
        attachment.hook(self._transformer.register_forward_pre_hook, self._begin, with_kwargs=True)
        _rewrite_inputs(blocks[0], {"hidden_states": self._take_video}, attachment)
        if self._architecture.joint_text:
            _rewrite_inputs(blocks[0], {"encoder_hidden_states": self._take_text}, attachment)
            for block in blocks:
                _rewrite_inputs(block, {"image_rotary_emb": self._take_rotary}, attachment)
        else:
            attachment.hook(self._transformer.rope.register_forward_hook, self._shard_rope)
        for layer, block in enumerate(blocks):
            attend = functools.partial(self._session.attend, layer)
            intercept_self_attention(block.get_submodule("attn1"), attend, attachment)
        attachment.hook(self._transformer.proj_out.register_forward_hook, self._gather)

    @torch.compiler.disable
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        thw, text_tokens = self._architecture.token_grid(module, inputs)
        sample = inputs["hidden_states"]
        home = self._session.begin(thw, text_tokens, inputs.get("timestep"), sample.device)
        self._text = StreamShards(home, self._session.group, 0, text_tokens)
        self._video = StreamShards(home, self._session.group, text_tokens, home.tokens)

    @torch.compiler.disable
    def _take_video(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _require(self._video).take(hidden_states, dim=1)

    @torch.compiler.disable
    def _take_text(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _require(self._text).take(hidden_states, dim=1)

    @torch.compiler.disable
    def _take_rotary(self, tables: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...] | None:
        """tables: cosines and sines, [video tokens, D] each, or None for a model without."""
        return None if tables is None else tuple(_require(self._video).take(table, dim=0) for table in tables)

    @torch.compiler.disable
    def _shard_rope(
        self, module: nn.Module, args: tuple[Any, ...], tables: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """tables: cosines and sines, [1, video tokens, 1, D] each."""
        return tuple(_require(self._video).take(table, dim=1) for table in tables)

    @torch.compiler.disable
    def _gather(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return _require(self._video).gather(output, dim=1)


def _require(shards: StreamShards | None) -> StreamShards:
    if shards is None:
        raise RuntimeError("a block was called outside the transformer's forward pass")
    return shards


def _rewrite_inputs(module: nn.Module, functions: dict[str, Callable[[Any], Any]], attachment: Attachment) -> None:
    """Passes arguments of a module's forward, by name, through functions."""
    signature = inspect.signature(module.forward)

    def rewrite(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = signature.bind(*args, **kwargs)
        for name, function in functions.items():
            call.arguments[name] = function(call.arguments.get(name))
        return call.args, call.kwargs

    attachment.hook(module.register_forward_pre_hook, rewrite, with_kwargs=True)
