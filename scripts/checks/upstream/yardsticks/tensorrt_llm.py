"""Source `sol` against TensorRT-LLM's predictor for Sol-Attn, whose operations on a CPU are torch's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dbsp_core.sources import LocalQK, MaskRequest, SolSource
from scripts.checks.upstream.yardsticks.finding import Finding, compared

__all__ = ["findings"]

KERNELS = "tensorrt_llm/_torch/visual_gen/attention_backend/sparse/sol/kernels.py"
HEADS, WIDTH, THW = 4, 128, (5, 30, 52)
SETTINGS = ((2.0, "diag"), (1.0, "diag"), (0.5, "diag"), (2.0, "exact"), (1.0, "exact"))
ROUNDED = "theirs rounds pooled keys to bfloat16, as its GPU kernels need them; ours keeps float32"


def findings(folder: Path) -> Iterator[Finding]:
    spec = importlib.util.spec_from_file_location("sol_kernels", folder / KERNELS)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(folder / KERNELS)
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    for dtype, rounded in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2):
        q, k = (t.to(dtype) for t in _smooth_tokens())
        for tau, kind in SETTINGS:
            source = SolSource(tau=tau, thresh_type=kind)  # type: ignore[arg-type]
            ours = source.mask(MaskRequest(0, HEADS, THW), LocalQK.alone(q, k)).bits
            theirs = _theirs(kernels, q, k, rounded, tau, kind)
            what = f"sol, tau {tau:g}, {kind}, q and k {_name(dtype)}, pooled keys {_name(rounded)}"
            yield compared("TensorRT-LLM", folder, what, theirs, ours, ROUNDED if rounded != torch.float32 else "")


def _theirs(kernels: Any, q: torch.Tensor, k: torch.Tensor, rounded: torch.dtype, tau: float, kind: str) -> np.ndarray:
    """bool[H, nq, nk] from q and k [1, H, tokens, D]."""
    blocks = kernels.num_blocks(q.shape[2], 64)
    pooled_q, pooled_k = (torch.empty(1, blocks, HEADS, WIDTH, dtype=dtype) for dtype in (torch.float32, rounded))
    for tokens, out in ((q, pooled_q), (k, pooled_k)):
        kernels.block_pool(tokens.transpose(1, 2).contiguous(), out, block_size=64, reduce="mean")
    setting = {"tau": tau, "sm_scale": WIDTH**-0.5, "thresh_type": kind}
    threshold = kernels.block_thresholds(pooled_q, pooled_k, **setting)
    words = torch.empty(1, HEADS, blocks, kernels.num_words(blocks), dtype=torch.uint32)
    kernels.select_exact_blocks(pooled_q, pooled_k, threshold, words, sm_scale=WIDTH**-0.5)
    bits = np.unpackbits(words[0].numpy().view(np.uint8), axis=-1, bitorder="little")
    return bits[..., :blocks].astype(bool)


def _smooth_tokens() -> list[torch.Tensor]:
    """q and k, [1, H, tokens, D], that change little from a place to the next; each head's by its own strength."""
    draws = np.random.default_rng(0)
    place = np.indices(THW).reshape(3, -1) / 6
    waves = draws.normal(size=(2, HEADS, WIDTH, 3)) @ place + draws.uniform(0, 7, (2, HEADS, WIDTH, 1))
    tokens = np.sin(waves).swapaxes(-1, -2) * np.linspace(0.5, 2, HEADS)[:, None, None]
    tokens += 0.3 * draws.normal(size=tokens.shape)
    return list(torch.from_numpy(tokens).float()[:, None])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
