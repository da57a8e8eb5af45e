"""Makes xfuser importable without an accelerator, for demonstrations and tests with gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from dbsp_core.utils.process import log
from dbsp_diffusers.patching import PatchSet


def cpu_patches(patches: PatchSet) -> dict[str, Callable[[ModuleType, PatchSet], None]]:
    """Returns the changes to make after importing each module; none if there is an accelerator."""
    if torch.accelerator.is_available():
        return {}
    log.info("no accelerator found: running xfuser on the CPU with gloo")
    patches.set_attribute(torch.cuda, "Event", HostEvent)
    patches.set_attribute(torch.cuda, "synchronize", lambda *_: None)
    return {
        "xfuser.envs": _envs,
        "xfuser.model_executor.models.runner_models.loading.placement": lambda module, patches: patches.set_attribute(
            module, "place_pipeline_components", lambda loader: None
        ),
    }


def _envs(module: ModuleType, patches: PatchSet) -> None:
    patches.set_attribute(module, "_is_cuda", lambda: False)  # xfuser checks torch's build, not the devices
    patches.set_attribute(module, "get_device_version", lambda: None)
    patches.set_attribute(module, "get_torch_distributed_backend", lambda: "gloo")
    packages = module.PACKAGES_CHECKER.get_packages_info()
    packages["has_long_ctx_attn"] = True  # yunchang, checked only with an accelerator
    patches.on_detach(lambda: packages.update(has_long_ctx_attn=False))


class HostEvent:
    """torch.cuda.Event with the host's clock."""

    def __init__(self, **_: Any) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Does nothing, since the host is synchronous."""

    def elapsed_time(self, end: HostEvent) -> float:
        return (end._time - self._time) * 1e3
