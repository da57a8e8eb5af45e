"""Our predictor next to xfuser's own Triton one, under Triton's interpreter; run as a program, prints JSON.

xfuser's module is loaded by its file: importing the package needs an accelerator.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from dbsp_core.sources import LocalQK
from dbsp_kernels.prediction import pool_rows, sum_tokens
from dbsp_kernels.triton.prediction import pool_rows_triton, sum_tokens_triton
from tests.core.sources.predicted.sparge_cases import SpargeCase
from tests.core.sources.predicted.sparge_reference import predict

CASES = (
    SpargeCase((4, 4, 16), heads=2, settings={"block_q": 32, "block_k": 16, "cdf": 0.6, "similarity": 0.2}),
    SpargeCase((7, 9, 5), heads=1, batch=2, settings={"block_q": 16, "block_k": 32, "cdf": 0.8, "similarity": 0.1}),
    SpargeCase(
        (2, 8, 16),
        heads=1,
        settings={"block_q": 16, "block_k": 16, "cdf": 0.5, "similarity": -1, "attention_sink": True},
    ),
)
# The twin normalises and multiplies in float16, and sums probabilities in float32.
SIMILARITY_MARGIN, CDF_MARGIN = 5e-3, 1e-5


def xfuser_module() -> ModuleType:
    (package,) = importlib.util.find_spec("xfuser").submodule_search_locations
    path = Path(package) / "core" / "sparge_attention" / "block_mask.py"
    spec = importlib.util.spec_from_file_location("xfuser_block_mask", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(twin: ModuleType, case: SpargeCase) -> dict[str, float]:
    q, k = case.tensors()
    mask = case.source.mask(case.request, LocalQK.alone(q, k))
    source = case.source
    theirs = twin.get_block_map_meansim(
        q, k, False, source.block_q, source.block_k, source.similarity, source.cdf, source.attention_sink
    )
    different = mask.bits.numpy() != theirs.flatten(0, 1).numpy()
    _, margins = predict(*case.by_head(), mask.grid, cdf=source.cdf, similarity=source.similarity)
    similar_k = margins.similar_k.min(axis=1)[:, None, None] < SIMILARITY_MARGIN  # changes the whole row's softmax
    near = (margins.chosen < CDF_MARGIN) | (margins.similar_q < SIMILARITY_MARGIN)[:, :, None] | similar_k
    return {
        "density": mask.density,
        "blocks": different.size,
        "different": int(different.sum()),
        "unexplained": int((different & ~near).sum()),
        "near": float(np.mean(near)),
    }


def same_sums(width: int, dtype: torch.dtype) -> bool:
    """Returns whether the Triton kernel's sums are bitwise torch's: strides, gaps, empty and long blocks, NaN."""
    generator = torch.Generator().manual_seed(width)
    tokens = torch.randn(2, 90, 3, width, generator=generator) * torch.logspace(-6, 3, 90)[:, None, None]
    tokens[0, 5, 1], tokens[1, 7, 2, 0] = 0.0, torch.nan
    tokens = tokens.to(dtype).transpose(1, 2)  # the layout of diffusers: [B, n, H, D]
    order = torch.randperm(90, generator=generator)[:80]
    first = torch.tensor([0, 40, 40, 73, 80])
    sums, lengths = sum_tokens_triton(tokens, order, first), torch.tensor([40, 1, 33, 7])
    rows = pool_rows_triton(sums[:, :, 1:], lengths[1:]), pool_rows(sums[:, :, 1:], lengths[1:])
    return torch.equal(sums, sum_tokens(tokens, order, first)) and torch.equal(*rows)


if __name__ == "__main__":
    torch.manual_seed(0)
    module = xfuser_module()
    same = [same_sums(width, dtype) for width in (1, 3, 16, 24) for dtype in (torch.float32, torch.bfloat16)]
    cases = [compare(module, case) for case in CASES]
    print(json.dumps({"cases": cases, "kernel equals torch": same}))
