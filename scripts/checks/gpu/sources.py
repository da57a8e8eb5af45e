"""Every mask source on one rank: each attention against attention written out, predicted blocks against the CPU's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dbsp_core import SequenceGroup
from dbsp_core.sources import LocalQK
from scripts.checks.gpu.results import Case, Row
from scripts.checks.gpu.sessions import (
    SMALL,
    TINY,
    Sizes,
    every_mask,
    inputs,
    mask_of,
    session_of,
    write_mask_files,
    written_out,
)
from scripts.checks.gpu.setting import MOST_ERROR, Setting
from tests.kernels.packed_inputs import relative_error


def cases(setting: Setting) -> Iterator[Case]:
    sizes = TINY if setting.dry else SMALL
    names = ("window",) if setting.simulated else every_mask(Path())
    for dtype in (torch.float32,) if setting.dry else (torch.bfloat16, torch.float32):
        for name in names:
            yield Case(f"{name}, {str(dtype)[6:]}", partial(one_source, setting, sizes, name, dtype))


@torch.no_grad()
def one_source(setting: Setting, sizes: Sizes, name: str, dtype: torch.dtype) -> Iterator[Row]:
    """Runs two denoising steps of each layer."""
    with tempfile.TemporaryDirectory() as folder:
        write_mask_files(sizes, Path(folder))
        mask = every_mask(Path(folder))[name]
        session = session_of(sizes, SequenceGroup(0, 1), "U1R1", mask)
        worst = otherwise = 0.0
        for step in range(2):
            session.begin(sizes.video, timestep=900.0 - step, device=setting.device)
            for layer in range(sizes.layers):
                tensors = inputs(setting.device, sizes, dtype, seed=10 * step + layer)
                error, differing = one_attention(session, sizes, layer, step, tensors)
                worst, otherwise = max(worst, error), otherwise + differing
            session.end()
        session.flush()
    yield Row("largest error of an attention", worst, "‖·‖", MOST_ERROR[dtype])
    if session.config.mask.changes == "per_call":
        yield Row("blocks predicted otherwise than on the CPU", otherwise, "", 0.0)


def one_attention(
    session: Any, sizes: Sizes, layer: int, step: int, tensors: list[torch.Tensor]
) -> tuple[float, float]:
    """Returns the error of an attention, and how many blocks are predicted otherwise than on the CPU."""
    q, k, v, gate = tensors
    out = session.attend(layer, q, k, v, gate=gate)
    request = sizes.request(layer, step)
    used = mask_of(session, request, LocalQK.alone(q, k, None, v, gate))
    error = relative_error(out, written_out(q, k, v, used))
    if session.config.mask.changes != "per_call":
        return error, 0.0
    on_cpu = mask_of(session, request, LocalQK.alone(q.cpu(), k.cpu(), None, v.cpu(), gate.cpu()))
    return error, float((on_cpu.bits != used.bits.cpu()).sum())
