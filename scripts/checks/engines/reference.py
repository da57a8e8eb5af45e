"""References of outputs: torch's own attention under the mask spread over tokens, and the same inputs."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import torch

from dbsp_core.config import DbspConfig
from dbsp_core.sources import LocalQK
from dbsp_core.sources.base import MaskRequest
from tests.support.single_process import masked_attention


def attend_under(
    mask: str,
    layer: int,
    layers: int,
    thw: tuple[int, int, int],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    text: int = 0,
    transformer: str = "transformer",
) -> torch.Tensor:
    """Computes attention of [B, tokens, H, D] in one process, text first: no plan, route or kernel of db-SP.

    Args:
        mask: What `DbspConfig.load` reads, which may have another mask for "transformer_2".
    """
    source = DbspConfig.load(mask).for_transformer(transformer).mask
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    request = MaskRequest(layer, q.shape[1], thw, text, layers=layers)
    predicted = source.changes == "per_call"
    bits = source.mask(request, LocalQK.alone(q, k)) if predicted else source.mask(request)
    return masked_attention(q, k, v, bits).transpose(1, 2)


def fill(name: str, shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draws a parameter, such that outputs are of the size of 1."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name and len(shape) == 1:
        return noise * 0.1 + (0 if name.endswith("bias") else 1)
    spread = 0.9 if len(shape) > 1 else 0.3
    return noise * spread / max(1, noise[0].numel()) ** 0.5


def inputs_of(thw: tuple[int, int, int], number: int, step: int, branch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [1, 4, T, 2H, 2W] and text [1, 7, 16] of a forward pass, equal on all ranks."""
    generator = torch.Generator().manual_seed(1000 * number + 10 * step)
    t, h, w = thw
    latents = torch.randn(1, 4, t, 2 * h, 2 * w, generator=generator)
    return latents, torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(branch))


class _Named(type):
    """A class with any attribute, whose value is its name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def _placeholder(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Named(name, (), {})


def stub_for(*names: str) -> None:
    """Makes empty modules of packages that PyPI has for GPUs alone, and that these runs import and do not use."""
    for name in names:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        module.__file__ = __file__
        module.__version__ = "0.28"  # type: ignore[attr-defined]  # transformers compares it
        module.__getattr__ = _placeholder  # type: ignore[method-assign]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def stub_for_torchvision() -> None:
    """Stubs torchvision before vLLM-Omni is imported, whose pipelines import it; to transformers there is none."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # remembers it
    parts = ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")
    stub_for("torchvision", *(f"torchvision.{part}" for part in parts))
