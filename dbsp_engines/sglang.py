"""Hooks on SGLang Diffusion: self-attention passes this rank's shard to the transformer's session.

SGLang has a closed list of attention backends, but lets third parties hook functions by name. Each worker calls
`register` (entry point `sglang.multimodal_gen.plugins`) and installs the hooks. Hooked layers whose kernel is a
`DbspImpl` (set by `attach`) call it with their rank's tokens instead of exchanging them. Hooks import lazily, because
SGLang forbids earlier imports.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.steps import StepClock
from dbsp_core.runtime.engine_session import CONFIG_VARIABLE, EngineSession
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.expected_host import ExpectedHost
from dbsp_engines.sglang_attention import INSTEAD, DbspImpl, DbspTransformer, ltx2_step, name_of

_SESSION = "_dbsp_transformer"  # attribute of a transformer with its session
_SUPPORTED = "db-SP supports SGLang's own transformers with one self-attention per block"


def _make_attention(original: Callable[..., None], attention: Any, *args: Any, **options: Any) -> None:
    """Wraps USPAttention.__init__, which rejects rings for kernels without LSE; db-SP's kernel may replace them."""
    try:
        original(attention, *args, **options)
    except RuntimeError as error:
        original(attention, *args, **options | {"skip_sequence_parallel": True})
        attention.skip_sequence_parallel, attention._dbsp_problem = False, error


def _attend(original: Callable[..., Any], attention: Any, *args: Any, **options: Any) -> Any:
    """Wraps USPAttention.forward and UlyssesAttention_VSA.forward."""
    kernel = attention.attn_impl
    return kernel.attend(*args, **options) if isinstance(kernel, DbspImpl) else original(attention, *args, **options)


def _attend_ltx2(original: Callable[..., Any], module: Any, *args: Any, **options: Any) -> Any:
    """Wraps LTX2Attention.forward: db-SP's layout covers the padding that masks hide, and exchanges keys itself."""
    if isinstance(module.attn.attn_impl, DbspImpl):
        if options.pop("context_replicated_prefix_len", 0):
            raise UserError(f"this LTX-2 has a memory of earlier frames, which db-SP does not support; {INSTEAD}")
        options |= {"mask": None, "gather_context_kv_for_sp": False}
    return original(module, *args, **options)


def _attend_packed(original: Callable[..., torch.Tensor], attention: Any, *args: Any, **options: Any) -> torch.Tensor:
    """Wraps MiniMax-H3's function that exchanges and attends, to skip its exchange for db-SP's kernel."""
    if isinstance(attention._attention_impl, DbspImpl):
        options |= {"ulysses_active": False, "ring_active": False}
    return original(attention, *args, **options)


def _note_runs(original: Callable[..., Any], *, model: Any, packed: Any, **options: Any) -> Any:
    """Wraps MiniMax-H3's preparation for VSA, to read the tokens of each kind before the video."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3.stages import denoising

    transformer: DbspTransformer | None = getattr(model, _SESSION, None)
    if transformer is not None:
        text, audio, target = (int(packed[name].numel()) for name in ("text_pos", "audio_pos", "img_pos"))
        transformer.runs = (text, target - int(packed["update_mask"].sum()), audio)
        if options["is_ref2va"]:
            segments = denoising._ref2va_vsa_segments(packed, options["latent_shape"], model.arch.patch_size)
            transformer.runs = tuple(n if isinstance(n, int) else math.prod(n) for n in segments[:-1])
    return original(model=model, packed=packed, **options)


def _denoise_ltx2(original: Callable[..., None], stage: Any, ctx: Any, step: Any, batch: Any, *args: Any) -> None:
    """Wraps a step of LTX-2 (one or two stages), to pass the request and the stage's grid to its forward passes."""
    h, w = ctx.latent_height, ctx.latent_width
    token = ltx2_step.set((batch, (int(batch.raw_latent_shape[1]) // (h * w), h, w)))
    try:
        original(stage, ctx, step, batch, *args)
    finally:
        ltx2_step.reset(token)


def _compute_together(original: Callable[..., bool], model: Any, **options: Any) -> bool:
    """Wraps TeaCache's decision, which uses a rank's timesteps, so that all ranks skip a pass or none. Collective."""
    from sglang.multimodal_gen.runtime.distributed.parallel_state import get_tp_group

    computes, transformer = original(model, **options), getattr(model, _SESSION, None)
    if transformer is None:
        return computes
    skips = transformer.session.all_agree(not computes)
    if get_tp_group().world_size > 1:  # sessions do not span tensor-parallel ranks
        group = SequenceGroup.from_group(get_tp_group().device_group)
        skips = all(vote for (vote,) in group.gather_integers([skips]))
    return not skips


def _attach_pipeline(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Wraps build_pipeline, called once per worker, to make a session for each transformer. Collective.

    Raises UserError on all ranks for an unsupported transformer, which SGLang would run dense.
    """
    from sglang.multimodal_gen.runtime.disaggregation.roles import RoleType
    from sglang.multimodal_gen.runtime.loader.component_loaders.transformer_loader import TransformerLoader
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    pipeline = original(*args, **options)
    kinds = tuple(TransformerLoader.component_names)
    transformers = {name: module for name, module in pipeline.modules.items() if name.startswith(kinds)}
    role = getattr(get_global_server_args(), "disagg_role", RoleType.MONOLITHIC)
    if not transformers and role in (RoleType.MONOLITHIC, RoleType.DENOISER):
        raise UserError(f"{_SUPPORTED}, got {type(pipeline).__name__}; {INSTEAD}")
    clock = StepClock(shared=len(transformers) > 1)
    for name, transformer in transformers.items():
        attach(transformer, name, clock)
    for part in filter(lambda part: isinstance(part, torch.nn.Module), pipeline.modules.values()):
        for layer in part.modules():
            if hasattr(layer, "_dbsp_problem") and not isinstance(layer.attn_impl, DbspImpl):
                raise layer._dbsp_problem
    return pipeline


def attach(module: Any, name: str = "transformer", clock: StepClock | None = None) -> None:
    """Gives a transformer its session. Collective. Raises UserError on all ranks if it is not supported.

    `name` is its name in the pipeline, `clock` the step clock of all its transformers. None: one transformer.
    """
    from sglang.multimodal_gen.runtime.distributed.parallel_state import (
        get_ring_parallel_world_size,
        get_sp_group,
        get_tp_group,
        get_ulysses_parallel_world_size,
    )
    from sglang.multimodal_gen.runtime.models.dits.minimax_h3 import MiniMaxH3DiTModel
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    # 1. Attentions, and unsupported settings
    settings, is_h3 = get_global_server_args(), isinstance(module, MiniMaxH3DiTModel)
    layers = _attentions_of_h3(module) if is_h3 else _attentions_of(module)
    if getattr(settings, "kv_gather_degree", 1) > 1 and not getattr(settings, "sp_split_auto", False):
        raise UserError(
            "db-SP does not support K/V gathering; use --ulysses-degree or --ring-degree instead of --kv-gather-degree"
        )
    # 2. Session of the ranks that share a sequence; under tensor parallelism they have the same heads
    strategy = Strategy(get_ulysses_parallel_world_size(), get_ring_parallel_world_size())
    ranks = get_sp_group()
    group = SequenceGroup.from_group(ranks.device_group) if ranks.world_size > 1 else SequenceGroup(0, 1)
    heads, head_slice = layers[0].num_heads, None
    if get_tp_group().world_size > 1:
        all_heads = getattr(module, "num_attention_heads", None) or module.config.num_attention_heads
        head_slice = None if heads == all_heads else (get_tp_group().rank_in_group * heads, all_heads)
    session = EngineSession(group, strategy, heads, len(layers), clock=clock, transformer=name, head_slice=head_slice)
    transformer = DbspTransformer(module, session)
    setattr(module, _SESSION, transformer)
    # 3. Kernels
    for index, layer in enumerate(layers):
        (_set_kernel_of_h3 if is_h3 else _set_kernel)(layer, DbspImpl(layer.softmax_scale, transformer, index))


def _attentions_of(module: Any) -> list[Any]:
    """Returns the self-attention layer of each block. Raises UserError unless each block has one."""
    from sglang.multimodal_gen.runtime.layers.attention.layer import UlyssesAttention_VSA, USPAttention

    def is_self_attention(layer: Any) -> bool:
        return type(layer) in (USPAttention, UlyssesAttention_VSA) and not (
            getattr(layer, "is_cross_attention", False) or getattr(layer, "skip_sequence_parallel", False)
        )

    layers: list[Any] = []
    for block in (block for name in getattr(module, "layer_names", ()) for block in module.get_submodule(name)):
        attentions = list(filter(is_self_attention, getattr(block, "attn1", block).modules()))
        if len(attentions) != 1 or attentions[0].causal or attentions[0].num_heads != attentions[0].num_kv_heads:
            raise UserError(
                f"{_SUPPORTED}, but {name_of(block)} of {name_of(module)} has another; {INSTEAD}, as with SLA"
            )
        layers += attentions
    if not layers:
        raise UserError(f"{_SUPPORTED}, got {name_of(module)}; {INSTEAD}")
    return layers


def _set_kernel(layer: Any, kernel: DbspImpl) -> None:
    """Gives a layer db-SP's kernel, and disables SGLang's ways to bypass the layer's forward."""
    layer.attn_impl = kernel
    layer._attn_impl_by_backend = {layer.backend: kernel}
    layer._required_attention_backend = layer.backend  # so that requests cannot choose another
    layer.skip_sequence_parallel = True  # or Wan's forward_qk_filled would exchange
    layer.sp_attention_mode = "dbsp"  # or Qwen-Image would exchange in Ulysses mode


def _attentions_of_h3(module: Any) -> list[Any]:
    """Returns the attention of each block, after SGLang has chosen backends; the token refiner keeps its backend."""
    module._resolve_attention_backend_once()
    layers = [block.attn for block in module.blocks]
    if any(layer.hybrid is not None for layer in layers):
        raise UserError(f"this MiniMax-H3 has linear attention in addition to its softmax (VDN-H3); {INSTEAD}")
    return layers


def _set_kernel_of_h3(layer: Any, kernel: DbspImpl) -> None:
    """Gives a block's attention db-SP's kernel, with a backend that SGLang does not pipeline.

    With the VSA backend, the block computes the checkpoint's gates.
    """
    from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum

    layer._attention_impl, backends = kernel, AttentionBackendEnum
    has_gate = layer.to_gate_compress is not None
    layer._attention_backend_enum = backends.VIDEO_SPARSE_ATTN_H3 if has_gate else backends.TORCH_SDPA


_RUNTIME = "sglang.multimodal_gen.runtime"
_STAGES = f"{_RUNTIME}.pipelines_core.stages.model_specific_stages"
_ATTENTION = f"{_RUNTIME}.layers.attention.layer"
_LAYER = f"{_ATTENTION}:USPAttention"
_H3 = f"{_RUNTIME}.models.dits.minimax_h3"
_H3_STAGE = f"{_STAGES}.minimax_h3.stages.denoising"
_HOOKS: dict[str, Callable[..., Any]] = {
    f"{_LAYER}.__init__": _make_attention,
    f"{_LAYER}.forward": _attend,
    f"{_ATTENTION}:UlyssesAttention_VSA.forward": _attend,
    f"{_H3}:_minimax_h3_attention_core_impl": _attend_packed,
    f"{_H3_STAGE}:_maybe_prepare_vsa_h3_step_metadata": _note_runs,
    f"{_RUNTIME}.models.dits.ltx_2:LTX2Attention.forward": _attend_ltx2,
    f"{_STAGES}.ltx_2.denoising:LTX2DenoisingStage._run_denoising_step": _denoise_ltx2,
    f"{_RUNTIME}.cache.teacache:TeaCacheMixin._compute_teacache_decision": _compute_together,
    f"{_RUNTIME}.pipelines_core:build_pipeline": _attach_pipeline,
}
"""Functions of SGLang and their wrappers."""
_OF_LAYERS = (
    "attn_impl",
    "backend",
    "softmax_scale",
    "skip_sequence_parallel",
    "sp_attention_mode",
    "_attn_impl_by_backend",
    "_required_attention_backend",
)
_OF_GROUPS = ("get_sp_group", "get_tp_group", "get_ulysses_parallel_world_size", "get_ring_parallel_world_size")
EXPECTED = ExpectedHost(
    "SGLang",
    package="sglang",
    version="0.5.23",
    names=(
        *_HOOKS,
        *(f"{_LAYER}.{name}" for name in _OF_LAYERS),
        *(f"{_RUNTIME}.distributed.parallel_state:{name}" for name in _OF_GROUPS),
        *(f"{_H3}:MiniMaxH3Attention.{name}" for name in ("_attention_backend_enum", "to_gate_compress")),
        f"{_H3}:MiniMaxH3DiTModel._resolve_attention_backend_once",
        f"{_H3_STAGE}:_ref2va_vsa_segments",
        f"{_RUNTIME}.disaggregation.roles:RoleType.DENOISER",
        f"{_RUNTIME}.loader.component_loaders.transformer_loader:TransformerLoader.component_names",
        f"{_RUNTIME}.managers.forward_context:get_forward_context",
        f"{_RUNTIME}.platforms.plugins:plugin_hook",
        f"{_RUNTIME}.server_args:get_global_server_args",
    ),
)


def register() -> None:
    """Registers the hooks if $DBSP_CONFIG is set.

    Raises SystemExit for an unsupported SGLang, which only logs other exceptions of plug-ins and would run dense.
    """
    if not os.environ.get(CONFIG_VARIABLE):
        return
    if problem := EXPECTED.problem():
        raise SystemExit(f"{problem}, or unset {CONFIG_VARIABLE} to run without db-SP")
    from sglang.multimodal_gen.runtime.platforms.plugins import HookType, plugin_hook

    for target, wrapper in _HOOKS.items():
        plugin_hook(target.replace(":", "."), HookType.AROUND)(wrapper)
