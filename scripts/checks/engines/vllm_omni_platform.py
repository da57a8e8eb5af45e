"""A stand-in where hardware is missing: a CPU platform for vLLM-Omni, which ships none, by its own entry point; and
attention by torch's SDPA on it, as the engine's own."""

from __future__ import annotations

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


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
        return 1

    @classmethod
    def set_device(cls, device):
        pass

    @classmethod
    def synchronize(cls):
        pass


def platform() -> str:
    return f"{__name__}.OmniCpuPlatform"


def __getattr__(name: str):
    """SdpaBackend, made late: backends ask for the platform when they are imported."""
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
