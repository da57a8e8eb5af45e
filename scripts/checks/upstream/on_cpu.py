"""What lets the suites' own tests of GPUs run on processes of one CPU, with gloo. Nothing where there is a GPU.

Stood in for, all of it:
- xfuser: what `dbsp_xdit.cpu_shim` lists
- para-attn: torch.cuda's answers to whether and how many, tensors made "on cuda", and spawned processes, which are
  forked so that they have all this too
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["prepare_para", "prepare_xfuser"]

RANKS = 2


def prepare_xfuser(enabled: bool) -> None:
    """Before xfuser is imported: with all of db-SP's patches, or only with those that make it work without a GPU."""
    from dbsp_cli.import_hook import after_import
    from dbsp_diffusers.patching import PatchSet
    from dbsp_xdit.cpu_shim import cpu_patches
    from dbsp_xdit.runner import install

    if enabled:
        install(after_import)
    else:
        patches = PatchSet()
        changes = cpu_patches(patches)
        after_import({name: functools.partial(change, patches=patches) for name, change in changes.items()})


def prepare_para() -> None:
    """Before para-attn's tests are collected."""
    if torch.accelerator.is_available():
        return
    from para_attn.distributed.mp_runner import MPDistRunner

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: RANKS
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    MPDistRunner.start_method = property(lambda self: "fork")
    make_mesh = torch.distributed.init_device_mesh
    torch.distributed.init_device_mesh = lambda device, *args, **kwargs: make_mesh("cpu", *args, **kwargs)
    _CpuForCuda().__enter__()


class _CpuForCuda(TorchFunctionMode):
    """Tensors asked for on CUDA are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
