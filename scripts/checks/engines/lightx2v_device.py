"""A stub where hardware is missing: a CPU device for LightX2V, which ships none, by its own entry point."""

from __future__ import annotations

import torch.distributed as dist


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
