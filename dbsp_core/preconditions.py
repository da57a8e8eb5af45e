"""What must be true of a diffusers transformer before its sequence can be sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

__all__ = ["require_shardable"]

_NATIVE = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")
"""diffusers' attention backends that call torch's scaled_dot_product_attention, where db-SP takes its place."""


def require_shardable(transformer: nn.Module, self_attentions: Sequence[nn.Module]) -> None:
    """Raises ValueError, naming the fix, for a transformer that something else shards, or whose self-attention goes
    past torch's."""
    if getattr(transformer, "_is_parallelized", False):
        raise ValueError(
            "this transformer is parallelized already; undo that first (dbsp_para.unparallelize), or load it anew "
            "where para-attn did it, which cannot undo it"
        )
    processors = [getattr(attention, "processor", None) for attention in self_attentions]
    if any(getattr(part, "_parallel_config", None) is not None for part in (transformer, *processors)):
        raise ValueError("this transformer is parallelized by diffusers (enable_parallelism); load it without that")
    for backend in map(_backend, processors):
        if backend not in (None, *_NATIVE):
            raise ValueError(
                f"this transformer attends with backend {backend!r}, past db-SP; call "
                'transformer.set_attention_backend("native")'
            )


def _backend(processor: Any) -> str | None:
    """The attention backend of a processor that goes by diffusers' choice of backends; None for one that does not."""
    if not hasattr(processor, "_attention_backend"):
        return None
    backend = processor._attention_backend
    if backend is None:
        from diffusers.models import attention_dispatch

        backend = attention_dispatch._AttentionBackendRegistry.get_active_backend()[0]
    return str(getattr(backend, "value", backend))
