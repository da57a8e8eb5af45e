"""Loads a model's pipeline as a user asks: dtypes, LoRA, quantization, offloading, a cache, compilation."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dbsp_cli.generate.inputs import Lora, load_loras
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.signature import PIPELINES, ModelSignature
from dbsp_core.utils.errors import UserError

if TYPE_CHECKING:
    from torch import nn


OFFLOADS = ("model", "sequential")
QUANTIZATIONS = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}
"""Weights' formats by name, each with the package that has it."""
_CACHE = "first-block"
_CACHE_THRESHOLD = 0.05


@dataclass(frozen=True)
class Features:
    """Features of diffusers that a pipeline is given in addition to db-SP: options of `dbsp generate`."""

    lora: Sequence[str] = ()
    offload: str | None = None
    quantize: str | None = None
    compile: bool = False
    cache: str | None = None

    def require_possible(self) -> None:
        """Raises UserError for what does not exist, or cannot be had on this machine."""
        if self.offload not in (None, *OFFLOADS):
            raise UserError(f"--offload {self.offload}: use {', '.join(OFFLOADS)}")
        if self.quantize not in (None, *QUANTIZATIONS):
            raise UserError(f"--quantize {self.quantize}: use {', '.join(QUANTIZATIONS)}")
        if self.offload is not None and not torch.accelerator.is_available():
            raise UserError("--offload needs a GPU; without one, weights are in the host's memory already")
        if self.quantize == "nf4" and not torch.accelerator.is_available():
            raise UserError("--quantize nf4 needs a GPU, which bitsandbytes computes on; without one, use int8 or fp8")
        lacking = [QUANTIZATIONS[self.quantize]] if self.quantize else []
        lacking += ["peft"] if self.lora else []
        for package in lacking:
            if importlib.util.find_spec(package) is None:
                raise UserError(f"{package} is not installed; pip install {package}")
        self.loras()
        self.cache_threshold()

    def loras(self) -> list[Lora]:
        """Returns the LoRA weights, some with the name of their transformer."""
        return [Lora.parse(text) for text in self.lora]

    def cache_threshold(self) -> float | None:
        """Returns the relative change of the first block below which a step is not computed; None: no cache."""
        if self.cache is None:
            return None
        name, _, number = self.cache.partition("=")
        try:
            threshold = float(number or _CACHE_THRESHOLD)
        except ValueError:
            threshold = 0.0
        if name != _CACHE or not threshold > 0:
            raise UserError(f"--cache {self.cache}: use {_CACHE}, or {_CACHE}=0.1 with a threshold above 0")
        return threshold


def load_pipeline(
    model: str,
    identity: ModelSignature,
    settings: GenerateSettings,
    features: Features,
    device: torch.device,
) -> Any:
    """Loads a folder or repository on a device, with LoRA weights, quantized, or offloaded to the host.

    Wan's VAE has float32 at least, as in diffusers' examples.
    """
    from dbsp_diffusers.checkpoint import load_stock_pipeline

    # 1. The class, the dtypes and the files
    kind, dtype = PIPELINES[identity.pipeline], settings.torch_dtype
    options: dict[str, Any] = {"torch_dtype": dtype}
    if kind.float32_vae and dtype.itemsize < 4:
        options["torch_dtype"] = {"default": dtype, "vae": torch.float32}
    if features.quantize is not None:
        options["quantization_config"] = _quantization(features.quantize, identity)
    pipe = load_stock_pipeline(
        model, identity, from_image=settings.image is not None, flow_shift=settings.flow_shift, **options
    )
    # 2. LoRA weights
    load_loras(pipe, [lora.within(identity) for lora in features.loras()])
    # 3. The device of the weights
    if features.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif features.offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.to(device)
    return pipe


def _quantization(name: str, identity: ModelSignature) -> Any:
    """Returns diffusers' settings for weights of the transformers in this format."""
    import diffusers

    parts = ["transformer", "transformer_2"] if identity.variant == "two" else ["transformer"]
    if name == "nf4":
        kind: Any = diffusers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    else:
        from torchao import quantization

        of = {"int8": quantization.Int8WeightOnlyConfig, "fp8": quantization.Float8WeightOnlyConfig}
        kind = diffusers.TorchAoConfig(of[name]())
    return diffusers.PipelineQuantizationConfig(quant_mapping=dict.fromkeys(parts, kind))


def speed_up(transformers: Mapping[str, nn.Module], features: Features) -> None:
    """Gives transformers a cache, and compiles their blocks, after db-SP is enabled on them."""
    from diffusers import FirstBlockCacheConfig

    threshold = features.cache_threshold()
    for transformer in transformers.values():
        if threshold is not None:
            transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))  # type: ignore[operator]
        if features.compile:
            transformer.compile_repeated_blocks()  # type: ignore[operator]


def arguments_of(pipe: Any, settings: GenerateSettings, frames: Sequence[Any]) -> dict[str, Any]:
    """Returns the arguments of a pipeline's call that only some have.

    Args:
        frames: Images of the first frame and of the last, in the video's size.
    """
    from PIL import Image

    parameters = inspect.signature(type(pipe).__call__).parameters
    arguments: dict[str, Any] = {"num_frames": settings.num_frames}
    if settings.guidance_scale_2 is not None and pipe.config.get("boundary_ratio") is not None:
        arguments["guidance_scale_2"] = settings.guidance_scale_2
    if "reference_images" not in parameters:
        return arguments | dict(zip(("image", "last_image"), frames, strict=False))
    # VACE invents the frames between, as in xDiT
    first, last = frames
    between, size = (settings.num_frames or 0) - 2, first.size
    arguments["video"] = [first, *[Image.new("RGB", size, (128, 128, 128))] * between, last]
    arguments["mask"] = [Image.new("L", size, 0), *[Image.new("L", size, 255)] * between, Image.new("L", size, 0)]
    return arguments
