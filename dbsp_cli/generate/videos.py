"""Makes the videos of `dbsp generate` on each rank: loads one pipeline, and calls it for each video."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dbsp_cli.generate.inputs import TRANSFORMERS, Features, cache_first_block, load_loras
from dbsp_cli.generate.outputs import Output
from dbsp_cli.generate.ranks import ending_in_order
from dbsp_cli.generate.request import Generation
from dbsp_cli.tiny_models import make_tiny, silence_libraries
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.signature import PIPELINES, ModelSignature
from dbsp_core.models.table import tiny_architecture
from dbsp_core.reports.collect import write_page
from dbsp_core.reports.observer import run_observer
from dbsp_core.reports.run_report import RunReport
from dbsp_core.utils.files import TEMPORARY, write_atomically
from dbsp_core.utils.process import log


def make_videos(generation: Generation) -> dict[Output, RunReport | None]:
    """Makes the videos. Collective over the ranks named by the environment; rank 0 writes the files.

    Each file appears when its video is complete; an older file stays until then, and after a failure. Rank 0 returns
    each new video's report, None if the report failed; the others return nothing.
    """
    from dbsp_diffusers.checkpoint import require_checkpoint
    from dbsp_diffusers.rank_program import process_group, use_local_device  # here: it takes seconds to import

    device = use_local_device()
    if tiny_architecture(generation.model) is None:
        require_checkpoint(generation.model)
    silence_libraries()
    alone = os.environ["WORLD_SIZE"] == "1"  # a rank blocked in a collective would end too late
    with ending_in_order() if alone else nullcontext(), tempfile.TemporaryDirectory(prefix="dbsp-") as folder:
        model, tiny = generation.model, tiny_architecture(generation.model)
        if tiny:  # before ranks join: transformers would let only the first rank save
            model = str(make_tiny(tiny, Path(folder) / model))
        with process_group(device):
            outputs = outputs_left(generation, device)
            return _make_videos(generation, outputs, model, device, Path(folder) / "report") if outputs else {}


def outputs_left(generation: Generation, device: torch.device) -> tuple[Output, ...]:
    """Returns the videos to make, by rank 0's prompts and files: other nodes' may differ. Collective."""
    outputs = [generation.left]
    dist.broadcast_object_list(outputs, src=0, device=device)
    return outputs[0]


def _make_videos(
    generation: Generation, outputs: tuple[Output, ...], model: str, device: torch.device, unwanted: Path
) -> dict[Output, RunReport | None]:
    """Makes the videos; `unwanted` is the folder for reports that were not requested."""
    from dbsp_diffusers import enable
    from dbsp_diffusers.models.transformers import transformers_in

    # 1. Load the pipeline; enable db-SP after LoRA weights and offloading, but before compilation
    settings = generation.config.generate
    features, from_video = generation.request.features, generation.request.video is not None
    pipe = load_pipeline(model, generation.identity, settings, features, device, from_video=from_video)
    pipe.set_progress_bar_config(disable=dist.get_rank() != 0)
    config = replace(generation.config, report=str(generation.report or unwanted))
    counts = quantized_weights(transformers_in(pipe))
    session = enable(pipe, config)
    speed_up(transformers_in(pipe), features)
    # 2. Make one video after another
    of_pipeline = arguments_of(pipe, settings, generation.frames, from_video=from_video)
    reports: dict[Output, RunReport | None] = {}
    observer = run_observer(session)
    for number, output in enumerate(outputs, 1):
        if dist.get_rank() == 0 and len(outputs) > 1:
            log.info("video %d of %d: %s", number, len(outputs), output.path)
        if observer is not None:
            observer.folder = str(generation.report_of(output) or unwanted)
        compiled = _compile_seconds(features)
        result = pipe(prompt=output.prompt, generator=torch.Generator(device).manual_seed(output.seed), **of_pipeline)
        if dist.get_rank() == 0:
            sound = getattr(result, "audio", None)  # [channels, samples] of each video
            if sound is not None:
                sound = sound[0].float().cpu(), pipe.vocoder.config.output_sampling_rate
            _write(result.frames[0], output.path, settings.fps or 16, sound)
            report = None if observer is None else observer.report
            if report is not None:
                report = replace(report, quantized=counts, compile_s=_compile_seconds(features) - compiled)
            folder = generation.report_of(output)
            if folder is not None and report is not None:
                report = replace(report, video="video.mp4")
                write_atomically(folder / report.video, output.path.read_bytes())  # for dbsp report A B
                write_page(report, folder, _first_frame(result.frames[0]))
            reports[output] = report
    return reports


def quantized_weights(transformers: Mapping[str, torch.nn.Module]) -> dict[str, tuple[int, int, int]]:
    """Returns the number of quantized linear layers of each transformer that has some, and bytes before and after."""
    counts = {}
    for name, transformer in transformers.items():
        sizes = []
        for layer in transformer.modules():
            weight: Any = layer.weight if isinstance(layer, torch.nn.Linear) else None
            state = getattr(weight, "quant_state", None)
            if state is not None:  # bitsandbytes: packed numbers, with a scale for each group
                sizes.append((state.shape.numel() * state.dtype.itemsize, weight.nbytes + state.absmax.nbytes))
            elif hasattr(weight, "__tensor_flatten__"):  # torchao: a tensor that wraps several
                parts = [getattr(weight, part) for part in weight.__tensor_flatten__()[0]]
                sizes.append((weight.numel() * weight.dtype.itemsize, sum(part.nbytes for part in parts)))
        if sizes:
            before, after = map(sum, zip(*sizes, strict=True))
            counts[name] = (len(sizes), before, after)
    return counts


def _compile_seconds(features: Features) -> float:
    """Returns the seconds that torch.compile reports for this process; 0 if it is not used."""
    if not features.compile:
        return 0.0
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("entire_frame_compile", 0.0))


def _first_frame(pictures: Any) -> str:
    """Returns a video's first frame as a data URI, a JPEG of at most 480 pixels."""
    from PIL import Image

    frame = pictures[0].copy()
    if not isinstance(frame, Image.Image):  # float[H, W, 3]
        frame = Image.fromarray((np.asarray(frame) * 255).round().astype(np.uint8))
    frame.thumbnail((480, 480))
    file = BytesIO()
    frame.save(file, "JPEG")
    return f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"


def _write(pictures: Any, path: Path, fps: int, sound: tuple[torch.Tensor, int] | None = None) -> None:
    """Writes an mp4 to a temporary folder next to `path`, then moves it there; keeps it if the move fails."""
    from diffusers.utils import encode_video, export_to_video

    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=TEMPORARY))
    new_file = folder / path.name
    try:
        with ending_in_order():
            if sound is None:
                export_to_video(pictures, str(new_file), fps=fps)
            else:
                encode_video(pictures, fps, str(new_file), *sound)
        if not _whole(new_file):
            raise OSError(f"{path} could not be written completely; see ffmpeg's error above (is the disk full?)")
    except BaseException:
        for _ in range(2):  # ffmpeg may still write after an error
            shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        new_file.replace(path)
    except OSError as error:
        raise OSError(f"the video cannot be moved to its path ({error}); it is kept at {new_file}") from error
    folder.rmdir()


def _whole(video: Path) -> bool:
    """Returns True if ffmpeg wrote the file's end, which has the index. diffusers does not check this."""
    import imageio_ffmpeg

    try:
        with closing(imageio_ffmpeg.read_frames(str(video))) as frames:
            next(frames)
    except (OSError, RuntimeError):
        return False
    return True


def load_pipeline(
    model: str,
    identity: ModelSignature,
    settings: GenerateSettings,
    features: Features,
    device: torch.device,
    *,
    from_video: bool = False,
) -> Any:
    """Loads a pipeline from a folder or repository, with LoRA weights, quantization and offloading.

    Wan's VAE is at least float32, as in diffusers' examples.
    """
    from dbsp_diffusers.checkpoint import load_stock_pipeline

    # 1. The class, the dtypes and the files
    kind, dtype = PIPELINES[identity.pipeline], settings.torch_dtype
    options: dict[str, Any] = {"torch_dtype": dtype}
    if kind.float32_vae and dtype.itemsize < 4:
        options["torch_dtype"] = {"default": dtype, "vae": torch.float32}
    if features.quantize is not None:
        options["quantization_config"] = _quantization(features.quantize, identity)
    if from_video:
        options["cls"] = str(kind.from_video)
    from_image = settings.image is not None
    pipe = load_stock_pipeline(model, identity, from_image=from_image, flow_shift=settings.flow_shift, **options)
    if "guider" in pipe.components:  # guidance that is not an argument of the call
        pipe.guider = pipe.guider.new(guidance_scale=max(1.0, settings.guidance_scale or 1.0))
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
    import diffusers

    parts = TRANSFORMERS if identity.variant == "two" else TRANSFORMERS[:1]
    if name == "nf4":
        kind: Any = diffusers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    else:
        from torchao import quantization

        configs = {"int8": quantization.Int8WeightOnlyConfig, "fp8": quantization.Float8WeightOnlyConfig}
        kind = diffusers.TorchAoConfig(configs[name]())
    return diffusers.PipelineQuantizationConfig(quant_mapping=dict.fromkeys(parts, kind))


def speed_up(transformers: Mapping[str, torch.nn.Module], features: Features) -> None:
    """Enables the step cache and compiles the transformers' blocks; call it after db-SP is enabled."""
    from dbsp_diffusers.models import architecture_of

    threshold = features.cache_threshold()
    for transformer in transformers.values():
        if threshold is not None:
            cache_first_block(transformer, threshold)
        if features.compile:  # compile_repeated_blocks does not know CogVideoX's blocks
            for block in architecture_of(transformer).blocks_of(transformer):
                block.compile()


def arguments_of(pipe: Any, settings: GenerateSettings, frames: Sequence[Any], *, from_video: bool) -> dict[str, Any]:
    """Returns the arguments of a pipeline's call except the prompt and the generator."""
    from PIL import Image

    parameters = inspect.signature(type(pipe).__call__).parameters
    usual = {
        "negative_prompt": settings.negative_prompt,
        "height": settings.height,
        "width": settings.width,
        "num_inference_steps": settings.steps,
        "guidance_scale": settings.guidance_scale,
        "frame_rate": settings.fps,
    }
    arguments: dict[str, Any] = {name: value for name, value in usual.items() if name in parameters}
    if settings.guidance_scale_2 is not None and pipe.config.get("boundary_ratio") is not None:
        arguments["guidance_scale_2"] = settings.guidance_scale_2
    if from_video:
        return arguments | {"video": list(frames)}
    arguments["num_frames"] = settings.num_frames
    if "reference_images" not in parameters:
        return arguments | dict(zip(("image", "last_image"), frames, strict=False))
    # VACE generates the frames between, as in xDiT
    first, last = frames
    between, size = (settings.num_frames or 0) - 2, first.size
    arguments["video"] = [first, *[Image.new("RGB", size, (128, 128, 128))] * between, last]
    arguments["mask"] = [Image.new("L", size, 0), *[Image.new("L", size, 255)] * between, Image.new("L", size, 0)]
    return arguments
