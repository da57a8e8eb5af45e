"""Source `vsa` against FastVideo's kernel package: tiles, masks and the coarse branch, in Triton's interpreter.

Its operator `video_sparse_attn` runs as it is, but for block-sparse attention itself, which needs a GPU: that keeps
the mask and returns zeros, so that the operator returns its coarse branch alone.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dbsp_core.sources import LocalQK, MaskRequest, VsaSource
from scripts.checks.upstream.yardsticks.finding import Finding, compared, stand_in

__all__ = ["findings"]

NOT_NEEDED = (
    *("block_sparse_attn", "block_sparse_attn_256", "block_sparse_attn_varlen", "turbodiffusion_ops", "vmoba"),
    "triton_kernels.st_attn_triton",
)
"""Of its modules: kernels of other operators, and of attention itself."""
HEADS, WIDTH, TILE = 3, 64, (4, 4, 4)
SIZES = (((8, 12, 16), 0.8), ((9, 14, 18), 0.7), ((5, 30, 52), 0.9))
CLOSE = 1e-5
"""Of coarse branches; both are sums in float32."""


def findings(folder: Path) -> Iterator[Finding]:
    kernels, utilities, seen = _load(folder / "fastvideo-kernel" / "python" / "fastvideo_kernel")
    for thw, sparsity in SIZES:
        generator = torch.Generator().manual_seed(sum(thw))
        q, k, v, gate = (torch.randn(1, HEADS, math.prod(thw), WIDTH, generator=generator) for _ in range(4))
        ours = VsaSource(sparsity=sparsity, tile=TILE).mask(
            MaskRequest(0, HEADS, thw), LocalQK.alone(q, k, v=v, gate=gate)
        )
        order = utilities.get_tile_partition_indices(thw, TILE, q.device)
        tiles = tuple(-(-size // side) for size, side in zip(thw, TILE, strict=True))
        lengths = utilities.construct_variable_block_sizes(thw, tiles, q.device)
        place = torch.cat([64 * n + torch.arange(length) for n, length in enumerate(lengths.tolist())])
        padded = [torch.zeros(1, HEADS, 64 * len(lengths), WIDTH) for _ in range(4)]
        for one, tokens in zip(padded, (q, k, v, gate), strict=True):
            one[:, :, place] = tokens[:, :, order]
        count = max(1, math.ceil((1 - sparsity) * len(lengths)))
        branch = kernels.video_sparse_attn(*padded[:3], lengths, lengths, count, 4, padded[3])[:, :, place]
        what = f"vsa, thw {thw}, sparsity {sparsity}"
        yield compared("FastVideo", folder, what, seen.pop()[0].numpy(), ours.bits.numpy())
        added = torch.zeros_like(q)
        assert ours.coarse is not None
        ours.coarse.add_to(added)
        near = (added[:, :, order] - branch).abs() <= CLOSE
        what += f": coarse branch times gate, to {CLOSE:.0e}"
        yield compared("FastVideo", folder, what, torch.ones_like(near).numpy(), near.numpy(), unit="numbers")


def _load(package: Path) -> tuple[Any, Any, list[torch.Tensor]]:
    """Its operators, its helpers for tiles, and the masks that block-sparse attention is given from now on."""
    seen: list[torch.Tensor] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, _: Any) -> list[torch.Tensor]:
        seen.append(mask)
        return [torch.zeros_like(q)]

    os.environ["TRITON_INTERPRET"] = "1"
    stand_in(package.parent, *(f"{package.name}.{name}" for name in NOT_NEEDED))
    kernels = importlib.import_module(f"{package.name}.ops")
    kernels.block_sparse_attn = attend  # type: ignore[attr-defined]
    return kernels, importlib.import_module(f"{package.name}.vsa_utils"), seen
