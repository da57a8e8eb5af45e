"""Source `nabla` against the `nablaT_v2` of the installed diffusers, as its Kandinsky 5 pipeline calls it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from dbsp_core.masks.grid import video_order
from dbsp_core.sources import LocalQK, MaskRequest, NablaSource, SpargeSource
from scripts.checks.upstream.upstream_refs.finding import Finding, compared

BLOCK = 64
CASES = (
    ((3, 16, 24), 4, 24, 0.5, (1, 1, 1)),
    ((5, 32, 48), 4, 64, 0.9, (3, 3, 3)),
    ((11, 32, 48), 2, 128, 0.9, (11, 3, 3)),
    ((16, 32, 48), 2, 64, 0.8, (5, 1, 3)),
)
"""Token grid, heads, width of a head, P and (wT, wH, wW)."""


def findings(folder: Path) -> Iterator[Finding]:
    from diffusers.models.transformers.transformer_kandinsky import fractal_flatten, nablaT_v2
    from diffusers.pipelines.kandinsky5.pipeline_kandinsky import Kandinsky5T2VPipeline

    def found(*parts: object, **more: str) -> Finding:
        return replace(compared("diffusers", folder, *parts, **more), commit=version("diffusers"))  # type: ignore[arg-type]

    for thw, heads, width, cdf, window in CASES:
        tokens = math.prod(thw)
        what = f"thw {thw}, P {cdf}, window {window}"
        order = torch.from_numpy(video_order("tile:1x8x8", thw).copy())
        numbers = torch.arange(tokens).view(1, *thw, 1)
        theirs = fractal_flatten(numbers, numbers, (1, *thw), block_mask=True)[0].flatten()
        same = (theirs == order).numpy()
        yield found(f"{what}: order of tokens", same, same | True, unit="tokens")
        for dtype in (torch.float32, torch.bfloat16):
            q, k = (x.to(dtype) for x in _similar_in_blocks(tokens, heads, width, order))
            near = Kandinsky5T2VPipeline.fast_sta_nabla(
                thw[0], thw[1] // 8, thw[2] // 8, *window, device=torch.device("cpu")
            )
            in_order = (x[:, :, order].transpose(1, 2) for x in (q, k))
            own = nablaT_v2(*in_order, near[None, None], thr=cdf).to_dense()[0].bool()
            request, local = MaskRequest(0, heads, thw), LocalQK.alone(q, k)
            ours = NablaSource(cdf=cdf, window=window).mask(request, local).bits
            note = "" if dtype == torch.float32 else "theirs adds up a row's probabilities in bfloat16; ours exactly"
            yield found(f"{what}: {str(dtype)[6:]}", own, ours, note=note)
            if dtype == torch.float32:
                shorter = SpargeSource(cdf=cdf, similarity=-1.0, token_order="tile:1x8x8").mask(request, local).bits
                note = "without the block that crosses P, as a negative control"
                yield found(f"{what}: sparge | window", own, shorter | near, note=note)


def _similar_in_blocks(tokens: int, heads: int, width: int, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws q and k, float32[1, heads, tokens, width], whose blocks have means that set some apart."""
    draws = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(1, heads, tokens, width, generator=draws) for _ in range(2))
    for x in (q, k):
        means = torch.randn(1, heads, tokens // BLOCK, width, generator=draws)
        means *= torch.linspace(0.5, 1.5, heads)[:, None, None]
        x[:, :, order] += means.repeat_interleave(BLOCK, 2)
    return q, k
