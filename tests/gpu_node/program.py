"""A Python program as one rank of a node with simulated devices: `python -m tests.gpu_node.program MODULE ARGUMENTS`.

The rank's device is LOCAL_RANK's, as torchrun sets it; the program sees all devices, and a context on another one is
an error. Groups over NCCL are carried over gloo.
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.gpu_node.node import start_devices


def become_rank() -> None:
    """Gives this process devices, of which it may touch LOCAL_RANK's. torch must not be imported yet."""
    start_devices()
    from tests.gpu_node import streams
    from tests.gpu_node.process_groups import carry_nccl_over_gloo

    carry_nccl_over_gloo()
    streams.own(int(os.environ.get("LOCAL_RANK", "0")))


if __name__ == "__main__":
    sys.orig_argv[:] = [sys.executable, "-m", *sys.argv[1:]]  # by which db-SP knows xfuser's runner
    sys.argv[:] = sys.argv[1:]
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    become_rank()
    import torch

    torch._import_device_backends()  # now: they look for devices
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
