"""Stubs of what LightX2V imports or calls and a CPU does not have.

Packages for sound and video files and kernels for GPUs, which are imported only; pinned memory, and what
torch has for a GPU's memory and seeds; see also `lightx2v_device`.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers.utils

from scripts.checks.engines.reference import stub_for


def put_in_place() -> None:
    """Installs the stubs, before anything of LightX2V is imported."""
    transformers.utils.is_torchvision_available()  # remembers that there is none
    stub_for("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io")
    stub_for("torchvision.utils", "torchvision.transforms.v2", "torchaudio", "torchaudio.functional")
    stub_for("torchaudio.transforms", "decord", "cv2", "flash_attn", "flash_attn.flash_attn_interface")
    torch.empty = _without_pinning
    for count in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(torch.cpu, count, lambda *_: 0)
    torch.cpu.mem_get_info = lambda *_: (1 << 40, 1 << 40)  # type: ignore[attr-defined]
    for nothing in ("empty_cache", "manual_seed", "manual_seed_all", "reset_peak_memory_stats"):
        setattr(torch.cpu, nothing, lambda *_: None)


def in_float32() -> None:
    """Replaces what BF16 represents, as LightX2V has no word for float32 and errors of 1e-6 would be lost.

    After its plug-ins are loaded.
    """
    from lightx2v.utils import envs

    envs.DTYPE_MAP["BF16"] = torch.float32


_empty = torch.empty


def _without_pinning(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    return _empty(*sizes, **options)
