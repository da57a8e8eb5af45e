"""Communication dtype of queries, keys, values and the output: the model's dtype, or int8 with a scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dbsp_core.utils.errors import UserError, did_you_mean, in_short
from dbsp_core.utils.schema import build
from dbsp_kernels.exchange import quantise_segments, restore_rows, row_words
from dbsp_kernels.segments import CopySegments

MODEL_DTYPE, INT8 = "model", "int8"
DTYPES = (MODEL_DTYPE, INT8)


@dataclass(frozen=True)
class CommDtype:
    """Dtype in which tokens are sent: "model" (the model's dtype) or "int8" with a scale per token and head."""

    qkv: str = MODEL_DTYPE  # Of queries, keys and values
    out: str = MODEL_DTYPE  # Of the output; int8 requires qkv: int8, because the output is rotated like the values

    def __post_init__(self) -> None:
        for value in (self.qkv, self.out):
            if value not in DTYPES:
                hint = did_you_mean(value, DTYPES)
                raise UserError(f"unknown precision {in_short(value)}; use one of {', '.join(DTYPES)}{hint}")
        if self.out == INT8 and not self.is_int8:
            raise UserError("precision: out: int8 needs qkv: int8; write {qkv: int8, out: int8}")

    @cached_property
    def is_int8(self) -> bool:
        """True if q, k and v are rotated and rounded; keys are sent minus their mean, which softmax ignores."""
        return self.qkv == INT8

    @property
    def setting(self) -> PrecisionLike:
        """The value of setting `precision`."""
        return self.qkv if self.out == MODEL_DTYPE else {"qkv": self.qkv, "out": self.out}

    @property
    def no_gradients(self) -> str | None:
        """Error message if there are no gradients, else None."""
        if not self.is_int8:
            return None
        return (
            "precision: int8 does not support gradients; remove it to train, or call attention under torch.no_grad()"
        )

    def token_bytes(self, head_dim: int, element_bytes: int) -> int:
        """Returns the bytes of a token of one head of q, k or v, of `element_bytes` per element in the model."""
        return 4 * row_words(head_dim) if self.qkv == INT8 else head_dim * element_bytes

    def out_bytes(self, head_dim: int, element_bytes: int) -> int:
        """Returns the bytes of a token of one head of the output."""
        return 4 * row_words(head_dim) if self.out == INT8 else head_dim * element_bytes

    def write(
        self,
        tensors: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        segments: Sequence[CopySegments],
        less: Sequence[torch.Tensor | None],
        *,
        rotate: bool = True,
    ) -> None:
        """Quantizes tokens of tensors [B, heads, n, D] into a buffer int32[slots, B, W].

        `less` as in `Exchange.send_buffer`; `rotate` is False for tokens that are already rotated (the output).
        """
        for tensor, of_tensor, mean in zip(tensors, segments, less or [None] * len(tensors), strict=True):
            quantise_segments(tensor, buffer, of_tensor, mean, rotate=rotate)

    def read(self, written: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Dequantizes contiguous int32[..., W] → rotated tokens [..., D], with dtype and D of `like`."""
        return restore_rows(written, like.shape[-1], like.dtype)


MODEL = CommDtype()
PrecisionLike = CommDtype | Mapping[str, str] | str
"""Type of setting `precision`."""


def read_comm_dtype(value: Any, name: str = "precision") -> CommDtype:
    """Reads setting `precision`: "model", "int8", or a mapping of `qkv` and `out`. Raises UserError otherwise."""
    if isinstance(value, CommDtype):
        return value
    if isinstance(value, Mapping):
        comm_dtype: CommDtype = build(CommDtype, value, "'precision'")
        return comm_dtype
    return CommDtype(value)
