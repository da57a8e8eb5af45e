"""Step 1: a tiny transformer on one rank with each mask source, against attention written out on the same device."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dbsp_core import SequenceGroup
from dbsp_core.sources import LocalQK
from scripts.checks.gpu.journal import Case, Row, Skipped
from scripts.checks.gpu.model import random_transformer
from scripts.checks.gpu.sessions import SMALL, TINY, Sizes, every_mask, mask_of, session_of, written_out
from scripts.checks.gpu.setting import MOST_ERROR, Setting
from tests.kernels.packed_inputs import relative_error

POISON = True
"""Whether torch fills what it leaves uninitialised with NaN."""


def cases(setting: Setting) -> Iterator[Case]:
    sizes = TINY if setting.dry else SMALL
    folder = Path(tempfile.mkdtemp())
    yield Case("diffusers' Wan", partial(diffusers_wan, setting))
    for dtype in (torch.float32,) if setting.dry else (torch.float32, torch.bfloat16):
        for name, mask in every_mask(sizes, folder).items():
            if setting.simulated and name not in ("dense", "window", "sparge"):
                continue
            yield Case(f"{name}, {str(dtype)[6:]}", partial(one_source, setting, sizes, mask, dtype))


def one_source(setting: Setting, sizes: Sizes, mask: dict[str, Any], dtype: torch.dtype) -> Iterator[Row]:
    """Runs two denoising steps, every attention compared with the same q, k and v."""
    session = session_of(sizes, SequenceGroup(0, 1), "U1R1", mask)
    model = random_transformer(sizes.layers, sizes.heads, sizes.head_dim, 64, setting.device, dtype)
    worst = otherwise = from_sdpa = 0.0
    step = 0

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        nonlocal worst, otherwise, from_sdpa
        out = session.attend(layer, q, k, v, gate=gate)
        request = sizes.request(layer, step)
        used = mask_of(session, request, LocalQK.alone(q, k, None, v, gate))
        worst = max(worst, relative_error(out, written_out(q, k, v, used)))
        if session.config.mask.changes == "per_call":
            on_cpu = mask_of(session, request, LocalQK.alone(*(t.cpu() for t in (q, k)), None, v.cpu(), gate.cpu()))
            otherwise += float((on_cpu.bits != used.bits.cpu()).sum())
        if mask["source"] == "dense":
            from_sdpa = max(from_sdpa, relative_error(out, F.scaled_dot_product_attention(q, k, v)))
        return out

    with torch.no_grad():
        for step in range(2):
            session.begin(sizes.video, timestep=900.0 - step, device=setting.device)
            x, text = (torch.randn(1, n, sizes.heads * sizes.head_dim, dtype=dtype) for n in (sizes.video.tokens, 9))
            out = model(x.to(setting.device), text.to(setting.device), attend)
            session.end()
    session.flush()
    yield Row("largest error of an attention", worst, "‖·‖", MOST_ERROR[dtype])
    if session.config.mask.changes == "per_call":
        yield Row("blocks predicted otherwise than on the CPU", otherwise, "", 0.0)
    if mask["source"] == "dense":
        yield Row("largest difference from SDPA", from_sdpa, "‖·‖", max(1e-4, 2 * MOST_ERROR[dtype]))
    yield Row("numbers that are not finite", float((~out.isfinite()).sum()), "", 0.0)


def diffusers_wan(setting: Setting) -> Iterator[Row]:
    """Compares a tiny Wan of diffusers: dense against the same without db-SP, and sparse against the CPU."""
    if importlib.util.find_spec("diffusers") is None:
        raise Skipped("diffusers is not installed")
    from dbsp_diffusers import disable, enable
    from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs

    def run(mask: dict[str, Any] | None, device: str) -> torch.Tensor:
        model = make_tiny_transformer("wan").to(device)
        inputs = tiny_inputs("wan", (4, 8, 8))
        given = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in inputs.items()}
        if mask is not None:
            enable(model, {"mask": mask})
        with torch.no_grad():
            out = model(**given)[0]
        if mask is not None:
            disable(model)
        return out.cpu()

    alone = run(None, setting.device)
    yield Row("dense / without db-SP", relative_error(run({"source": "dense"}, setting.device), alone), "‖·‖", 1e-4)
    for mask in ({"source": "window", "window": [3, 5, 5]}, {"source": "sparge", "cdf": 0.6, "similarity": -1.0}):
        error = relative_error(run(mask, setting.device), run(mask, "cpu"))
        yield Row(f"{mask['source']} / on the CPU", error, "‖·‖", 1e-3)
