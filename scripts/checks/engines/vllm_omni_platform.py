"""A stub where hardware is missing: a CPU platform for vLLM-Omni, which ships none, by its own entry point; and
attention by torch's SDPA on it, as the engine's own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


def _always(value: Any) -> Any:
    """Makes a class method that returns the same for any arguments."""
    return classmethod(lambda cls, *_, **__: value)


class OmniCpuPlatform(OmniPlatform, CpuPlatform):
    _omni_enum = OmniPlatformEnum.OOT
    dist_backend = "gloo"
    get_torch_device = _always(torch.device("cpu"))
    get_device_count = _always(4)
    get_free_memory = _always(2**33)
    max_memory_allocated = max_memory_reserved = current_device = _always(0)
    empty_cache = reset_peak_memory_stats = set_device = synchronize = _always(None)
    is_initialized = _always(True)
    supports_torch_inductor = _always(False)

    @classmethod
    def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=False):
        from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

        if selected_backend is None:
            return f"{__name__}.SdpaBackend"
        return DiffusionAttentionBackendEnum[selected_backend.upper()].get_path()

    @classmethod
    def get_diffusion_worker_cls(cls):
        """Workers pass on what they made by a stream next to the default one; a CPU has none, and runs in order."""
        from vllm_omni.diffusion.worker import diffusion_worker

        torch.accelerator.current_accelerator = lambda *_: cls.get_torch_device()
        torch.Stream = mock.Mock
        pack = diffusion_worker.pack_diffusion_output_shm
        diffusion_worker.pack_diffusion_output_shm = lambda output, d2h_stream=None: pack(output)
        return super().get_diffusion_worker_cls()


def platform() -> str:
    return f"{__name__}.OmniCpuPlatform"


def __getattr__(name: str):
    """Makes SdpaBackend late: backends ask for the platform when they are imported."""
    if name != "SdpaBackend":
        raise AttributeError(name)
    from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl

    SDPAImpl.forward = SDPAImpl._forward_impl  # which `forward` finds for each platform that it knows
    globals()[name] = SDPABackend
    return SDPABackend
