"""Attention backend DBSP of vLLM-Omni: each layer hands its rank's shard to the session of its transformer."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.attention.selector import get_attn_backend_for_role
from vllm_omni.diffusion.distributed.parallel_state import get_sp_group

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.steps import StepClock
from dbsp_core.runtime.engine_session import EngineSession
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import not_compiled
from dbsp_engines.vllm_omni_transformer import DbspTransformer

__all__ = ["DbspBackend", "DbspImpl", "attach"]

_AGREEING_CACHES = ("none", "tea_cache", "sea_cache", "mag_cache", "cache_dit")
"""Values of `cache_backend`: by all ranks' tokens (tea, sea), by the step (mag), or polled (cache-dit)."""


class DbspImpl(AttentionImpl[AttentionMetadata]):
    """The self-attention of one layer. Its communication is its own: see `attach`."""

    def __init__(self, num_heads: int, head_size: int, softmax_scale: float, prefix: str = "", **_: Any) -> None:
        self.scale, self.where = softmax_scale, prefix or "this attention"
        self.transformer: DbspTransformer | None = None
        self.layer = -1

    @not_compiled
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Attention of [B, this rank's tokens, H, D], padding of the last rank included, which no token attends to.

        Text that all ranks have (joint_query and so on) is attended over with them, and is in the output where
        joint_strategy says. Masks are not read: by contract they hide padding alone.
        """
        if self.transformer is None:
            raise UserError(f"{self.where}: vLLM-Omni has not loaded this transformer as part of a pipeline")
        return self.transformer.attend(self.layer, (query, key, value), attn_metadata, self.scale)


class DbspBackend(AttentionBackend):
    """What vLLM-Omni asks of a backend."""

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        return True  # of padding, which is never a key here

    @classmethod
    def supports_packed_mask_free(cls) -> bool:
        return True

    @staticmethod
    def get_name() -> str:
        return "DBSP"

    @staticmethod
    def get_impl_cls() -> type[DbspImpl]:
        return DbspImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> None:
        return None

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return []  # any


def attach(transformer: torch.nn.Module, config: Any, clock: StepClock | None = None) -> EngineSession | None:
    """Gives the DBSP layers of a transformer one session. Collective where several ranks share the sequence.

    Their exchange of vLLM-Omni's own is switched off: a layer hands over its rank's shard as it is. Attention outside
    the sharded sequence, such as that of MiniMax-H3's token refiner, gets vLLM-Omni's default backend.

    Args:
        config: vLLM-Omni's OmniDiffusionConfig.
        clock: The pipeline's.

    Returns:
        None: the transformer has no such layer.
    """
    attentions = [one for one in transformer.modules() if isinstance(one, Attention)]
    layers = [one for one in attentions if isinstance(one.attention, DbspImpl)]
    for layer in [one for one in layers if one.skip_sequence_parallel]:
        _give_back(layer)
        layers.remove(layer)
    if not layers:
        return None
    for layer in layers:
        _require_served(layer)
    parallel = config.parallel_config
    if getattr(parallel, "allgather_degree", 1) > 1:
        raise UserError("DBSP takes Ulysses × Ring, not AllGather-KV; set --allgather-degree 1 and --usp or --ring")
    world = parallel.sequence_parallel_size or 1
    if world > 1 and (config.cache_backend or "none") not in _AGREEING_CACHES:
        raise UserError(
            f"db-SP does not know whether cache_backend {config.cache_backend} skips the same layers on all ranks; "
            f"set it to one of {', '.join(_AGREEING_CACHES)}, or name another attention backend"
        )
    group = SequenceGroup.of(get_sp_group().device_group) if world > 1 else SequenceGroup(0, 1)
    strategy = Strategy(parallel.ulysses_degree or 1, parallel.ring_degree or 1)
    session = EngineSession(group, strategy, layers[0].num_heads, len(layers), clock=clock)
    attached = DbspTransformer(transformer, session)
    for index, layer in enumerate(layers):
        layer.attention.transformer, layer.attention.layer = attached, index
        layer.parallel_strategy = layer._no_parallel_strategy
    return session


def _give_back(layer: Attention) -> None:
    """Gives a layer what it has where no backend is named."""
    layer.attn_backend, _ = get_attn_backend_for_role(layer.role, layer.head_size)
    names = ("num_heads", "head_size", "softmax_scale", "causal", "num_kv_heads", "qkv_layout", "prefix", "role")
    layer.attention = layer.attn_backend.get_impl_cls()(**{name: getattr(layer, name) for name in names})


def _require_served(layer: Attention) -> None:
    where = layer.prefix or "an attention"
    if layer.role != "self":
        raise UserError(
            f"{where} is {layer.role} attention; name DBSP for self-attention alone: per_role.self.backend"
        )
    if layer.causal:
        raise UserError(f"{where} is causal, which DBSP does not serve; use another attention backend")
    if layer.num_kv_heads != layer.num_heads:
        raise UserError(f"{where} has fewer key than query heads, which DBSP does not serve; use another backend")
