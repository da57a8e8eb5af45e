"""Communication dtypes of queries, keys and values: the model's, or int8 with a scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dbsp_core.utils.errors import UserError, did_you_mean
from dbsp_kernels.exchange import quantise_segments, restore_rows, row_words
from dbsp_kernels.segments import CopySegments


class CommDtype:
    """The tokens of a head are sent as the model has them. The output is always sent so.

    Attributes:
        name: Its value of the setting `precision`.
        centred: True if the mean of all tokens, which softmax ignores, is subtracted from keys.
        no_gradients: Error message if attention with it has no gradients, else None.
    """

    name = "model"
    centred = False
    no_gradients: str | None = None

    def __repr__(self) -> str:
        return f"<CommDtype {self.name}>"

    def token_bytes(self, head_dim: int, element_bytes: int) -> int:
        """Returns the bytes of a token of one head of q, k or v whose numbers have `element_bytes` in the model."""
        return head_dim * element_bytes


class Int8Format(CommDtype):
    """A token's numbers are sent as int8, followed by its scale as float32: see `dbsp_kernels.exchange`."""

    name = "int8"
    centred = True
    no_gradients = (
        "precision: int8 has no gradients, as rounding has none; leave it out to train, or call attention "
        "under torch.no_grad()"
    )

    def token_bytes(self, head_dim: int, element_bytes: int) -> int:
        return 4 * row_words(head_dim)

    def empty(self, like: torch.Tensor, *slots: int) -> torch.Tensor:
        """Allocates room for written tokens, int32[*slots, W], of q, k or v `like` [..., D]."""
        return like.new_empty(*slots, row_words(like.shape[-1]), dtype=torch.int32)

    def write(
        self,
        tensors: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        segments: Sequence[CopySegments],
        less: Sequence[torch.Tensor | None],
    ) -> None:
        """Writes tokens of tensors [B, heads, n, D] into a buffer int32[slots, B, W].

        Args:
            segments: Segments of each tensor.
            less: For each tensor, float32[B, heads, D] to be subtracted from all of its tokens, or None; () for none.
        """
        for tensor, of_tensor, mean in zip(tensors, segments, less or [None] * len(tensors), strict=True):
            quantise_segments(tensor, buffer, of_tensor, mean)

    def read(self, written: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Returns tokens [..., D] of contiguous int32[..., W], in the dtype and with the D of `like`."""
        return restore_rows(written, like.shape[-1], like.dtype)


MODEL = CommDtype()
COMM_DTYPES: dict[str, CommDtype] = {comm_dtype.name: comm_dtype for comm_dtype in (MODEL, Int8Format())}
"""Formats by the value of setting `precision`."""


def require_comm_dtype(precision: str) -> CommDtype:
    """Returns the format of that name. Raises UserError for what is not one of `COMM_DTYPES`."""
    if precision not in COMM_DTYPES:
        known = f"use one of {', '.join(COMM_DTYPES)}" + did_you_mean(precision, COMM_DTYPES)
        raise UserError(f"the exchange's precision cannot be {precision!r}: {known}")
    return COMM_DTYPES[precision]
