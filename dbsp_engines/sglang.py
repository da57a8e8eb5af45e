"""The hooks on SGLang Diffusion's Wan: its self-attention hands this rank's shard to the session of its transformer.

SGLang's layer keeps everything else: with `skip_sequence_parallel` it calls its kernel with the shard as it is, and
the kernel is `DbspImpl`. The modules that hooks need are imported when a hook runs: before, SGLang forbids it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.engine_session import EngineSession
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import not_compiled

__all__ = ["DbspImpl", "attach", "attach_pipeline", "begin_pass", "make_attention", "make_block", "skip_together"]

_within_block: ContextVar[bool] = ContextVar("_within_block", default=False)
_SESSION = "_dbsp_session"
"""Attribute of a transformer that `attach` has served."""
_INSTEAD = "unset DBSP_CONFIG to run this model without db-SP"


class DbspImpl:
    """What SGLang's attention layer calls as its kernel: one layer of a session, once `attach` has given it one."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.session: EngineSession | None = None
        self.layer = -1

    @not_compiled
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any = None) -> torch.Tensor:
        """Attention of [B, this rank's tokens, H, D], padding of the last rank included, which is no key."""
        if self.session is None:
            raise UserError(f"SGLang has not loaded this transformer as part of a pipeline; {_INSTEAD}")
        return self.session.attend(self.layer, query, key, value, self.scale)


def make_block(original: Callable[..., None], block: Any, *args: Any, prefix: str = "", **options: Any) -> None:
    """Around WanTransformerBlock.__init__: gives its self-attention db-SP's kernel, if it is only a softmax."""
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


def make_attention(
    original: Callable[..., None], attention: Any, *args: Any, is_cross_attention: bool = False, **options: Any
) -> None:
    """Around USPAttention.__init__: in a Wan block, self-attention makes no exchange of SGLang's own.

    So it asks for no kernel with a softmax LSE where there is a ring.
    """
    if _within_block.get() and not is_cross_attention:
        options["skip_sequence_parallel"] = True
    original(attention, *args, is_cross_attention=is_cross_attention, **options)


def attach_pipeline(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Around build_pipeline, which each worker calls once: a session for each of its transformers. Collective.

    Raises:
        UserError: On all ranks, for a transformer that is not served. SGLang would run it, dense; and where its own
            Wan cannot be loaded, one of diffusers, with a line in the log.
    """
    from sglang.multimodal_gen.runtime.disaggregation.roles import RoleType
    from sglang.multimodal_gen.runtime.loader.component_loaders.transformer_loader import TransformerLoader
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    pipeline = original(*args, **options)
    kinds = tuple(TransformerLoader.component_names)
    transformers = [module for name, module in pipeline.modules.items() if name.startswith(kinds)]
    role = getattr(get_global_server_args(), "disagg_role", RoleType.MONOLITHIC)
    if not transformers and role in (RoleType.MONOLITHIC, RoleType.DENOISER):
        raise UserError(f"db-SP serves SGLang's own Wan, and this is {type(pipeline).__name__}; {_INSTEAD}")
    for transformer in transformers:
        attach(transformer)
    return pipeline


def attach(transformer: Any) -> None:
    """Gives a transformer its session. Collective. Raises UserError, on all ranks, for one that is not served."""
    from sglang.multimodal_gen.runtime.distributed.parallel_state import (
        get_ring_parallel_world_size,
        get_tp_world_size,
        get_ulysses_parallel_world_size,
    )
    from sglang.multimodal_gen.runtime.models.dits.wanvideo import WanTransformer3DModel
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    if type(transformer) is not WanTransformer3DModel:
        raise UserError(f"db-SP serves SGLang's own Wan, and this is {_name(transformer)}; {_INSTEAD}")
    kernels: list[DbspImpl] = []
    for block in transformer.blocks:
        kernel = getattr(block.attn1, "attn_impl", None)
        if not isinstance(kernel, DbspImpl):
            raise UserError(
                f"this Wan's self-attention is {_name(block.attn1)} in {_name(block)}, which has parts besides its "
                "softmax; leave out --attention-backend video_sparse_attn, or unset DBSP_CONFIG for an SLA checkpoint"
            )
        kernels.append(kernel)
    settings = get_global_server_args()
    if get_tp_world_size() > 1:
        raise UserError("db-SP does not go with SGLang's tensor parallelism; set --tp-size 1")
    if getattr(settings, "kv_gather_degree", 1) > 1 and not getattr(settings, "sp_split_auto", False):
        raise UserError("db-SP takes Ulysses × ring, not K/V gathering; set --ulysses-degree, not --kv-gather-degree")
    if getattr(settings, "enable_breakable_cuda_graph", False):
        raise UserError("CUDA graphs repeat a pass without its step; leave out --enable-breakable-cuda-graph")
    strategy = Strategy(get_ulysses_parallel_world_size(), get_ring_parallel_world_size())
    session = EngineSession(_group(), strategy, transformer.blocks[0].local_num_heads, len(kernels))
    for layer, kernel in enumerate(kernels):
        kernel.session, kernel.layer = session, layer
    setattr(transformer, _SESSION, session)


def begin_pass(
    original: Callable[..., Any], model: Any, hidden_states: torch.Tensor, *args: Any, **options: Any
) -> Any:
    """Around WanTransformer3DModel.forward."""
    _begin(model, hidden_states)
    return original(model, hidden_states, *args, **options)


def skip_together(original: Callable[..., bool], model: Any, **options: Any) -> bool:
    """Around the decision of TeaCache: the layers are skipped where all ranks would skip them. Collective.

    A rank decides by its own shard of the timesteps, where each token has one.
    """
    skip = original(model, **options)
    if not model.enable_teacache:
        return skip
    session: EngineSession = getattr(model, _SESSION)
    return session.all_agree(skip)


@not_compiled
def _begin(model: Any, hidden_states: torch.Tensor) -> None:
    from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context

    session: EngineSession | None = getattr(model, _SESSION, None)
    if session is None:
        return  # which its first attention refuses
    context = get_forward_context()
    request = context.forward_batch
    frames, height, width = (n // p for n, p in zip(hidden_states.shape[2:], model.patch_size, strict=True))
    ranks = session.session.group.size
    if ranks > 1 and not request.enable_sequence_shard:
        if not getattr(request, "did_sp_shard_latents", False):
            raise UserError("SGLang gave every rank the whole video; leave out --enable-sequence-shard false")
        frames *= ranks  # of its own a rank has
    negative = getattr(request, "is_cfg_negative", None)
    branch = None if negative is None else int(negative)
    session.begin(Video((frames, height, width)), hidden_states.device, int(context.current_timestep), branch)


def _group() -> SequenceGroup:
    from sglang.multimodal_gen.runtime.distributed.parallel_state import get_sp_group

    group = get_sp_group()
    return SequenceGroup.of(group.device_group) if group.world_size > 1 else SequenceGroup(0, 1)


def _name(thing: Any) -> str:
    kind = type(thing)
    return f"{kind.__module__.partition('.')[0]}'s {kind.__name__}"
