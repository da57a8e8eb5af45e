"""Relative error of one dense attention when tokens are sent as int8: rotated or not, and the output, too.

    python -m scripts.bench.int8_errors

Tokens are drawn, or those of the small trained model. Rounding is the product's (`dbsp_kernels.exchange`), everything
else is float64. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import fmean
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from dbsp_kernels.exchange import butterflies, restore_rows, rows_of_tokens, signs
from dbsp_kernels.rounding import norm_of, stages_of
from scripts.results.result import Result, Row, arguments
from scripts.training.trained_model.small_model import PROMPTS, generate, load_pipeline

HEADS, TOKENS, HEAD_DIMS = 4, 1536, (128, 64, 72, 96, 120, 256)
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k and v, float64[H, N, D]
ERRORS = ("unrotated", "qkv", "qkv_and_out", "kernel_unrotated", "kernel")
"""Without rotation; of `precision: int8`; with the output, too; and the first two with kernel `triton-int8`, which
rounds q and k once more."""


def kinds(head_dim: int) -> Iterator[tuple[str, QKV]]:
    """Yields kinds of tokens by name: what makes a token's largest number much larger than the others."""
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = torch.randn(3, HEADS, TOKENS, head_dim, generator=generator, dtype=torch.float64)
    # 1. In a twentieth of the channels: a part that all keys have in common, or numbers 8 times as large.
    chosen = torch.randperm(head_dim, generator=generator)[: head_dim // 20]
    offset, loud = torch.zeros(head_dim, dtype=torch.float64), torch.ones(head_dim, dtype=torch.float64)
    offset[chosen], loud[chosen] = 10, 8

    # 2. One number in a hundred 13 times as large.
    def heavy(tokens: torch.Tensor) -> torch.Tensor:
        return tokens * (1 + 12 * (torch.rand(tokens.shape, generator=generator) < 0.01))

    yield "plain", (q, k, v)
    yield "key offsets", (q, k + offset, v)
    yield "loud channels", (q * loud**0.5, k * loud**0.5, v * loud)
    yield "heavy tails", (0.7 * heavy(q), 0.7 * heavy(k), heavy(v))
    yield "all three", (0.7 * heavy(q * loud**0.5), 0.7 * heavy(k * loud**0.5) + offset, heavy(v * loud))
    # 3. A part that all channels have in common, which a Hadamard matrix without signs would put into one.
    yield "queries + 2", (q + 2, k, v)


def attention(qkv: QKV) -> torch.Tensor:
    q, k, v = qkv
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v


def sent(tokens: torch.Tensor, rotate: bool) -> torch.Tensor:
    return restore_rows(rows_of_tokens(tokens.float(), rotate), tokens.shape[-1], torch.float32).double()


def in_kernel(qkv: QKV) -> QKV:
    """Returns q and k as kernel `triton-int8` rounds them: one scale for a query, and for a block of 64 keys."""
    q, k, v = qkv
    steps = q.abs().amax(dim=-1, keepdim=True) / 127
    blocks = k.unflatten(1, (-1, 64))
    steps_of_blocks = blocks.abs().amax(dim=(2, 3), keepdim=True) / 127
    return (q / steps).round() * steps, ((blocks / steps_of_blocks).round() * steps_of_blocks).flatten(1, 2), v


def rotated_back(tokens: torch.Tensor) -> torch.Tensor:
    head_dim = tokens.shape[-1]
    return butterflies(tokens) * signs(head_dim, tokens.device) * norm_of(head_dim)


def errors(qkv: QKV) -> list[float]:
    """Returns `ERRORS`: the norm of the difference over the output's."""
    q, k, v = qkv
    exact, k = attention(qkv), k - k.mean(dim=1, keepdim=True)
    came, turned = ((sent(q, on), sent(k, on), sent(v, on)) for on in (False, True))
    rotated = attention(turned)
    outputs = (
        *(attention(came), rotated_back(rotated), rotated_back(sent(rotated, rotate=False))),
        *(attention(in_kernel(came)), rotated_back(attention(in_kernel(turned)))),
    )
    return [float((out - exact).norm() / exact.norm()) for out in outputs]


def trained() -> Iterator[QKV]:
    """Yields q, k and v of each self-attention of a video of the small trained model, whole blocks of 64 keys."""
    kept: list[QKV] = []
    compute = functional.scaled_dot_product_attention

    def keep(*args: Any, **given: Any) -> torch.Tensor:
        if "query" in given and given["query"].shape == given["key"].shape:
            q, k, v = (given[name][0].double() for name in ("query", "key", "value"))
            whole = q.shape[1] // 64 * 64
            kept.append((q[:, :whole], k[:, :whole], v[:, :whole]))
        return compute(*args, **given)

    with mock.patch.object(functional, "scaled_dot_product_attention", keep):
        generate(load_pipeline(), PROMPTS[0], seed=0, steps=4)
    yield from kept


def rows(_: argparse.Namespace) -> Iterator[Row]:
    for head_dim in HEAD_DIMS:
        for name, qkv in kinds(head_dim):
            yield row(head_dim, name, errors(qkv))
    of_all = [errors(qkv) for qkv in trained()]
    yield row(24, f"trained model, mean of {len(of_all)}", [fmean(numbers) for numbers in zip(*of_all, strict=True)])


def row(head_dim: int, tokens: str, numbers: list[float]) -> Row:
    rounded = (float(f"{error:.2e}") for error in numbers)
    return Row(
        head_dim=head_dim,
        rotated_together=1 << stages_of(head_dim),  # channels
        tokens=tokens,
        **dict(zip(ERRORS, rounded, strict=True)),
        label="measured",
    )


if __name__ == "__main__":
    Result("int8", "Relative error of an attention in 8 bits").run(arguments(__doc__), rows)
