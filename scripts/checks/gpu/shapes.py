"""Kernels at the other shapes with heads of 64 and more that are shipped, largest first, and at odd ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scripts.checks.gpu.kernels import of_shapes, of_tokens
from scripts.checks.gpu.results import Case
from scripts.checks.gpu.setting import Setting


def cases(setting: Setting) -> Iterator[Case]:
    yield from of_shapes(setting, setting.other_shapes)
    if not setting.dry:
        yield from of_tokens(setting, (64, 80), (torch.bfloat16, torch.float16))
