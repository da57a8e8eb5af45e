"""Sharding a stock diffusers transformer over ranks, its self-attention dual-balanced, by hooks that can be undone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dbsp_core.architectures import architecture_of
from dbsp_core.hosts import Attachment, intercept_self_attention
from dbsp_core.session import AttentionSession
from dbsp_core.streams import StreamShards

__all__ = ["shard_transformer"]


def shard_transformer(transformer: nn.Module, session: AttentionSession, attachment: Attachment) -> None:
    """Shards the sequence over the session's ranks between the first block and the projection.

    Every rank is given the whole input and returns the whole output. Text, where it is in the sequence, is a stream of
    its own, sharded like video. Raises ValueError for a transformer that db-SP does not know.
    """
    _SequenceSharding(transformer, session).attach(attachment)


class _SequenceSharding:
    """The hooks on one transformer."""

    def __init__(self, transformer: nn.Module, session: AttentionSession) -> None:
        self._transformer = transformer
        self._architecture = architecture_of(transformer)
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
            attachment.hook(self._transformer.get_submodule("rope").register_forward_hook, self._shard_rope)
        for layer, block in enumerate(blocks):
            attend = functools.partial(self._session.attend, layer)
            intercept_self_attention(block.get_submodule("attn1"), attend, attachment)
        attachment.hook(self._transformer.get_submodule("proj_out").register_forward_hook, self._gather)

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
