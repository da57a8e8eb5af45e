"""Images, videos, LoRA weights and diffusers features for a video, checked before weights load."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dbsp_cli.tiny_models import MAKERS
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.signature import PIPELINES, ModelSignature
from dbsp_core.models.table import model_title, tiny_architecture
from dbsp_core.utils.errors import UserError, cut_short, in_number
from dbsp_core.utils.files import expand_path, require_file

TRANSFORMERS = ("transformer", "transformer_2")
OFFLOADS = ("model", "sequential")
QUANTIZATIONS = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}
"""Weight formats, each with the package that implements it."""
_CACHE = "first-block"
_CACHE_THRESHOLD = 0.05
_OPTION = re.compile(rf"(.+?)(?::({'|'.join(TRANSFORMERS)}))?(?:=([^=/]*))?")
_KEY = re.compile(r"transformer\.(.+)\.(lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)(?:\.\w+)?\.weight")
_ADVICE = "give a file, a folder or a repository of LoRA weights"


def fitted(path: Path, video: GenerateSettings) -> Any:
    """Reads an 8-bit image, scales it to the video's size and crops both sides if the aspect ratio differs."""
    from PIL import Image, ImageOps

    advice = "name a file such as a PNG or JPEG"
    require_file(path, "image", advice)
    try:
        image = ImageOps.exif_transpose(Image.open(path))
        has_8_bits = not image.mode.startswith(("I", "F"))
        transparent = has_8_bits and image.has_transparency_data
        if transparent:
            transparent = np.asarray(image.convert("RGBA"))[..., 3].min() < 255
        pixels = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image; {advice}") from error
    if not has_8_bits:
        raise UserError(f"{path} has values of more than 8 bits, so its white level is unknown; save it with 8 bits")
    if transparent:
        raise UserError(f"{path} has transparent parts, which a video cannot show; save it on a background")
    return _cut_to_size(pixels, str(path), video)


def source_frames(path: Path, video: GenerateSettings, identity: ModelSignature) -> tuple[Any, ...]:
    """Reads the source video's frames nearest in time to the new video's frames, in the new video's size."""
    import imageio_ffmpeg
    from PIL import Image

    # 1. Check the file and the model
    advice, pipeline = "give a video file, such as an mp4", PIPELINES[identity.pipeline]
    require_file(path, "--video", advice)
    if pipeline.from_video is None or identity.variant:
        able = " and ".join(pipeline.title for pipeline in PIPELINES.values() if pipeline.from_video)
        raise UserError(f"--video: {model_title(identity)} does not start from a video; {able} models do")
    # 2. Read frames at the new video's frame rate, which may use one frame several times
    shown, fps = f"--video {path}", video.fps or 16
    try:
        with closing(imageio_ffmpeg.read_frames(str(path.absolute()))) as pictures:
            about = next(pictures)
            wanted = [round(frame * about["fps"] / fps) for frame in range(video.num_frames or 1)]
            images = {
                number: _cut_to_size(Image.frombytes("RGB", about["size"], picture), shown, video)
                for number, picture in zip(range(wanted[-1] + 1), pictures, strict=False)
                if number in wanted
            }
    except UserError:
        raise
    except (OSError, RuntimeError, StopIteration, LookupError, AttributeError, ValueError) as error:
        raise UserError(f"{shown} has no frames that ffmpeg can read; {advice}") from error
    frames = tuple(images[number] for number in wanted if number in images)
    # 3. Check the number of frames
    if len(frames) < len(wanted):
        fewer = max(0, len(frames) - 1) // pipeline.frame_stride * pipeline.frame_stride + 1
        raise UserError(
            f"{shown} has too few frames: got {in_number(len(frames), 'frame')} at {fps} a second, expected "
            f"{len(wanted)}; set generate.num_frames={fewer}, or give a longer video"
        )
    return frames


def _cut_to_size(image: Any, shown: str, video: GenerateSettings) -> Any:
    """Scales and crops an image. Raises UserError if the crop would lose more than half of it."""
    from PIL import Image, ImageOps

    width, height = video.width or image.width, video.height or image.height
    if not 0.5 <= image.width * height / (image.height * width) <= 2:
        raise UserError(
            f"{shown} is {image.width}×{image.height}: more than half of it would be cut off in a video of "
            f"{width}×{height}; set generate.width and generate.height, or crop it yourself"
        )
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class Lora:
    """LoRA weights for one transformer."""

    source: str  # file, folder or repository
    weight: float = 1.0
    target: str | None = None  # name of the transformer in the pipeline; None if it has only one

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Reads "SOURCE[:TRANSFORMER][=WEIGHT]". Raises UserError for a weight that is not a number."""
        match = None if os.path.exists(text) else _OPTION.fullmatch(text)
        source, target, weight = match.groups() if match else (text, None, None)
        try:
            return cls(expand_path(source), 1.0 if weight is None else float(weight), target)
        except ValueError as error:
            problem = str(error) if isinstance(error, UserError) else f"{weight!r} is not a number"
            raise UserError(f"--lora {text}: {problem}") from error

    def within(self, identity: ModelSignature) -> Lora:
        """Returns a copy with `target` filled in. Raises UserError if `target` does not fit the model."""
        two, title = identity.variant == "two", model_title(identity)
        if two and self.target is None:
            raise UserError(
                f"--lora {self.source}: {title} has two transformers; name one of them: "
                f"--lora {self.source}:transformer (first steps, much noise) or --lora {self.source}:transformer_2"
            )
        if not two and self.target == "transformer_2":
            raise UserError(f"--lora {self.source}: {title} has one transformer; remove :transformer_2")
        return Lora(self.source, self.weight, self.target or "transformer")


@dataclass(frozen=True)
class Features:
    """Features of diffusers to use together with db-SP: options of `dbsp generate`."""

    lora: Sequence[str] = ()
    offload: str | None = None
    quantize: str | None = None
    compile: bool = False
    cache: str | None = None

    def require_possible(self) -> None:
        """Raises UserError for unknown values, missing packages, and features that need a missing GPU."""
        if self.offload not in (None, *OFFLOADS):
            raise UserError(f"--offload {self.offload} is unknown; use one of {', '.join(OFFLOADS)}")
        if self.quantize not in (None, *QUANTIZATIONS):
            raise UserError(f"--quantize {self.quantize} is unknown; use one of {', '.join(QUANTIZATIONS)}")
        if self.offload is not None and not torch.accelerator.is_available():
            raise UserError("--offload needs a GPU: on CPUs, weights are in host memory already; remove --offload")
        if self.quantize == "nf4" and not torch.accelerator.is_available():
            raise UserError("--quantize nf4 needs a GPU for bitsandbytes; on CPUs, use int8 or fp8")
        lacking = [QUANTIZATIONS[self.quantize]] if self.quantize else []
        lacking += ["peft"] if self.lora else []
        for package in lacking:
            if importlib.util.find_spec(package) is None:
                raise UserError(f"{package} is not installed; pip install {package}")
        self.loras()
        self.cache_threshold()

    def loras(self) -> list[Lora]:
        return [Lora.parse(text) for text in self.lora]

    def cache_threshold(self) -> float | None:
        """Returns the relative change of the first block below which the cache skips a step; None: no cache."""
        if self.cache is None:
            return None
        name, _, number = self.cache.partition("=")
        try:
            threshold = float(number or _CACHE_THRESHOLD)
        except ValueError:
            threshold = 0.0
        if name != _CACHE or not threshold > 0:
            raise UserError(f"--cache {self.cache} is invalid; use {_CACHE}, or {_CACHE}=0.1 with a threshold above 0")
        return threshold


def require_fitting(loras: Sequence[Lora], model: str, identity: ModelSignature) -> None:
    """Raises UserError if LoRA weights (with `target`) are missing, unreadable or do not fit the model's transformers.

    `model` is a folder, repository or name of a tiny checkpoint.
    """
    for lora in loras:
        # 1. The weights, as diffusers reads them: file, folder or repository
        import diffusers

        path = Path(lora.source)
        is_repository = lora.source.count("/") == 1 and path.suffix not in (".safetensors", ".bin")
        if not path.is_dir() and (os.path.lexists(path) or not is_repository):
            require_file(path, "--lora", _ADVICE)
        try:
            weights = getattr(diffusers, identity.pipeline).lora_state_dict(lora.source)
        except Exception as error:  # from any library that reads files or the network
            raise UserError(f"--lora {lora.source} cannot be read ({reason(error)}); {_ADVICE}") from error
        # 2. Shapes of their modules: down [rank, in] and up [out, rank]
        shapes: dict[str, dict[str, torch.Size]] = {}
        for key, weight in weights.items():
            if (parts := _KEY.fullmatch(key)) is not None:
                side = "down" if parts[2].endswith(("A", "down")) else "up"
                shapes.setdefault(parts[1], {})[side] = weight.shape
        if not shapes:
            raise UserError(
                f"--lora {lora.source}: none of its {len(weights)} weights belongs to a transformer; use names such "
                "as transformer.blocks.0.attn1.to_q.lora_A.weight, as pipe.save_lora_weights writes them"
            )
        # 3. Compare with the model's modules of these names, whose weights are [out, in]
        transformer = without_weights(model, str(lora.target))
        modules = {} if transformer is None else dict(transformer.named_modules())
        known = {name: modules[name].weight.shape for name in shapes if hasattr(modules.get(name), "weight")}
        for name, size in known.items():
            down, up = (shapes[name].get(side) for side in ("down", "up"))
            if down and up and not (down[1:] == size[1:] and (up[0], up[1]) == (size[0], down[0])):
                raise UserError(
                    f"--lora {lora.source}: its weights for {name}, {list(down)} and {list(up)}, do not fit the "
                    f"{list(size)} of the model's {lora.target}; give weights made for this model"
                )
        if modules and not known:
            raise UserError(
                f"--lora {lora.source}: its modules ({next(iter(shapes))}, …) are not in the model's {lora.target}; "
                "give weights made for this model"
            )


def without_weights(model: str, name: str) -> torch.nn.Module | None:
    """Returns a model's transformer, tiny or on the meta device; None if its configuration is not on disk."""
    import diffusers

    from dbsp_diffusers.checkpoint import local_checkpoint

    tiny = tiny_architecture(model)
    if tiny is not None:
        with torch.random.fork_rng(devices=[]):
            transformer: torch.nn.Module = getattr(MAKERS[tiny](), name)
        return transformer
    checkpoint = local_checkpoint(model)
    config = {} if checkpoint is None else checkpoint.config(name)
    if not hasattr(diffusers, str(config.get("_class_name"))):
        return None
    with torch.device("meta"):
        transformer = getattr(diffusers, config["_class_name"]).from_config(config)
    return transformer


def cache_first_block(transformer: Any, threshold: float) -> None:
    """Enables diffusers' first-block cache. Raises UserError if diffusers does not know the transformer's blocks."""
    from diffusers import FirstBlockCacheConfig

    try:
        transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    except (ValueError, AttributeError) as error:
        title = type(transformer).__name__
        raise UserError(f"--cache: diffusers cannot cache a {title} ({reason(error)}); remove --cache") from error


def load_loras(pipe: Any, loras: Sequence[Lora]) -> None:
    """Loads LoRA weights into a pipeline's transformers. Raises UserError if loading fails."""
    adapters: dict[str, dict[str, float]] = {}
    for number, lora in enumerate(loras):
        target, adapter = str(lora.target), f"lora_{number}"
        options = {"load_into_transformer_2": True} if target == "transformer_2" else {}
        try:
            pipe.load_lora_weights(lora.source, adapter_name=adapter, **options)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            title = type(pipe).__name__
            raise UserError(f"--lora {lora.source} cannot be loaded into {title} ({reason(error)})") from error
        adapters.setdefault(target, {})[adapter] = lora.weight
    for target, weights in adapters.items():
        getattr(pipe, target).set_adapters(list(weights), list(weights.values()))


def reason(error: Exception) -> str:
    """Returns an error's text in one short line."""
    return cut_short(" ".join(str(error).split())) or type(error).__name__
