"""Attention backend DBSP of vLLM-Omni: each layer hands its rank's shard to the session of its transformer."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata

from dbsp_core.utils.compiling import not_compiled
from dbsp_core.utils.errors import UserError
from dbsp_vllm_omni.transformer import DbspTransformer

__all__ = ["DbspBackend", "DbspImpl"]


class DbspImpl(AttentionImpl[AttentionMetadata]):
    """The self-attention of one layer. Its communication is its own: see `dbsp_vllm_omni.transformer.attach`."""

    def __init__(self, num_heads: int, head_size: int, softmax_scale: float, prefix: str = "", **_: Any) -> None:
        self.scale, self.where = softmax_scale, prefix or "this attention"
        self.transformer: DbspTransformer | None = None
        self.layer = -1

    def bind(self, transformer: DbspTransformer, layer: int) -> None:
        """Says whose layer this is, and which one."""
        self.transformer, self.layer = transformer, layer

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
