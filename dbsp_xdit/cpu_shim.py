"""xfuser without an accelerator, for demonstrations and tests: real processes, real wrappers, gloo instead of NCCL.

xfuser refuses to be imported on such a machine. With `--sp-backend dbsp`, and only where torch finds no accelerator,
this answers the questions that xfuser asks CUDA. Attention itself is db-SP's own. It replaces only these:
- xfuser.envs: no CUDA, and no CUDA version; gloo as the backend; yunchang counts as installed, which it is
- placement of the pipeline: nothing to move
- torch.backends.cudnn: absent; builds for CUDA claim to have it also where there is no GPU, and xfuser would use it
- torch.cuda.Event and torch.cuda.synchronize: the host's clock, and nothing to wait for
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from dbsp_core.utils.process import log
from dbsp_diffusers.patching import PatchSet

__all__ = ["cpu_patches"]


def cpu_patches(patches: PatchSet) -> dict[str, Callable[[ModuleType, PatchSet], None]]:
    """Changes to make after each of these modules is imported; none where there is an accelerator."""
    if torch.accelerator.is_available():
        return {}
    log.info("no accelerator found: running xfuser on the CPU with gloo")
    patches.set_attribute(torch.backends.cudnn, "is_available", lambda: False)
    patches.set_attribute(torch.cuda, "Event", HostEvent)
    patches.set_attribute(torch.cuda, "synchronize", lambda *_: None)
    return {
        "xfuser.envs": _envs,
        "xfuser.model_executor.models.runner_models.loading.placement": _placement,
    }


def _envs(module: ModuleType, patches: PatchSet) -> None:
    patches.set_attribute(module, "_is_cuda", lambda: False)  # it asks how torch was built, not which devices exist
    patches.set_attribute(module, "get_device_version", lambda: None)
    patches.set_attribute(module, "get_torch_distributed_backend", lambda: "gloo")
    packages = module.PACKAGES_CHECKER.get_packages_info()
    packages["has_long_ctx_attn"] = True
    patches.on_detach(lambda: packages.update(has_long_ctx_attn=False))


def _placement(module: ModuleType, patches: PatchSet) -> None:
    patches.set_attribute(module, "place_pipeline_components", lambda loader: None)


class HostEvent:
    """Times with the host's clock what torch.cuda.Event times on a stream."""

    def __init__(self, **_: Any) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Returns at once: the host has done what it recorded."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds until `end`."""
        return (end._time - self._time) * 1e3
