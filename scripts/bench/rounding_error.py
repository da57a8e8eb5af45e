"""Error of attention whose q, k and v were rounded in exchanges: int8 and fp8, with a scale for each token and head.

    python -m scripts.bench.rounding_error [--tokens 3072] [--heads 3] [--json]

Synthetic q, k and v in bfloat16, whose content varies smoothly along the video, as they are or with a few channels in
which all keys have a large common part, as is known of models' keys; 64×64 blocks, the highest 40 % of pooled scores.
Errors are those of rounding alone: of float64 attention in one process, relative to what was not rounded.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable

import torch

from dbsp_kernels.exchange import restore_rows, rows_of_tokens

WIDTH, BLOCK, DENSITY, WAVES = 128, 64, 0.4, 12
LARGEST_FP8 = 448.0


def in_int8(tokens: torch.Tensor) -> torch.Tensor:
    """float32[..., D], as they arrive."""
    return restore_rows(rows_of_tokens(tokens), tokens.shape[-1], torch.float32)


def in_fp8(tokens: torch.Tensor) -> torch.Tensor:
    """The same in float8_e4m3fn, as xDiT and LightX2V send it."""
    scale = tokens.abs().amax(dim=-1, keepdim=True) / LARGEST_FP8
    return (tokens / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale


WAYS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "int8, k less its mean": (in_int8, True),
    "int8": (in_int8, False),
    "fp8 e4m3, k less its mean": (in_fp8, True),
    "fp8 e4m3": (in_fp8, False),
}
"""By name: how tokens are rounded, and whether keys are less their mean."""


def relative_errors(tokens: int, heads: int, outliers: bool) -> dict[str, float]:
    """By way: |rounded − exact| / |exact| (Frobenius), mean over heads."""
    sums = dict.fromkeys(WAYS, 0.0)
    for head in range(heads):
        q, k, v = drawn(tokens, head, outliers)
        allowed, mean = _mask(q, k), k.mean(dim=0, keepdim=True)
        exact = _attention(q, k, v, allowed)
        for name, (rounded, centred) in WAYS.items():
            out = _attention(rounded(q), rounded(k - mean if centred else k), rounded(v), allowed)
            sums[name] += float((out - exact).norm() / exact.norm()) / heads
    return sums


def drawn(tokens: int, seed: int, outliers: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws q, k and v of a head, float32[tokens, WIDTH], each number one of bfloat16."""
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draws)

    position = torch.linspace(0, 2 * math.pi, tokens)[:, None]
    waves = torch.cos(position * torch.arange(1, WAVES + 1) + 2 * math.pi * torch.rand(WAVES, generator=draws))
    content = 0.5 * waves @ normal(WAVES, WIDTH)
    q, k = (content + 0.5 * normal(tokens, WIDTH) for _ in range(2))
    v = normal(tokens, WIDTH) + 0.5 * normal(1, WIDTH)
    if outliers:
        k[:, torch.randperm(WIDTH, generator=draws)[:6]] += 12 * normal(1, 6)
    return q.bfloat16().float(), k.bfloat16().float(), v.bfloat16().float()


def _mask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """bool[tokens, tokens]"""
    blocks = len(q) // BLOCK
    pooled = [t[: blocks * BLOCK].unflatten(0, (blocks, BLOCK)).mean(dim=1) for t in (q, k - k.mean(dim=0))]
    chosen = (pooled[0] @ pooled[1].T).topk(max(1, round(DENSITY * blocks)), dim=1).indices
    dense = torch.zeros(blocks, blocks, dtype=torch.bool).scatter_(1, chosen, True)
    block_of = (torch.arange(len(q)) // BLOCK).clamp(max=blocks - 1)
    return dense[block_of][:, block_of]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.double()[None, None] for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed)


def main() -> None:
    """Prints the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    found = {
        name: relative_errors(args.tokens, args.heads, outliers)
        for name, outliers in (("plain", False), ("outliers", True))
    }
    if args.json:
        print(json.dumps({"tokens": args.tokens, "heads": args.heads, "relative_errors": found}))
        return
    print(f"{args.heads} heads of {args.tokens} tokens, D {WIDTH}, density {DENSITY}: relative error of rounding")
    print(f"{'':28s}{'plain keys':>12s}{'outliers':>12s}")
    for way in WAYS:
        print(f"{way:28s}{found['plain'][way]:12.1e}{found['outliers'][way]:12.1e}")


if __name__ == "__main__":
    main()
