"""Registers db-SP with vLLM-Omni in every process that loads its plug-ins: `register` and `unregister`.

vLLM-Omni 0.30 has a closed list of attention backends, no flag for backends that communicate themselves, a split that
pads for some models only and never in a ring, and a contract of FastH3 that allows one backend by name. So this
extends the list and wraps these functions.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

from dbsp_core.runtime.engine_session import CONFIG_VARIABLE
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.expected_host import ExpectedHost
from dbsp_core.utils.process import log

_PACKAGE = "vllm_omni.diffusion"
EXPECTED = ExpectedHost(
    "vLLM-Omni",
    package="vllm-omni",
    version="0.30",
    names=(
        f"{_PACKAGE}.attention.backends.abstract:VideoTokenLayout.video_spans",
        f"{_PACKAGE}.attention.backends.registry:DiffusionAttentionBackendEnum",
        f"{_PACKAGE}.attention.layer:Attention.skip_sequence_parallel",
        f"{_PACKAGE}.attention.selector:get_attn_backend_for_role",
        f"{_PACKAGE}.data:AttentionConfig.resolve_with_source",
        f"{_PACKAGE}.distributed.parallel_state:get_ring_parallel_world_size",
        f"{_PACKAGE}.distributed.parallel_state:get_sp_group",
        f"{_PACKAGE}.forward_context:ForwardContext.sp_original_seq_len",
        f"{_PACKAGE}.forward_context:get_forward_context",
        f"{_PACKAGE}.forward_context:is_forward_context_available",
        f"{_PACKAGE}.hooks.sequence_parallel:SequenceParallelSplitHook._prepare_sp_input",
        f"{_PACKAGE}.models.ltx2.ltx2_transformer:_LTX2ParallelAttention.ltx_sp_mode",
        f"{_PACKAGE}.models.minimax_h3.fasth3:FastH3WeightFusion.check_serving_contract",
        f"{_PACKAGE}.models.minimax_h3.fasth3_checkpoint:FastH3CheckpointSpec.check_serving_contract",
        f"{_PACKAGE}.registry:_apply_sequence_parallel_if_enabled",
        f"{_PACKAGE}.registry:_prepare_diffusion_quant_config",
        "cache_dit.caching.cache_contexts.cache_manager:CachedContextManager.can_cache",
    ),
)
_TRANSFORMERS = ("transformer", "transformer_2", "dit", "unet")
_undo: dict[tuple[Any, str], Callable[[], None]] = {}  # undo functions by owner and name of the wrapped function


def register() -> None:
    """Adds backend DBSP, once; models that do not name it are unaffected.

    Only warns about an unsupported vLLM-Omni, as an error would stop models without DBSP; it rejects the name DBSP.
    """
    if _undo:
        return
    if problem := EXPECTED.problem():
        log.warning(f"{problem}; attention backend DBSP is unavailable")
        return
    from aenum import extend_enum
    from vllm_omni.diffusion import registry
    from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
    from vllm_omni.diffusion.hooks.sequence_parallel import SequenceParallelSplitHook

    if "DBSP" not in DiffusionAttentionBackendEnum.__members__:
        extend_enum(DiffusionAttentionBackendEnum, "DBSP", "dbsp_engines.vllm_omni.DbspBackend")
    _wrap(registry, "_apply_sequence_parallel_if_enabled", _attach_all)
    _wrap(SequenceParallelSplitHook, "_prepare_sp_input", _shard)
    _wrap(registry, "_prepare_diffusion_quant_config", _before_pipeline)


def unregister() -> None:
    """Removes the wrappers; the backend's name stays, since enum members cannot be removed."""
    while _undo:
        _undo.popitem()[1]()


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Wraps a function once, since a process may make several pipelines."""
    if (owner, name) in _undo:
        return
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def wrapped(*args: Any, **options: Any) -> Any:
        return around(stock, *args, **options)

    setattr(owner, name, wrapped)
    _undo[owner, name] = lambda: setattr(owner, name, stock)


def _before_pipeline(stock: Callable[..., None], od_config: Any, model_class: type) -> None:
    """Wraps FastH3's contracts before making a MiniMax-H3 pipeline, when their modules are imported."""
    stock(od_config, model_class)
    if _names_dbsp(od_config) and "minimax_h3" in model_class.__module__:
        from vllm_omni.diffusion.models.minimax_h3.fasth3 import FastH3WeightFusion
        from vllm_omni.diffusion.models.minimax_h3.fasth3_checkpoint import FastH3CheckpointSpec

        for contract in (FastH3CheckpointSpec, FastH3WeightFusion):
            _wrap(contract, "check_serving_contract", _check_fasth3)


def _attach_all(stock: Callable[..., None], model: Any, od_config: Any) -> None:
    """Gives each transformer of a pipeline its session, after vLLM-Omni has sharded it."""
    from dbsp_core.masks.steps import StepClock
    from dbsp_engines.vllm_omni import attach

    stock(model, od_config)
    names = getattr(model, "_dit_modules", None) or _TRANSFORMERS
    transformers = {name: transformer for name in names if (transformer := getattr(model, name, None)) is not None}
    clock = StepClock(shared=len(transformers) > 1)
    for name, transformer in transformers.items():
        attach(transformer, od_config, clock, name)


def _shard(stock: Callable[..., Any], hook: Any, tensor: Any, part: Any, *args: Any, **options: Any) -> Any:
    """Pads any length that a plan (`_sp_plan`) cuts, also in a ring, if the running model uses DBSP."""
    from vllm_omni.diffusion.distributed import parallel_state
    from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available() or not _names_dbsp(get_forward_context().omni_diffusion_config):
        return stock(hook, tensor, part, *args, **options)
    if hasattr(part, "auto_pad"):
        part = dataclasses.replace(part, auto_pad=True)
    ring = parallel_state.get_ring_parallel_world_size
    parallel_state.get_ring_parallel_world_size = lambda: 1  # DBSP never attends to padding
    try:
        return stock(hook, tensor, part, *args, **options)
    finally:
        parallel_state.get_ring_parallel_world_size = ring


def _check_fasth3(stock: Callable[..., None], contract: Any, *, od_config: Any, **options: Any) -> None:
    """Accepts DBSP and rings for students trained with VSA, if the mask is VSA with its coarse branch."""
    if _names_dbsp(od_config):
        from dbsp_core.config import DbspConfig
        from dbsp_core.sources import VsaSource

        mask = DbspConfig.load(os.environ.get(CONFIG_VARIABLE)).mask
        if getattr(contract, "requires_vsa", True) and not (isinstance(mask, VsaSource) and mask.coarse):
            raise UserError(f"this FastH3 was trained with VSA; set {CONFIG_VARIABLE}=vsa:sparsity=0.8")
        od_config = copy.copy(od_config)
        od_config.diffusion_attention_config = od_config.parallel_config = None
        od_config.diffusion_attention_backend = "FASTVIDEO_VSA"
    stock(contract, od_config=od_config, **options)


def _names_dbsp(config: Any) -> bool:
    """Returns True if this configuration uses DBSP for self-attention."""
    spec = None if config is None else config.diffusion_attention_config.resolve_with_source(role="self")[0]
    return spec is not None and spec.backend.upper() == "DBSP"
