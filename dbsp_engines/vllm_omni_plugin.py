"""Makes db-SP known to vLLM-Omni, in every process that loads its plug-ins: `register`, and its undo.

vLLM-Omni 0.30 has a closed list of attention backends, no sign by which a backend says that it communicates itself,
and a split that refuses to pad where there is a ring. So one list is extended and two functions are wrapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dbsp_core.utils.expected_host import ExpectedHost
from dbsp_core.utils.process import log

__all__ = ["EXPECTED", "register", "unregister"]

_PACKAGE = "vllm_omni.diffusion"
EXPECTED = ExpectedHost(
    "vLLM-Omni",
    package="vllm-omni",
    version="0.30",
    names=(
        f"{_PACKAGE}.attention.backends.abstract:VideoTokenLayout.video_spans",
        f"{_PACKAGE}.attention.backends.registry:DiffusionAttentionBackendEnum",
        f"{_PACKAGE}.attention.layer:Attention._no_parallel_strategy",
        f"{_PACKAGE}.attention.layer:Attention.parallel_strategy",
        f"{_PACKAGE}.attention.layer:Attention.skip_sequence_parallel",
        f"{_PACKAGE}.attention.selector:get_attn_backend_for_role",
        f"{_PACKAGE}.data:AttentionConfig.resolve_with_source",
        f"{_PACKAGE}.distributed.parallel_state:get_ring_parallel_world_size",
        f"{_PACKAGE}.distributed.parallel_state:get_sp_group",
        f"{_PACKAGE}.forward_context:get_forward_context",
        f"{_PACKAGE}.forward_context:is_forward_context_available",
        f"{_PACKAGE}.hooks.sequence_parallel:SequenceParallelSplitHook._shard_with_auto_pad",
        f"{_PACKAGE}.models.flux2.flux2_transformer:Flux2Transformer2DModel",
        f"{_PACKAGE}.models.hunyuan_video.hunyuan_video_15_transformer:HunyuanVideo15Transformer3DModel",
        f"{_PACKAGE}.models.qwen_image.qwen_image_transformer:QwenImageTransformer2DModel",
        f"{_PACKAGE}.registry:_apply_sequence_parallel_if_enabled",
        "cache_dit.caching.cache_contexts.cache_manager:CachedContextManager.can_cache",
    ),
)
_TRANSFORMERS = ("transformer", "transformer_2", "dit", "unet")
_undo: list[Callable[[], None]] = []


def register() -> None:
    """Adds backend DBSP. Nothing changes for models that do not name it. Called again, it does nothing.

    For another vLLM-Omni than expected it only logs a line: vLLM-Omni would stop for models without DBSP too, and
    refuses the name DBSP itself.
    """
    if _undo:
        return
    if problem := EXPECTED.problem():
        log.warning(f"{problem}; attention backend DBSP is not there")
        return
    from aenum import extend_enum
    from vllm_omni.diffusion import registry
    from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
    from vllm_omni.diffusion.hooks.sequence_parallel import SequenceParallelSplitHook

    if "DBSP" not in DiffusionAttentionBackendEnum.__members__:
        extend_enum(DiffusionAttentionBackendEnum, "DBSP", "dbsp_engines.vllm_omni.DbspBackend")
    _wrap(registry, "_apply_sequence_parallel_if_enabled", _attach_all)
    _wrap(SequenceParallelSplitHook, "_shard_with_auto_pad", _pad_with_a_ring)


def unregister() -> None:
    """Takes the wrappers off; the backend's name stays, as a member of an enumeration cannot be removed."""
    while _undo:
        _undo.pop()()


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def wrapped(*args: Any, **options: Any) -> Any:
        return around(stock, *args, **options)

    setattr(owner, name, wrapped)
    _undo.append(lambda: setattr(owner, name, stock))


def _attach_all(stock: Callable[..., None], model: Any, od_config: Any) -> None:
    """Gives each transformer of a pipeline its session, once vLLM-Omni has sharded them."""
    from dbsp_core.masks.steps import StepClock
    from dbsp_engines.vllm_omni import attach

    stock(model, od_config)
    names = getattr(model, "_dit_modules", None) or _TRANSFORMERS
    transformers = [one for one in (getattr(model, name, None) for name in names) if one is not None]
    clock = StepClock(shared=len(transformers) > 1)
    for transformer in transformers:
        attach(transformer, od_config, clock)


def _pad_with_a_ring(stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Pads where there is a ring too, if the running model's self-attention is DBSP's."""
    from vllm_omni.diffusion.distributed import parallel_state

    ring = parallel_state.get_ring_parallel_world_size
    if _serves():  # then it is told that there is none
        parallel_state.get_ring_parallel_world_size = lambda: 1
    try:
        return stock(*args, **options)
    finally:
        parallel_state.get_ring_parallel_world_size = ring


def _serves() -> bool:
    """Whether self-attention of the running model is DBSP's: to it, padding is no key, in a ring either."""
    from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available

    config = get_forward_context().omni_diffusion_config if is_forward_context_available() else None
    spec = None if config is None else config.diffusion_attention_config.resolve_with_source(role="self")[0]
    return spec is not None and spec.backend.upper() == "DBSP"
