"""Hooks on SGLang Diffusion's Wan and MiniMax-H3: self-attention hands this rank's shard to its transformer's session.

SGLang has a closed list of attention backends; what it has for third parties are hooks on functions that they name.
Each worker calls `register`, entry point `sglang.multimodal_gen.plugins`, and puts the hooks on itself, until it ends.
SGLang's layer keeps everything else: it is set to exchange nothing (Wan's by `skip_sequence_parallel`), so it
calls its kernel with the shard as it is, and the kernel is `DbspImpl`. What hooks need is imported when a hook runs:
before, SGLang forbids it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.steps import StepClock
from dbsp_core.runtime.engine_session import CONFIG_VARIABLE, EngineLayout, EngineSession, generation_of
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.expected_host import ExpectedHost
from dbsp_core.utils.process import not_compiled

_within_block: ContextVar[bool] = ContextVar("_within_block", default=False)
_SESSION = "_dbsp_session"
"""Attribute of a transformer that has a session."""
_SUPPORTED = "db-SP supports SGLang's own Wan and MiniMax-H3"
_INSTEAD = "unset DBSP_CONFIG to run this model without db-SP"


class DbspImpl:
    """Kernel that SGLang's attention layer calls: one layer of a session, once `attach` has given it one."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.session: EngineSession | None = None
        self.layer = -1

    @not_compiled
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any = None) -> torch.Tensor:
        """Computes attention of [B, this rank's tokens, H, D] with the last rank's padding, which is no key."""
        if self.session is None:
            raise UserError(f"SGLang has not loaded this transformer as part of a pipeline; {_INSTEAD}")
        return self.session.attend(self.layer, query, key, value, self.scale)

    def forward_varlen(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        """Computes attention of a packed sequence [this rank's tokens, H, D], whose length the session knows."""
        return self.forward(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)).squeeze(0)


def _make_block(original: Callable[..., None], block: Any, *args: Any, prefix: str = "", **options: Any) -> None:
    """Wraps WanTransformerBlock.__init__: gives its self-attention db-SP's kernel, if it is only a softmax."""
    within = _within_block.set(True)
    try:
        original(block, *args, prefix=prefix, **options)
    finally:
        _within_block.reset(within)
    from sglang.multimodal_gen.runtime.layers.attention.layer import USPAttention

    attention = block.attn1
    if type(attention) is USPAttention:
        attention.attn_impl = DbspImpl(attention.softmax_scale)
        attention._attn_impl_by_backend = {attention.backend: attention.attn_impl}
        attention._required_attention_backend = attention.backend  # so that no request names another


def _make_attention(
    original: Callable[..., None], attention: Any, *args: Any, is_cross_attention: bool = False, **options: Any
) -> None:
    """Wraps USPAttention.__init__: a Wan block's self-attention exchanges nothing, so a ring needs no LSE."""
    if _within_block.get() and not is_cross_attention:
        options["skip_sequence_parallel"] = True
    original(attention, *args, is_cross_attention=is_cross_attention, **options)


def _attend_packed(original: Callable[..., torch.Tensor], attention: Any, *args: Any, **options: Any) -> torch.Tensor:
    """Wraps MiniMax-H3's function that exchanges and attends: attention with db-SP's kernel exchanges nothing."""
    if isinstance(attention._attention_impl, DbspImpl):
        options |= {"ulysses_active": False, "ring_active": False}
    return original(attention, *args, **options)


def _attach_pipeline(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Wraps build_pipeline, which each worker calls once: a session for each of its transformers. Collective.

    Raises:
        UserError: On all ranks, for a transformer that is not supported, which SGLang would run dense.
    """
    from sglang.multimodal_gen.runtime.disaggregation.roles import RoleType
    from sglang.multimodal_gen.runtime.loader.component_loaders.transformer_loader import TransformerLoader
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    pipeline = original(*args, **options)
    kinds = tuple(TransformerLoader.component_names)
    transformers = {name: module for name, module in pipeline.modules.items() if name.startswith(kinds)}
    role = getattr(get_global_server_args(), "disagg_role", RoleType.MONOLITHIC)
    if not transformers and role in (RoleType.MONOLITHIC, RoleType.DENOISER):
        raise UserError(f"{_SUPPORTED}, and this is {type(pipeline).__name__}; {_INSTEAD}")
    clock = StepClock(shared=len(transformers) > 1)
    for name, transformer in transformers.items():
        attach(transformer, name, clock)
    return pipeline


def attach(transformer: Any, name: str = "transformer", clock: StepClock | None = None) -> None:
    """Gives a transformer its session. Collective. Raises UserError, on all ranks, for one that is not supported.

    Args:
        name: Of the transformer in its pipeline, by which it may have settings of its own.
        clock: The count of steps of all transformers of the pipeline; None: there is one.
    """
    from sglang.multimodal_gen.runtime.distributed.parallel_state import (
        get_ring_parallel_world_size,
        get_sp_group,
        get_tp_world_size,
        get_ulysses_parallel_world_size,
    )
    from sglang.multimodal_gen.runtime.models.dits.minimax_h3 import MiniMaxH3DiTModel
    from sglang.multimodal_gen.runtime.models.dits.wanvideo import WanTransformer3DModel
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    kernels_of = {WanTransformer3DModel: _kernels_of_wan, MiniMaxH3DiTModel: _kernels_of_h3}.get(type(transformer))
    if kernels_of is None:
        raise UserError(f"{_SUPPORTED}, and this is {_name(transformer)}; {_INSTEAD}")
    kernels = kernels_of(transformer)
    settings = get_global_server_args()
    if get_tp_world_size() > 1:
        raise UserError("db-SP does not go with SGLang's tensor parallelism; set --tp-size 1")
    if getattr(settings, "kv_gather_degree", 1) > 1 and not getattr(settings, "sp_split_auto", False):
        raise UserError("db-SP takes Ulysses × ring, not K/V gathering; set --ulysses-degree, not --kv-gather-degree")
    if getattr(settings, "enable_breakable_cuda_graph", False):
        raise UserError("CUDA graphs repeat a pass without its step; leave out --enable-breakable-cuda-graph")
    strategy = Strategy(get_ulysses_parallel_world_size(), get_ring_parallel_world_size())
    ranks = get_sp_group()
    group = SequenceGroup.from_group(ranks.device_group) if ranks.world_size > 1 else SequenceGroup(0, 1)
    sizes = transformer.num_attention_heads, len(kernels)
    session = EngineSession(group, strategy, *sizes, clock=clock, transformer=name)
    for layer, kernel in enumerate(kernels):
        kernel.session, kernel.layer = session, layer
    setattr(transformer, _SESSION, session)


def _kernels_of_wan(transformer: Any) -> list[DbspImpl]:
    """Returns those that its blocks were made with."""
    kernels: list[DbspImpl] = []
    for block in transformer.blocks:
        kernel = getattr(block.attn1, "attn_impl", None)
        if not isinstance(kernel, DbspImpl):
            raise UserError(
                f"this Wan's self-attention is {_name(block.attn1)} in {_name(block)}, which has more parts than its "
                "softmax; leave out --attention-backend video_sparse_attn, or unset DBSP_CONFIG for an SLA checkpoint"
            )
        kernels.append(kernel)
    return kernels


def _kernels_of_h3(transformer: Any) -> list[DbspImpl]:
    """Puts them in its blocks, once SGLang has chosen all backends: its token refiner keeps SGLang's."""
    from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum

    transformer._resolve_attention_backend_once()
    if transformer._resolved_attention_backend is AttentionBackendEnum.VIDEO_SPARSE_ATTN_H3:
        raise UserError(
            "MiniMax-H3's VSA has a gated branch in addition to its softmax; leave out --attention-backend "
            "video_sparse_attn"
        )
    kernels: list[DbspImpl] = []
    for block in transformer.blocks:
        if block.attn.hybrid is not None:
            raise UserError(f"this MiniMax-H3 has linear attention in addition to its softmax (VDN-H3); {_INSTEAD}")
        kernels.append(DbspImpl(block.attn.softmax_scale))
        block.attn._attention_impl = kernels[-1]
        block.attn._attention_backend_enum = AttentionBackendEnum.TORCH_SDPA  # for which SGLang pipelines nothing
    return kernels


def _begin_wan(
    original: Callable[..., Any], model: Any, hidden_states: torch.Tensor, *args: Any, **options: Any
) -> Any:
    """Wraps WanTransformer3DModel.forward."""
    _begin(model, hidden_states.device, functools.partial(_video_of_wan, model, hidden_states))
    return original(model, hidden_states, *args, **options)


def _begin_h3(original: Callable[..., Any], model: Any, **inputs: Any) -> Any:
    """Wraps MiniMaxH3DiTModel.forward."""
    _begin(model, inputs["x"].device, functools.partial(_layout_of_h3, model, inputs))
    return original(model, **inputs)


def _skip_together(original: Callable[..., bool], model: Any, **options: Any) -> bool:
    """Wraps TeaCache's decision, by a rank's own timesteps: all ranks skip a pass, or none. Collective."""
    skip = original(model, **options)
    return bool(getattr(model, _SESSION).all_agree(skip)) if model.enable_teacache else skip


@not_compiled
def _begin(model: Any, device: torch.device, tokens_of: Callable[[Any, int], EngineLayout]) -> None:
    from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context

    session: EngineSession | None = getattr(model, _SESSION, None)
    if session is None:
        return  # its first attention raises
    context = get_forward_context()
    request = context.forward_batch
    negative = getattr(request, "is_cfg_negative", None)
    branch = None if negative is None else int(negative)
    timesteps = getattr(request, "timesteps", None)
    session.begin(
        tokens_of(request, session.session.group.size),
        device,
        step=int(context.current_timestep),
        cfg_branch=branch,
        steps=None if timesteps is None else len(timesteps),
        generation=generation_of(request),
    )


def _video_of_wan(model: Any, latents: torch.Tensor, request: Any, ranks: int) -> EngineLayout:
    """Returns the layout of a Wan's video, of whose frames each rank may have its own, the last ones being padding."""
    frames, height, width = (n // p for n, p in zip(latents.shape[2:], model.patch_size, strict=True))
    if ranks == 1 or request.enable_sequence_shard:
        return EngineLayout((frames, height, width))
    if not getattr(request, "did_sp_shard_latents", False):
        raise UserError("SGLang gave every rank the whole video; leave out --enable-sequence-shard false")
    shape = getattr(request, "raw_latent_shape", None)
    whole = 0 if shape is None else int(shape[2]) // model.patch_size[0]
    if frames != -(-whole // ranks):
        raise UserError(
            f"SGLang gave {ranks} ranks {frames} frames each of a video that it says has {whole or 'no size'}; leave "
            "out --enable-sequence-shard false"
        )
    return EngineLayout((whole, height, width), shard=frames * height * width)


def _layout_of_h3(model: Any, inputs: dict[str, Any], request: Any, ranks: int) -> EngineLayout:
    """Returns the layout of one packed sequence: text and what to go by, audio to make, then the video to make."""
    shape = getattr(request, "raw_latent_shape", None)
    if shape is None:
        raise UserError("SGLang does not say the size of this MiniMax-H3 video, as in ComfyUI; unset DBSP_CONFIG")
    frames, height, width = (n // p for n, p in zip(shape[2:], model.arch.patch_size, strict=True))
    used = int(model._psp_field(inputs["packed_seq_params"], "packed_seq_params", "max_seqlen_q"))
    before = used - frames * height * width
    return EngineLayout((frames, height, width), before=before, shard=inputs["x"].shape[1] // ranks)


def _name(thing: Any) -> str:
    return f"{type(thing).__module__.partition('.')[0]}'s {type(thing).__name__}"


_RUNTIME = "sglang.multimodal_gen.runtime"
_LAYER = f"{_RUNTIME}.layers.attention.layer:USPAttention"
_WAN = f"{_RUNTIME}.models.dits.wanvideo"
_H3 = f"{_RUNTIME}.models.dits.minimax_h3"
_HOOKS: dict[str, Callable[..., Any]] = {
    f"{_WAN}:WanTransformerBlock.__init__": _make_block,
    f"{_LAYER}.__init__": _make_attention,
    f"{_WAN}:WanTransformer3DModel.forward": _begin_wan,
    f"{_WAN}:WanTransformer3DModel.should_skip_forward_for_cached_states": _skip_together,
    f"{_H3}:_minimax_h3_attention_core_impl": _attend_packed,
    f"{_H3}:MiniMaxH3DiTModel.forward": _begin_h3,
    f"{_RUNTIME}.pipelines_core:build_pipeline": _attach_pipeline,
}
"""Functions of SGLang, and what each is wrapped in."""
_OF_LAYERS = ("attn_impl", "backend", "softmax_scale", "_attn_impl_by_backend", "_required_attention_backend")
_OF_GROUPS = ("get_sp_group", "get_tp_world_size", "get_ulysses_parallel_world_size", "get_ring_parallel_world_size")
EXPECTED = ExpectedHost(
    "SGLang",
    package="sglang",
    version="0.5.23",
    names=(
        *_HOOKS,
        *(f"{_LAYER}.{name}" for name in _OF_LAYERS),
        *(f"{_RUNTIME}.distributed.parallel_state:{name}" for name in _OF_GROUPS),
        f"{_H3}:MiniMaxH3Attention._attention_backend_enum",
        f"{_H3}:MiniMaxH3DiTModel._psp_field",
        f"{_H3}:MiniMaxH3DiTModel._resolve_attention_backend_once",
        f"{_RUNTIME}.disaggregation.roles:RoleType.DENOISER",
        f"{_RUNTIME}.loader.component_loaders.transformer_loader:TransformerLoader.component_names",
        f"{_RUNTIME}.managers.forward_context:get_forward_context",
        f"{_RUNTIME}.platforms.plugins:plugin_hook",
        f"{_RUNTIME}.server_args:get_global_server_args",
    ),
)


def register() -> None:
    """Registers the hooks if $DBSP_CONFIG names a configuration; without it nothing changes.

    Raises:
        SystemExit: For another SGLang than expected. SGLang logs other errors of plug-ins and goes on, and would run
            dense attention where a mask was asked for.
    """
    if not os.environ.get(CONFIG_VARIABLE):
        return
    if problem := EXPECTED.problem():
        raise SystemExit(f"{problem}, or unset {CONFIG_VARIABLE} to run without db-SP")
    from sglang.multimodal_gen.runtime.platforms.plugins import HookType, plugin_hook

    for target, wrapper in _HOOKS.items():
        plugin_hook(target.replace(":", "."), HookType.AROUND)(wrapper)
