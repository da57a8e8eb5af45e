"""A stub where hardware is missing: a CPU platform for vLLM-Omni, which ships none, by its own entry point; and
attention by torch's SDPA on it, as the engine's own."""

from __future__ import annotations

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class _Stream:
    """Part of `torch.Stream` that a worker uses."""

    def __init__(self, device):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass


class OmniCpuPlatform(OmniPlatform, CpuPlatform):
    _omni_enum = OmniPlatformEnum.OOT
    dist_backend = "gloo"

    @classmethod
    def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=False):
        from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

        if selected_backend is None:
            return f"{__name__}.SdpaBackend"
        return DiffusionAttentionBackendEnum[selected_backend.upper()].get_path()

    @classmethod
    def get_torch_device(cls, local_rank=None):
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls):
        return 4

    @classmethod
    def get_diffusion_worker_cls(cls):
        """Workers pass on what they made by a stream next to the default one; a CPU has none, and runs in order."""
        from vllm_omni.diffusion.worker import diffusion_worker

        torch.accelerator.current_accelerator = lambda *_: cls.get_torch_device()
        torch.Stream = _Stream
        pack = diffusion_worker.pack_diffusion_output_shm
        diffusion_worker.pack_diffusion_output_shm = lambda output, d2h_stream=None: pack(output)
        return super().get_diffusion_worker_cls()

    @classmethod
    def empty_cache(cls):
        pass

    @classmethod
    def reset_peak_memory_stats(cls, *_):
        pass

    @classmethod
    def max_memory_allocated(cls, *_):
        return 0

    @classmethod
    def max_memory_reserved(cls, *_):
        return 0

    @classmethod
    def is_initialized(cls):
        return True

    @classmethod
    def current_device(cls):
        return 0

    @classmethod
    def get_free_memory(cls, device=None):
        return 2**33

    @classmethod
    def supports_torch_inductor(cls):
        return False

    @classmethod
    def set_device(cls, device):
        pass

    @classmethod
    def synchronize(cls):
        pass


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
