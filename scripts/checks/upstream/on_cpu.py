"""What lets the suites' own tests of GPUs run on processes of one CPU, with gloo. Nothing where there is a GPU.

Stood in for, all of it:
- diffusers: its marker that skips parallel tests without several GPUs, its table of devices and backends, and torch's
  answer to which accelerator there is in the ranks that these tests spawn
- xfuser: what `dbsp_xdit.cpu_shim` lists
- para-attn: torch.cuda's answers to whether and how many, tensors made "on cuda", and spawned processes, which are
  forked so that they have all this too
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.overrides import TorchFunctionMode

__all__ = ["prepare_para", "prepare_rank", "prepare_suite", "prepare_xfuser"]

RANKS = 2
DIFFUSERS = "tests.testing_utils"


def prepare_suite(in_rank: Callable[..., None]) -> None:
    """Before diffusers' tests are collected: parallel ones are run, and their ranks begin with `in_rank`."""
    if torch.accelerator.is_available():
        return
    spawn = torch.multiprocessing.spawn

    def spawn_prepared(function: Callable[..., None], args: tuple[Any, ...] = (), **kwargs: Any) -> Any:
        return spawn(in_rank, (function, *args), **kwargs)

    torch.multiprocessing.spawn = spawn_prepared
    if DIFFUSERS in sys.modules:
        utils = sys.modules[DIFFUSERS]
        need_gpus = utils.require_torch_multi_accelerator
        utils.require_torch_multi_accelerator = lambda test: (
            test if test.__module__.endswith(".parallelism") else need_gpus(test)
        )


def prepare_rank(function: Callable[..., None]) -> None:
    """In a rank, before the suite's `function` runs."""
    if torch.accelerator.is_available():
        return
    devices = getattr(sys.modules[function.__module__], "DEVICE_CONFIG", None)
    if devices is not None:
        devices["cpu"] = {"backend": "gloo", "module": SimpleNamespace(set_device=lambda rank: None)}
    torch._C._get_accelerator = lambda *_: torch.device("cpu")
    torch.accelerator.device_count = lambda: RANKS
    torch.set_num_threads(1)


def prepare_xfuser(enabled: bool) -> None:
    """Before xfuser is imported: with all of db-SP's patches, or only with those that make it work without a GPU."""
    from dbsp_diffusers.patching import PatchSet
    from dbsp_start.import_hook import after_import
    from dbsp_xdit.cpu_shim import cpu_patches
    from dbsp_xdit.patches import install, undoable

    if enabled:
        install(active=True)
    else:
        patches = PatchSet()
        after_import(undoable(cpu_patches(patches), patches))


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
