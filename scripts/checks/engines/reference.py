"""References of outputs: torch's own attention under the mask spread over tokens, and the same inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from dbsp_core.config import DbspConfig
from dbsp_core.sources import LocalQK
from dbsp_core.sources.base import MaskRequest
from scripts.checks.engines.runs import HEAD, LAYERS
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
    runs: tuple[int, ...] = (),
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention of [B, tokens, H, D] in one process, text first: no plan, route or kernel of db-SP.

    Args:
        mask: What `DbspConfig.load` reads.
        runs, gate: Text tokens of each kind, and the coarse branch's gate, for mask source vsa.
    """
    source = DbspConfig.load(mask).for_transformer(transformer).mask
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    request = MaskRequest(layer, q.shape[1], thw, text, layers=layers, text_runs=runs)
    gate = None if gate is None else gate.transpose(1, 2)
    predicted = source.changes == "per_call"
    bits = source.mask(request, LocalQK.alone(q, k, v=v, gate=gate)) if predicted else source.mask(request)
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
    t, h, w = thw
    return random(1000 * number + 10 * step, 1, 4, t, 2 * h, 2 * w), random(branch, 1, 7, 16)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data = fill(name, parameter.shape, generator)
    return model


def tiny_h3(module: Any, heads: int, make: Callable[[dict[str, int]], Any]) -> torch.nn.Module:
    """Makes H3 of the engine's module in float32: its own bfloat16 would hide what is compared."""
    module._BF16_DTYPE = torch.float32
    width = heads * HEAD
    sizes = {"num_attention_heads": heads, "attention_head_dim": HEAD, "hidden_size": width, "num_layers": LAYERS}
    sizes |= {"token_refiner_num_layers": 1, "ffn_hidden_size": 48, "text_dim": 16, "timestep_input_dim": 32}
    sizes |= {"time_embed_hidden_size": 32, "time_embed_dim": 24, "rope_inv_freq_len": HEAD // 6}
    sizes |= {"adaln_out_features": 18 * width, "final_adaln_out_features": 2 * width}
    model = make(sizes)
    model.rope.inv_freq.copy_(10000.0 ** -torch.linspace(0, 1, HEAD // 6))
    return model


class TorchInFloat32:
    """torch to a module that asks for 16 bits by itself."""

    float16 = bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Named(type):
    """A class with any attribute, whose value is its name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Absent(MetaPathFinder, Loader):
    """Finds packages that are not installed, and all modules of theirs; a name of one is an empty class."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Named(name, (), {})

        module.__file__ = __file__
        module.__version__ = "0.28"  # transformers compares it
        module.__getattr__ = attribute


def stub_for(*packages: str) -> None:
    """Stubs packages that PyPI has for GPUs alone, and that these runs import and do not use."""
    sys.meta_path.insert(0, _Absent(packages))


def stub_for_torchvision() -> None:
    """Stubs torchvision before vLLM-Omni or LightX2V is imported, which import it; to transformers there is none."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # remembers it
    stub_for("torchvision")
