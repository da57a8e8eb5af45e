"""Tables made on the host, on their way to the device."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["on_device", "to_device"]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device; from pinned memory, so that the host need not wait for what the device is doing."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor itself where it is on the device, else a copy; from the host as `to_device`."""
    on_host = tensor.device.type == "cpu" and device.type == "cuda"
    return to_device(tensor.numpy(), device) if on_host else tensor.to(device, non_blocking=True)
