"""Attaching db-SP to a pipeline whose transformer is xfuser's Wan wrapper, and detaching it without a trace."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from dbsp_core.config import ConfigLike, DbspConfig
from dbsp_core.groups import SequenceGroup
from dbsp_core.hosts import Attachment, patch_tokens, steps_of, unpatch_tokens
from dbsp_core.pipe_reports import report_calls
from dbsp_core.session import AttentionSession
from dbsp_xdit.flags import strategy_from

__all__ = ["attach", "detach", "session_of"]

_attached: WeakKeyDictionary[Any, tuple[Attachment, AttentionSession]] = WeakKeyDictionary()


def attach(pipe: Any, config: ConfigLike = None) -> AttentionSession:
    """Makes the self-attention of `pipe.transformer` dual-balanced, on xfuser's sequence-parallel group.

    pipe:   a diffusers pipeline with an xFuserWanTransformer3DWrapper, after xfuser's groups were initialised
    config: a DbspConfig, a mapping, the path of a YAML file, or None for the defaults
    Raises ValueError for a transformer db-SP does not know, one that has it already, or a strategy that does not fit.
    """
    from xfuser.core.distributed import (
        get_ring_parallel_world_size,
        get_sp_group,
        get_ulysses_parallel_world_size,
    )

    config = DbspConfig.load(config)
    transformer = pipe.transformer
    _require_wan(pipe)
    if transformer in _attached:
        raise ValueError("db-SP is attached to this transformer already; call dbsp_xdit.detach(pipe) first")
    strategy = strategy_from(config, get_ulysses_parallel_world_size(), get_ring_parallel_world_size())
    group = SequenceGroup.of(get_sp_group().device_group)
    heads, layers = transformer.config.num_attention_heads, len(transformer.blocks)
    session = AttentionSession(config, group, strategy, heads, layers, lambda: steps_of(pipe))
    attachment = Attachment()
    attachment.hook(transformer.register_forward_pre_hook, _Begin(session), with_kwargs=True)
    for layer, block in enumerate(transformer.blocks):
        attachment.set_attribute(block.attn1.processor, "attention_function", LayerAttention(session, layer))
    if config.home_layout != "contiguous" and (
        strategy is None or strategy.ring > 1
    ):  # Ulysses alone has nothing to lay out
        _lay_out(transformer, session, attachment)
    attachment.hook(transformer.register_forward_hook, _End(session, len(transformer.blocks)))
    report_calls(pipe, session, attachment, "xdit")
    _attached[transformer] = attachment, session
    return session


def detach(pipe: Any) -> None:
    """Undoes `attach`: attributes, hooks and classes are as before. Nothing happens where nothing is attached."""
    attachment, _ = _attached.pop(pipe.transformer, (None, None))
    if attachment is not None:
        attachment.detach()


def session_of(pipe: Any) -> AttentionSession | None:
    """The session attached to a pipeline's transformer, if any."""
    transformer = getattr(pipe.transformer, "_orig_mod", pipe.transformer)  # as torch.compile wraps it
    return _attached.get(transformer, (None, None))[1]


def _require_wan(pipe: Any) -> None:
    from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

    if not isinstance(pipe.transformer, xFuserWanTransformer3DWrapper):
        raise ValueError(
            f"db-SP knows xFuserWanTransformer3DWrapper in xDiT, not {type(pipe.transformer).__name__}; load the "
            "transformer with that class, or use --sp-backend usp"
        )
    if getattr(pipe, "transformer_2", None) is not None:
        raise ValueError("db-SP runs pipelines with one transformer, this one has two; use --sp-backend usp")


class LayerAttention:
    """Stands in for xfuser's USP in one layer's self-attention."""

    def __init__(self, session: AttentionSession, layer: int) -> None:
        self._session = session
        self._layer = layer

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """query, key, value: [B, H, shard, D]; xfuser's options choose among backends that are not used here."""
        return self._session.attend(self._layer, query, key, value)


class _Begin:
    """Before each forward pass: tells the session the size of the video."""

    def __init__(self, session: AttentionSession) -> None:
        self._session = session

    @torch.compiler.disable
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sample = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        timestep = kwargs.get("timestep", args[1] if len(args) > 1 else None)
        self._session.begin(_token_grid(sample, module.config.patch_size), 0, timestep, sample.device)


class _End:
    """After each forward pass: every layer's attention must have come by."""

    def __init__(self, session: AttentionSession, layers: int) -> None:
        self._session = session
        self._layers = layers

    @torch.compiler.disable
    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        missed = self._layers - self._session.end()
        if missed:
            raise RuntimeError(
                f"{missed} of {self._layers} self-attentions did not reach db-SP; something replaced their processors"
            )


def _token_grid(sample: torch.Tensor, patch: tuple[int, int, int]) -> tuple[int, int, int]:
    frames, height, width = (size // p for size, p in zip(sample.shape[2:], patch, strict=True))
    return frames, height, width


def _lay_out(transformer: Any, session: AttentionSession, attachment: Attachment) -> None:
    """Shards the sequence in the home layout's order: tokens and rotary table permuted on the way in, undone on the
    way out. xfuser cuts the sequence into equal shards itself, so only the order is ours to choose."""
    patch = transformer.config.patch_size

    def order(device: torch.device) -> torch.Tensor:
        return torch.from_numpy(session.home.order).to(device)

    @torch.compiler.disable
    def permute_tokens(module: Any, args: tuple[Any, ...], embedded: torch.Tensor) -> torch.Tensor:
        return embedded.flatten(2)[:, :, order(embedded.device)].view_as(embedded)

    @torch.compiler.disable
    def permute_rope(module: Any, args: tuple[Any, ...], tables: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(table[:, order(table.device)] for table in tables)

    @torch.compiler.disable
    def restore(module: Any, args: tuple[Any, ...], output: Any) -> Any:
        sample = output[0]
        tokens = patch_tokens(sample, patch)
        restored = torch.empty_like(tokens)
        restored[:, order(tokens.device)] = tokens
        whole = unpatch_tokens(restored, sample, patch)
        return (whole,) if isinstance(output, tuple) else type(output)(sample=whole)

    attachment.hook(transformer.patch_embedding.register_forward_hook, permute_tokens)
    attachment.hook(transformer.rope.register_forward_hook, permute_rope)
    attachment.hook(transformer.register_forward_hook, restore)
