"""Attention of a session, on one rank or several, and the same attention written out on the same device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dbsp_core import BlockGrid, BlockMask, SequenceGroup, SequenceLayout, Strategy, save_mask
from dbsp_core.config import DbspConfig
from dbsp_core.masks.grid import Video
from dbsp_core.masks.steps import StepClock
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import LocalQK, MaskRequest
from tests.support.oracle import dense_attention

UNEQUAL = {"source": "callable", "function": f"{__name__}:unequal_bits", "block_q": 16, "block_k": 32}
PREDICTED = {"source": "sparge", "cdf": 0.6, "similarity": -1.0, "block_q": 32, "block_k": 16}


def unequal_bits(grid: BlockGrid, request: MaskRequest) -> np.ndarray:
    """Draws bool[heads, nq, nk]: asymmetric, unequal over heads and rows; the first head dense, some rows empty."""
    rng = np.random.default_rng(request.layer)
    head, row = rng.uniform(0.1, 0.9, (request.heads, 1, 1)), rng.uniform(0.4, 1.6, (1, grid.nq, 1))
    bits = rng.random((request.heads, grid.nq, grid.nk)) < head * row
    bits[rng.random((request.heads, grid.nq)) < 0.1] = False
    bits[0] = True
    return bits


@dataclass(frozen=True)
class Sizes:
    """A small video and the attention over it."""

    video: Video
    heads: int
    head_dim: int
    layers: int = 2

    def request(self, layer: int, step: int) -> MaskRequest:
        return MaskRequest(layer, self.heads, self.video.thw, self.video.text, step, layers=self.layers)


SMALL, TINY = Sizes(Video((4, 16, 16), 37), 8, 64), Sizes(Video((4, 4, 8), 5), 4, 16)  # on a GPU, and in a dry run


def write_mask_files(sizes: Sizes, folder: Path) -> None:
    """Writes the masks and the fitted projections that sources read."""
    grid = BlockGrid(sizes.video.tokens, sizes.video.text, 64, 64, sizes.video.thw)
    layers = [sizes.request(layer, 0) for layer in range(sizes.layers)]
    save_mask(folder / "masks.safetensors", [BlockMask(unequal_bits(grid, one), grid) for one in layers])
    shape = sizes.heads, sizes.head_dim, 8
    fitted = {f"{side}.{n}": torch.randn(shape) for side in ("query", "key") for n in range(sizes.layers)}
    save_file(fitted, folder / "fitted.safetensors")


def every_mask(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns settings of every mask source by name; some read what `write_mask_files` writes to `folder`."""
    near = {"source": "window", "window": [3, 7, 7]}
    return {
        "dense": {"source": "dense"},
        "callable": UNEQUAL,
        "file": {"source": "file", "path": str(folder / "masks.safetensors")},
        "paro": {"source": "paro", "path": str(folder / "masks.safetensors")},
        "window": {**near, "tile": [2, 4, 4], "window": [1, 3, 1], "block_q": 32, "block_k": 32},
        "radial": {"source": "radial"},
        "svg": {"source": "svg", "frames": 3},
        "synthetic": {"source": "synthetic", "density": 0.4, "block_q": 32, "block_k": 32},
        "sparge": PREDICTED,
        "sol": {"source": "sol"},
        "vsa": {"source": "vsa", "sparsity": 0.6},
        "sla": {"source": "sla", "topk": 0.4, "block_q": 64},
        "subblock": {"source": "subblock", "sparsity": 0.6},
        "cube": {"source": "cube", "topk": 0.4},
        "ssta": {"source": "ssta", "topk": 8, "tile": [2, 8, 8], "window": [1, 1, 1]},
        "lowrank": {"source": "lowrank", "path": str(folder / "fitted.safetensors"), "topk": 0.4},
        "nabla": {"source": "nabla", "cdf": 0.6, "window": [3, 1, 1]},
        "union": {"source": "union", "of": [near, {"source": "sparge", "topk": 0.3}]},
    }


def inputs(device: str, sizes: Sizes, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Draws four tensors [1, H, N, D] of all tokens: q, k, v, and a gate or the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 1, sizes.heads, sizes.video.tokens, sizes.head_dim)
    return list(torch.randn(shape, generator=generator).to(device, dtype))


def session_of(
    sizes: Sizes,
    group: SequenceGroup,
    strategy: str,
    mask: dict[str, Any],
    clock: StepClock | None = None,
    **settings: Any,
) -> AttentionSession:
    """Makes a session of `sizes.layers` layers. Collective."""
    config = DbspConfig.load({"mask": mask, "strategy": strategy, **settings})
    parts = config, group, Strategy.parse(strategy), sizes.heads, sizes.layers
    return AttentionSession(*parts, clock=clock or StepClock())


def local(full: torch.Tensor, layout: SequenceLayout, rank: int) -> torch.Tensor:
    """Returns a rank's [B, H, shard, D] of [B, H, N, D], zero at padding."""
    tokens, positions = (torch.from_numpy(one).to(full.device) for one in layout.tokens_at(rank))
    shard = full.new_zeros(*full.shape[:2], layout.shard, full.shape[3])
    shard[:, :, positions] = full[:, :, tokens]
    return shard


def whole(shards: Sequence[torch.Tensor], layout: SequenceLayout) -> torch.Tensor:
    """Returns [B, H, N, D] from each rank's [B, H, shard, D]."""
    rank, position = (torch.from_numpy(one).to(shards[0].device).long() for one in (layout.rank, layout.local))
    return torch.stack(list(shards))[rank, :, :, position].permute(1, 2, 0, 3)


def mask_of(session: AttentionSession, request: MaskRequest, tokens: LocalQK) -> BlockMask:
    """Returns the mask that a session uses for all tokens of one sample."""
    source = session.config.mask
    if source.changes == "per_call":
        return source.mask(request, tokens)
    return source.mask(request)


def expected_on_one(
    sizes: Sizes, mask: dict[str, Any], qkv: Sequence[torch.Tensor], dout: torch.Tensor
) -> list[torch.Tensor]:
    """Returns the output of the first layer's attention, and the gradients of q, k and v, on one rank in float64."""
    alone = session_of(sizes, SequenceGroup(0, 1), "U1R1", mask)
    leaves = [one.double().requires_grad_(True) for one in qkv]
    expected = written_out(*leaves, mask_of(alone, sizes.request(0, 0), LocalQK.alone(*qkv[:2])))
    expected.backward(dout.double())
    return [expected.detach(), *(leaf.grad for leaf in leaves)]


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> torch.Tensor:
    """Computes attention [1, H, N, D] in float64 by torch's own operations, differentiable; zero at empty rows."""
    absent = None if mask.absent is None else mask.absent.to(q.device)
    there = BlockMask(mask.bits.to(q.device), mask.grid, absent=absent)
    out = dense_attention(q, k, v, there, torch.arange(q.shape[2]))
    if mask.branch is not None:
        mask.branch.add_to(out)
    return out
