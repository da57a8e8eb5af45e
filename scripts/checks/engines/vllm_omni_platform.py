"""A stub where hardware is missing: a CPU platform for vLLM-Omni, which ships none, by its own entry point; and
attention by torch's SDPA on it, as the engine's own."""

from __future__ import annotations

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class _Stream:
    """Part of `torch.Stream` that a worker uses."""

    def __init__(self, device):
        self.wait_event = self.synchronize = lambda *_: None


class OmniCpuPlatform(OmniPlatform, CpuPlatform):
    _omni_enum = OmniPlatformEnum.OOT
    dist_backend = "gloo"

    @classmethod
    def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=False):
        from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

        if selected_backend is None:
            return f"{__name__}.SdpaBackend"
        return DiffusionAttentionBackendEnum[selected_backend.upper()].get_path()

    get_torch_device = classmethod(lambda cls, local_rank=None: torch.device("cpu"))
    get_device_count = classmethod(lambda cls: 4)

    @classmethod
    def get_diffusion_worker_cls(cls):
        """Workers pass on what they made by a stream next to the default one; a CPU has none, and runs in order."""
        from vllm_omni.diffusion.worker import diffusion_worker

        torch.accelerator.current_accelerator = lambda *_: cls.get_torch_device()
        torch.Stream = _Stream
        pack = diffusion_worker.pack_diffusion_output_shm
        diffusion_worker.pack_diffusion_output_shm = lambda output, d2h_stream=None: pack(output)
        return super().get_diffusion_worker_cls()

    empty_cache = reset_peak_memory_stats = set_device = synchronize = classmethod(lambda cls, *_: None)
    max_memory_allocated = max_memory_reserved = current_device = classmethod(lambda cls, *_: 0)
    is_initialized = classmethod(lambda cls: True)
    supports_torch_inductor = classmethod(lambda cls: False)
    get_free_memory = classmethod(lambda cls, device=None: 2**33)


def platform() -> str:
    return f"{__name__}.OmniCpuPlatform"


def __getattr__(name: str):
    """Makes SdpaBackend late: backends ask for the platform when they are imported."""
    if name != "SdpaBackend":
        raise AttributeError(name)
    from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl

    class Impl(SDPAImpl):
        def forward(self, query, key, value, attn_metadata=None):
            return self._forward_impl(query, key, value, attn_metadata)

    class SdpaBackend(SDPABackend):
        @staticmethod
        def get_impl_cls():
            return Impl

    globals()[name] = SdpaBackend
    return SdpaBackend
