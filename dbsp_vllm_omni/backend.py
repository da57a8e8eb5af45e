"""Attention backend DBSP of vLLM-Omni: each layer hands its rank's shard to the session of its transformer."""

from __future__ import annotations

import re
from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.distributed.parallel_state import get_sp_group
from vllm_omni.diffusion.forward_context import get_forward_context

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.video import Video
from dbsp_core.runtime.session.engine_session import EngineSession
from dbsp_core.utils.compiling import not_compiled
from dbsp_core.utils.errors import UserError

__all__ = ["DbspBackend", "DbspImpl", "attach"]


class DbspImpl(AttentionImpl[AttentionMetadata]):
    """The self-attention of one layer. Its communication is its own: see `attach`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        role: str = "self",
        **options: Any,
    ) -> None:
        where = prefix or "this attention"
        if role != "self":
            raise UserError(f"{where} is {role} attention; name DBSP for self-attention alone: per_role.self.backend")
        if causal:
            raise UserError(f"{where} is causal, which DBSP does not serve; use another attention backend")
        if (num_kv_heads or num_heads) != num_heads:
            raise UserError(f"{where} has fewer key than query heads, which DBSP does not serve; use another backend")
        self.scale, self.where = softmax_scale, where
        self.session: EngineSession | None = None
        self.layer = -1

    def bind(self, session: EngineSession, layer: int) -> None:
        """Says whose layer this is, and which one."""
        self.session, self.layer = session, layer

    @not_compiled
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Attention of [B, this rank's tokens, H, D], padding of the last rank included, which no token attends to."""
        if self.session is None:
            raise UserError(f"{self.where}: vLLM-Omni has not loaded this transformer as part of a pipeline")
        if self.layer == 0:
            video = self._video(attn_metadata)
            self.session.begin(video, query.device, get_forward_context().denoise_step_idx)
        return self.session.attend(self.layer, query, key, value, self.scale)

    def _video(self, metadata: AttentionMetadata | None) -> Video:
        """The token grid that the model publishes; a mask that it gives besides hides padding alone (its contract)."""
        layout = None if metadata is None else metadata.video_layout
        if metadata is not None and metadata.joint_query is not None:
            raise UserError(f"{self.where}: DBSP does not serve models whose text is whole on every rank; use another")
        if layout is None or layout.latent_grid is None:
            raise UserError(
                f"{self.where}: the model publishes no grid of video tokens (video_layout), which masks need; "
                "vLLM-Omni 0.30 has it for Wan and MiniMax-H3; use another attention backend"
            )
        return Video(tuple(layout.latent_grid), layout.prefix_len or 0)


class DbspBackend(AttentionBackend):
    """What vLLM-Omni asks of a backend."""

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        return True  # of padding, which is never a key here

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


def attach(transformer: torch.nn.Module, config: Any) -> EngineSession | None:
    """Gives the DBSP layers of a transformer one session. Collective where several ranks share the sequence.

    Their exchange of vLLM-Omni's own is switched off: a layer hands over its rank's shard as it is.

    Args:
        config: vLLM-Omni's OmniDiffusionConfig.

    Returns:
        None: the transformer has no such layer.
    """
    attentions = [one for one in transformer.modules() if isinstance(one, Attention)]
    layers = [one for one in attentions if isinstance(one.attention, DbspImpl)]
    if not layers:
        return None
    parallel = config.parallel_config
    if getattr(parallel, "allgather_degree", 1) > 1:
        raise UserError("DBSP takes Ulysses × Ring, not AllGather-KV; set --allgather-degree 1 and --usp or --ring")
    layers.sort(key=lambda layer: _numbers(layer.prefix))
    world = parallel.sequence_parallel_size or 1
    if world > 1 and (config.cache_backend or "none") != "none":
        raise UserError(
            f"cache_backend {config.cache_backend} decides by the tokens of one rank, so that ranks would skip "
            "different layers; set it to none, or name another attention backend"
        )
    group = SequenceGroup.of(get_sp_group().device_group) if world > 1 else SequenceGroup(0, 1)
    strategy = Strategy(parallel.ulysses_degree or 1, parallel.ring_degree or 1)
    session = EngineSession(group, strategy, layers[0].num_heads, len(layers))
    for index, layer in enumerate(layers):
        layer.attention.bind(session, index)
        layer.parallel_strategy = layer._no_parallel_strategy
    return session


def _numbers(prefix: str) -> list[int]:
    """Those in a layer's name, by which layers follow one another."""
    return [int(number) for number in re.findall(r"\d+", prefix)]
