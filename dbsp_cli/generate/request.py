"""Resolves the options of `dbsp generate` to settings, inputs and outputs, and checks them before weights load."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dbsp_cli.generate.inputs import (
    TRANSFORMERS,
    Features,
    cache_first_block,
    fitted,
    require_fitting,
    source_frames,
    without_weights,
)
from dbsp_cli.generate.outputs import Output, outputs_of, prompts_of, replaced_message
from dbsp_cli.generate.ranks import RankInfo
from dbsp_cli.output import require_apart
from dbsp_cli.tiny_models import trained_weights
from dbsp_core.config import DEFAULT_ORIGIN, DbspConfig, default_config, require_same_model
from dbsp_core.cost.machine import kernel_order
from dbsp_core.layout.strategy import Strategy
from dbsp_core.models.settings import GenerateSettings, side_message
from dbsp_core.models.signature import PIPELINES, ModelSignature, token_grid
from dbsp_core.models.table import (
    GENERATED,
    TINY,
    TINY_MODELS,
    find_model_spec,
    model_title,
    published_model,
    signature_of_model,
    tiny_architecture,
)
from dbsp_core.reports.collect import require_report_folder
from dbsp_core.reports.mask_recorder import require_new_recording
from dbsp_core.sources import MaskRequest
from dbsp_core.utils.errors import SettingError, UserError, blame_setting, did_you_mean, require_value
from dbsp_core.utils.files import expand_path, require_file_path
from dbsp_core.utils.process import RECORD
from dbsp_core.utils.yaml_file import Settings, find_config, parse_value, read_settings, shipped_configs, shown_config
from dbsp_kernels import KernelRequirements, choose_kernel
from dbsp_kernels.errors import install_command, page
from dbsp_kernels.kernel import supports

_OPTIONS = ("negative_prompt", "height", "width", "num_frames", "steps", "seed")
"""Settings of `generate` that are also options of the command."""
_NEEDS = ("diffusers", "transformers", "imageio_ffmpeg")


@dataclass(frozen=True)
class GenerationRequest:
    """The options of `dbsp generate`, described in its help; None or empty: the default."""

    config: str | None = None
    model: str | None = None
    prompt: str | None = None
    images: Sequence[Path] = ()
    video: Path | None = None
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    steps: int | None = None
    seed: int | None = None
    videos: int = 1
    changes: Sequence[str] = ()
    features: Features = field(default_factory=Features)
    out: str = "video.mp4"
    resume: bool = False
    report: Path | None = None


@dataclass(frozen=True)
class Generation:
    """Videos to make, with all settings resolved."""

    request: GenerationRequest
    config: DbspConfig  # with the model's defaults for the video filled in
    settings: Settings  # as the user gave them, with the location of each
    model: str  # repository or folder that ranks load, or the name of a tiny checkpoint, which ranks create first
    identity: ModelSignature
    frames: tuple[Any, ...]  # the first and last frame, or those of the source video, in the new video's size
    outputs: tuple[Output, ...]
    report: Path | None  # folder for reports; with several videos, each has a subfolder named after its file
    warnings: tuple[str, ...] = ()

    @property
    def left(self) -> tuple[Output, ...]:
        """The videos still to make, judged by the files on this node; rank 0 decides, see `outputs_left`."""
        return tuple(output for output in self.outputs if not (self.request.resume and output.path.is_file()))

    def report_of(self, output: Output) -> Path | None:
        if self.report is None or len(self.outputs) == 1:
            return self.report
        common = os.path.commonpath([other.path.parent for other in self.outputs])
        return self.report / output.path.with_suffix("").relative_to(common)

    @property
    def effective(self) -> dict[str, Any]:
        """All settings, with "auto" and defaults resolved for this machine."""
        config = self.config
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        order = kernel_order(config.kernel, config.machine, device)
        kernel = choose_kernel(order, device.type, config.generate.torch_dtype)
        values = config.to_values()
        values["generate"]["dtype"] = str(config.generate.torch_dtype).removeprefix("torch.")
        values |= {"model": self.model, "layout": config.layout, "keys": config.keys_sent, "kernel": kernel.name}
        return values | {"report": self.report and str(self.report)}


def resolve(request: GenerationRequest, rank_info: RankInfo) -> Generation:
    """Resolves and checks a request on one rank, before weights load. Raises UserError for the user's mistakes."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{', '.join(missing)} is not installed; {install_command('diffusers')}")
    if request.model is not None:
        request = replace(request, model=expand_path(request.model))
    # 1. Settings: options over the file's, and the model's defaults for the rest
    prompts = prompts_of(request.prompt)
    settings = _settings(request, prompts)
    config = DbspConfig.load(settings)
    model, identity = _model(request, config, settings)
    video = _video(config, model, identity, settings)
    # 2. Check the inputs against the model and this machine
    loaded = _require_loadable(request, config, model, identity, video, settings)
    frames = () if request.video is None else source_frames(request.video, video, identity)
    for name in ("image", "last_image") if request.video is None else ():
        if (path := getattr(video, name)) is not None:
            with settings.located(), blame_setting("generate"), blame_setting(name):
                frames += (fitted(Path(path), video),)
    if video.prompt is None:
        raise UserError("there is no prompt; give one with --prompt, or as generate.prompt in the configuration")
    strategy = config.strategy
    if strategy is None:  # heads within a node; blocks between nodes with equally many ranks, if the kernel can
        equal = rank_info.world % rank_info.nodes == 0
        ring = rank_info.nodes if equal and supports(config.kernel, KernelRequirements(lse=True)) else 1
        strategy = Strategy(rank_info.world // ring, ring)
    if isinstance(strategy, Strategy):
        strategy.require_world(rank_info.world)
    # 3. Files to write; rank 0 writes them
    report = request.report or (Path(config.report) if config.report else None)
    generation = Generation(
        request=request,
        config=replace(config, generate=video, strategy=strategy, origin=_origin(config, request.changes)),
        settings=settings,
        model=loaded,
        identity=identity,
        frames=frames,
        outputs=outputs_of(request.out, prompts or (video.prompt,), video.seed or 0, request.videos),
        report=None if report is None else report.absolute(),
    )
    _require_results(generation, is_written_here=rank_info.rank == 0)
    # 4. Warnings
    is_large = find_model_spec(model) is not None or published_model(identity) is not None
    slow = is_large and not torch.accelerator.is_available()
    warnings = (
        *(config.for_transformer(name).dense_schedule.message(video.steps) for name in TRANSFORMERS),
        f"there is no GPU, and {model} can take days on CPUs; try --config tiny-wan instead" if slow else None,
        replaced_message(generation.left) if rank_info.rank == 0 else None,
    )
    return replace(generation, warnings=tuple(dict.fromkeys(filter(None, warnings))))


def _video(config: DbspConfig, model: str, identity: ModelSignature, settings: Settings) -> GenerateSettings:
    spec = find_model_spec(model) or published_model(identity)
    tiny = "tiny-wan" if tiny_architecture(model) else None  # has the size of tiny models without a configuration
    shipped = None if spec else _shipped_for(model) or _shipped_for(tiny)
    usual = spec.video if spec else DbspConfig.load(shipped).generate.filled(None) if shipped else None
    with settings.located(), blame_setting("generate"):
        video = config.generate.filled(usual)
    message = identity.images_message(sum(image is not None for image in (video.image, video.last_image)))
    if message is not None:
        raise UserError(f"{model_title(identity)} {message}")
    with settings.located(), blame_setting("generate"):
        require_video(identity, video)
    return video


def _require_loadable(
    request: GenerationRequest,
    config: DbspConfig,
    model: str,
    identity: ModelSignature,
    video: GenerateSettings,
    settings: Settings,
) -> str:
    """Checks the request against the model, this machine and the weight files; returns what ranks load."""
    from dbsp_diffusers.checkpoint import require_checkpoint  # here: it takes seconds to import
    from dbsp_diffusers.resolve import require_possible

    with settings.located():
        require_possible(config)
        _require_fitting_masks(config, identity, video)
    request.features.require_possible()
    pipeline = PIPELINES[identity.pipeline]
    if pipeline.sound and importlib.util.find_spec("av") is None:
        raise UserError(f"av, which writes {pipeline.title}'s sound, is not installed; pip install av")
    tiny, named = tiny_architecture(model), find_model_spec(model)
    loaded = f"{TINY}{tiny}" if tiny else named.hub if named else os.path.abspath(model)
    if tiny == "wan-trained":
        trained_weights()  # raises if they are missing
    if not tiny:
        require_checkpoint(loaded, ask_hub=False)
    threshold = request.features.cache_threshold()
    if threshold is not None and (transformer := without_weights(loaded, TRANSFORMERS[0])) is not None:
        cache_first_block(transformer, threshold)
    require_fitting([lora.within(identity) for lora in request.features.loras()], loaded, identity)
    return loaded


def require_video(signature: ModelSignature, video: GenerateSettings) -> None:
    """Raises SettingError for values that the pipeline would change or reject: frames, size, a last image alone."""
    spec, title = published_model(signature), model_title(signature)
    pipeline = PIPELINES.get(signature.pipeline)
    if pipeline is not None and video.num_frames is not None:
        message = pipeline.frames_message(video.num_frames)
        require_value(video, "num_frames", message is None, str(message), "generate.")
    for side in ("height", "width"):
        value = getattr(video, side)
        sized = spec or pipeline
        message = None if value is None or sized is None else side_message(value, sized.token_pixels)
        require_value(video, side, message is None, str(message), "generate.")
    has_effect = pipeline is None or pipeline.passes > 1 or not video.negative_prompt
    message = f"has no effect: {title} has no unconditional pass; remove negative_prompt"
    require_value(video, "negative_prompt", has_effect, message, "generate.")
    takes_scale = video.guidance_scale_2 is None or signature.variant == "two"
    message = f"is for models with two transformers, but {title} has one; remove guidance_scale_2"
    require_value(video, "guidance_scale_2", takes_scale, message, "generate.")
    if video.last_image is not None and video.image is None:
        raise SettingError("generate.last_image needs generate.image, the first frame", ("last_image",))


def _require_fitting_masks(config: DbspConfig, signature: ModelSignature, video: GenerateSettings) -> None:
    """Raises UserError if masks do not fit the model or video size, or the kernel does not support their blocks.

    Skips models of unknown sizes, and models whose text length is known only after encoding the prompt.
    """
    pipeline, spec = PIPELINES[signature.pipeline], published_model(signature)
    if pipeline.text_varies or (spec is None and signature not in TINY_MODELS.values()):
        return
    pixels = (spec or pipeline).token_pixels
    size = video.num_frames or 1, video.height or 0, video.width or 0
    thw = token_grid(*size, signature.sizes[3], pixels, pipeline.vae_frames)
    mask_request = MaskRequest(0, signature.sizes[1], thw, pipeline.text_tokens)
    for name in TRANSFORMERS if signature.variant == "two" else TRANSFORMERS[:1]:
        sub_config = config.for_transformer(name)
        of_second = bool(config.transformer_2.get("mask")) and name == "transformer_2"
        with blame_setting(name) if of_second else nullcontext(), blame_setting("mask"):
            grid = sub_config.mask.grid(mask_request)
        needs = KernelRequirements(
            (grid.block_q, grid.block_k),
            head_dim=signature.sizes[2] or None,
            ragged_rows=not grid.only_last_is_short,
            tokens=grid.tokens,
        )
        with blame_setting("kernel"):
            choose_kernel(sub_config.kernel, "cuda" if torch.cuda.is_available() else "cpu", video.torch_dtype, needs)


def _settings(request: GenerationRequest, prompts: Sequence[str]) -> Settings:
    if request.config is None and request.model is None:
        names = ", ".join(GENERATED)
        raise UserError(f"no model is given; add --model ({names}, or a folder) or --config")
    config = request.config or _shipped_for(request.model)
    if config is not None:
        settings = read_settings(find_config(config), "configuration file")
    else:
        default = default_config(signature_of_model(request.model or ""), find_model_spec(request.model or ""))
        origin = default.origin or ""
        is_file = os.path.isfile(origin)
        settings = read_settings(Path(origin), "configuration file") if is_file else Settings({}, {}, origin)
    for change in request.changes:
        key, equals, text = change.partition("=")
        if not equals or not all(key.split(".")):
            raise UserError(f"--set {change} is not of the form KEY=VALUE, for example --set mask.cdf=0.9")
        keys, value = key.split("."), parse_value(text, f"--set {key}")
        if keys[1:] and keys[-1] == "source":  # the previous source's settings do not apply to another
            keys, value = keys[:-1], {"source": value}
        settings = settings.changed(keys, value, f"--set {key}")
    if len(request.images) > 2:
        raise UserError(f"expected at most 2 --image options, got {len(request.images)}; give first and last frame")
    options = {name: getattr(request, name) for name in _OPTIONS} | {"prompt": prompts[0] if prompts else None}
    options |= dict(zip(("image", "last_image"), map(str, request.images), strict=False))
    for name, value in options.items():
        if value is not None:
            option = "image" if "image" in name else name.replace("_", "-")
            settings = settings.changed(("generate", name), value, f"--{option}")
    return settings


def _shipped_for(model: str | None) -> Path | None:
    """Returns the shipped configuration of a tiny model, which sets its video size; None for other models."""
    return next((path for path in shipped_configs().glob(f"{TINY}*.yaml") if path.stem == model), None)


def _require_results(generation: Generation, is_written_here: bool) -> None:
    """Raises UserError if outputs would overwrite an input or each other, or cannot be written here."""
    config, origin, request = generation.config, generation.settings.origin, generation.request
    report = "--report" if request.report else "report"
    for output in generation.outputs if is_written_here else ():
        require_file_path(output.path, "--out")
        folder = generation.report_of(output)
        if folder is not None:
            with generation.settings.located(), blame_setting("report") if report == "report" else nullcontext():
                require_report_folder(folder, report)
    if is_written_here and config.record is not None:
        require_new_recording(Path(config.record).absolute(), f"${RECORD}")
    folders = {"--report": generation.report, f"${RECORD}": config.record}
    inputs = {
        "--image": config.generate.image,
        "the last --image": config.generate.last_image,
        "--video": request.video,
        "--config": origin if os.path.isfile(origin) else None,
    }
    written, read = ({k: Path(path) for k, path in paths.items() if path is not None} for paths in (folders, inputs))
    for output in generation.outputs:
        require_apart({"--out": output.path}, written, read)


def _origin(config: DbspConfig, changes: Sequence[str]) -> str | None:
    """Returns the origin of the settings: their file, and the keys that --set changed."""
    if config.origin is None or not changes:
        return config.origin
    keys = ", ".join(change.partition("=")[0] for change in changes)
    if config.origin == DEFAULT_ORIGIN:
        return f"--set {keys}" if config.mask_is_named else DEFAULT_ORIGIN
    return f"{shown_config(config.origin)}, except {keys}"


def _model(request: GenerationRequest, config: DbspConfig, settings: Settings) -> tuple[str, ModelSignature]:
    model = request.model or config.model
    if model is None:
        raise UserError(f"{request.config} does not set model; add --model")
    identity = signature_of_model(model)
    if identity is None:
        names = [*GENERATED, *(f"{TINY}{name}" for name in TINY_MODELS)]
        option = "--model" if request.model else f"{settings.location_of(('model',))}: model"
        raise UserError(
            f"{option} {model}: neither a model that dbsp generate knows ({', '.join(names)}) nor a folder with "
            "model_index.json and transformer/config.json, as save_pretrained writes it"
            f"{did_you_mean(Path(model).name.casefold(), names)}; for other models, call dbsp_diffusers.enable in a "
            f"script: {page('diffusers')}"
        )
    require_same_model(config, identity)
    if identity.pipeline not in PIPELINES:
        raise UserError(
            f"--model {model} is a {identity.pipeline}; dbsp generate supports {', '.join(PIPELINES)}; for others, "
            f"call dbsp_diffusers.enable in a script: {page('diffusers')}"
        )
    spec = find_model_spec(model)
    other = published_model(identity)
    if spec is not None and other not in (None, spec) and other.hub == spec.hub:
        raise UserError(
            f"--model {model}: its weights are separate files beside {spec.hub}; merge them into a folder and give "
            f"that folder as --model, with --config {spec.name}-{spec.mask}"
        )
    return model, identity
