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
from dbsp_core.masks.video import Video
from dbsp_core.runtime.session.engine_session import EngineSession
from dbsp_core.utils.compiling import not_compiled
from dbsp_core.utils.errors import UserError

__all__ = ["DbspImpl", "begin_pass", "make_attention", "make_block", "skip_together"]

_within_block: ContextVar[bool] = ContextVar("_within_block", default=False)


class DbspImpl:
    """What SGLang's attention layer calls as its kernel."""

    def __init__(self, where: str, scale: float) -> None:
        self.where, self.scale = where, scale
        self.session: EngineSession | None = None
        self.layer = -1

    def bind(self, session: EngineSession, layer: int) -> None:
        """Says whose layer this is, and which one."""
        self.session, self.layer = session, layer

    @not_compiled
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any = None) -> torch.Tensor:
        """Attention of [B, this rank's tokens, H, D], padding of the last rank included, which is no key."""
        if self.session is None:
            raise UserError(
                f"{self.where}: db-SP serves SGLang's WanTransformer3DModel, not models that are built from its "
                "blocks; unset DBSP_CONFIG to run this one"
            )
        return self.session.attend(self.layer, query, key, value, self.scale)


def make_block(original: Callable[..., None], block: Any, *args: Any, prefix: str = "", **options: Any) -> None:
    """Around WanTransformerBlock.__init__: gives its self-attention db-SP's kernel."""
    within = _within_block.set(True)
    try:
        original(block, *args, prefix=prefix, **options)
    finally:
        _within_block.reset(within)
    from sglang.multimodal_gen.runtime.layers.attention.layer import USPAttention

    attention = block.attn1
    if type(attention) is not USPAttention:
        raise UserError(
            f"{prefix}.attn1 is {type(attention).__name__}, which has parts besides its softmax; unset DBSP_CONFIG to "
            "run this model"
        )
    attention.attn_impl = DbspImpl(f"{prefix}.attn1", attention.softmax_scale)
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
    vote = torch.tensor([skip], dtype=torch.int32, device=options["temb"].device)
    return all(bool(one) for one in _group().all_gather(vote))


@not_compiled
def _begin(model: Any, hidden_states: torch.Tensor) -> None:
    from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context

    session = _session_of(model)
    context = get_forward_context()
    request = context.forward_batch
    frames, height, width = (n // p for n, p in zip(hidden_states.shape[2:], model.patch_size, strict=True))
    if not getattr(request, "enable_sequence_shard", False):  # SGLang then gives each rank frames of its own
        frames *= session.session.group.size
    negative = getattr(request, "is_cfg_negative", None)
    branch = None if negative is None else int(negative)
    session.begin(Video((frames, height, width)), hidden_states.device, int(context.current_timestep), branch)


def _session_of(model: Any) -> EngineSession:
    """The session of a transformer, made at its first pass. Collective then."""
    found = [getattr(getattr(block, "attn1", None), "attn_impl", None) for block in model.blocks]
    kernels = [one for one in found if isinstance(one, DbspImpl)]
    if len(kernels) < len(found):
        raise UserError(
            "a block of this Wan is not SGLang's WanTransformerBlock; with DBSP_CONFIG leave out --attention-backend "
            "video_sparse_attn"
        )
    session = kernels[0].session
    if session is None:
        from sglang.multimodal_gen.runtime.distributed.parallel_state import (
            get_ring_parallel_world_size,
            get_tp_world_size,
            get_ulysses_parallel_world_size,
        )
        from sglang.multimodal_gen.runtime.server_args import get_global_server_args

        if get_tp_world_size() > 1:
            raise UserError("db-SP does not go with SGLang's tensor parallelism; set --tp-size 1")
        if getattr(get_global_server_args(), "kv_gather_degree", 1) > 1:
            raise UserError("db-SP takes Ulysses × ring, not K/V gathering; set --kv-gather-degree 1")
        strategy = Strategy(get_ulysses_parallel_world_size(), get_ring_parallel_world_size())
        session = EngineSession(_group(), strategy, model.blocks[0].local_num_heads, len(kernels))
        for layer, kernel in enumerate(kernels):
            kernel.bind(session, layer)
    return session


def _group() -> SequenceGroup:
    from sglang.multimodal_gen.runtime.distributed.parallel_state import get_sp_group

    group = get_sp_group()
    return SequenceGroup.of(group.device_group) if group.world_size > 1 else SequenceGroup(0, 1)
