"""Makes db-SP known to vLLM-Omni, in every process that loads its plug-ins: `register`, and its undo.

vLLM-Omni 0.30 has a closed list of attention backends, no sign by which a backend says that it communicates itself,
and a split that refuses to pad where there is a ring. So three of its functions are wrapped; see `NAMES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["NAMES", "register", "unregister"]

NAMES = (
    "vllm_omni.diffusion.attention.backends.registry.DiffusionAttentionBackendEnum",
    "vllm_omni.diffusion.attention.layer.Attention",
    "vllm_omni.diffusion.attention.backends.abstract.VideoTokenLayout",
    "vllm_omni.diffusion.attention.selector.get_attn_backend_for_role",
    "vllm_omni.diffusion.models.flux2.flux2_transformer.Flux2Transformer2DModel",
    "vllm_omni.diffusion.models.hunyuan_video.hunyuan_video_15_transformer.HunyuanVideo15Transformer3DModel",
    "vllm_omni.diffusion.models.qwen_image.qwen_image_transformer.QwenImageTransformer2DModel",
    "cache_dit.caching.cache_contexts.cache_manager.CachedContextManager.can_cache",
    "vllm_omni.diffusion.data.AttentionConfig.resolve_with_source",
    "vllm_omni.diffusion.distributed.parallel_state.get_ring_parallel_world_size",
    "vllm_omni.diffusion.distributed.parallel_state.get_sp_group",
    "vllm_omni.diffusion.forward_context.get_forward_context",
    "vllm_omni.diffusion.forward_context.is_forward_context_available",
    "vllm_omni.diffusion.hooks.sequence_parallel.SequenceParallelSplitHook._shard_with_auto_pad",
    "vllm_omni.diffusion.registry._apply_sequence_parallel_if_enabled",
)
"""What is used of vLLM-Omni beyond its backends' interface; tests/engines looks each up."""
_TRANSFORMERS = ("transformer", "transformer_2", "dit", "unet")
_undo: list[Callable[[], None]] = []


def register() -> None:
    """Adds backend DBSP. Nothing changes for models that do not name it. Called again, it does nothing."""
    from aenum import extend_enum
    from vllm_omni.diffusion import registry
    from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
    from vllm_omni.diffusion.hooks.sequence_parallel import SequenceParallelSplitHook

    if _undo:
        return
    if "DBSP" not in DiffusionAttentionBackendEnum.__members__:
        extend_enum(DiffusionAttentionBackendEnum, "DBSP", "dbsp_engines.vllm_omni.DbspBackend")
    _wrap(registry, "_apply_sequence_parallel_if_enabled", _attaching)
    _wrap(SequenceParallelSplitHook, "_shard_with_auto_pad", _padding_with_a_ring)


def unregister() -> None:
    """Takes the wrappers off; the backend's name stays, as a member of an enumeration cannot be removed."""
    while _undo:
        _undo.pop()()


def _wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    stock = getattr(owner, name)
    setattr(owner, name, functools.wraps(stock)(wrapper(stock)))
    _undo.append(lambda: setattr(owner, name, stock))


def _attaching(stock: Callable[..., None]) -> Callable[..., None]:
    def apply(model: Any, od_config: Any) -> None:
        from dbsp_core.masks.steps import StepClock
        from dbsp_engines.vllm_omni import attach

        stock(model, od_config)
        names = getattr(model, "_dit_modules", None) or _TRANSFORMERS
        transformers = [one for one in (getattr(model, name, None) for name in names) if one is not None]
        clock = StepClock(shared=len(transformers) > 1)
        for transformer in transformers:
            attach(transformer, od_config, clock)

    return apply


def _padding_with_a_ring(stock: Callable[..., Any]) -> Callable[..., Any]:
    def shard(hook: Any, *args: Any, **options: Any) -> Any:
        from vllm_omni.diffusion.distributed import parallel_state

        ring = parallel_state.get_ring_parallel_world_size
        if _serves():  # then it is told that there is none
            parallel_state.get_ring_parallel_world_size = lambda: 1
        try:
            return stock(hook, *args, **options)
        finally:
            parallel_state.get_ring_parallel_world_size = ring

    return shard


def _serves() -> bool:
    """Whether self-attention of the running model is DBSP's: to it, padding is no key, in a ring either."""
    from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available

    config = get_forward_context().omni_diffusion_config if is_forward_context_available() else None
    spec = None if config is None else config.diffusion_attention_config.resolve_with_source(role="self")[0]
    return spec is not None and spec.backend.upper() == "DBSP"
