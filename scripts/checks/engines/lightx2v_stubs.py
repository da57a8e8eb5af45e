"""Stubs of what LightX2V imports or calls and a CPU does not have.

Packages for sound and video files and kernels for GPUs, which are imported only; pinned memory, and what
torch has for a GPU's memory and seeds; and a CPU device, which LightX2V does not ship, by its own entry point.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from scripts.checks.engines.reference import stub_for, stub_for_torchvision


def put_in_place() -> None:
    """Installs the stubs, before anything of LightX2V is imported."""
    stub_for_torchvision()
    stub_for("torchaudio", "decord", "cv2", "flash_attn")
    empty = torch.empty
    torch.empty = lambda *sizes, pin_memory=False, **options: empty(*sizes, **options)  # not pinned
    for count in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(torch.cpu, count, lambda *_: 0)
    torch.cpu.mem_get_info = lambda *_: (1 << 40, 1 << 40)
    for nothing in ("empty_cache", "manual_seed", "manual_seed_all", "reset_peak_memory_stats"):
        setattr(torch.cpu, nothing, lambda *_: None)


def in_float32() -> None:
    """Replaces what BF16 represents, after plug-ins are loaded: in it, errors of 1e-6 would be lost."""
    from lightx2v.utils import envs

    envs.DTYPE_MAP["BF16"] = torch.float32


def register() -> None:
    from lightx2v_platform.registry_factory import PLATFORM_DEVICE_REGISTER

    @PLATFORM_DEVICE_REGISTER("cpu")
    class CpuDevice:
        name = "cpu"

        @staticmethod
        def init_device_env() -> None: ...

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def get_device() -> str:
            return "cpu"

        @staticmethod
        def init_parallel_env() -> None:
            dist.init_process_group("gloo")
