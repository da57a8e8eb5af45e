"""Decides everything about the videos that are asked for, and checks what can be checked before weights are loaded."""

from __future__ import annotations

import importlib.util
import os
import re
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dbsp_cli.generate.images import fitted
from dbsp_cli.generate.pipeline import Features
from dbsp_cli.generate.ranks import RankInfo
from dbsp_cli.output import require_apart, require_file_path
from dbsp_cli.tiny_models import TRAINED_WAN, unknown_words
from dbsp_core.config import DEFAULT_ORIGIN, DbspConfig, default_config, require_same_model
from dbsp_core.cost.machine import kernel_order
from dbsp_core.layout.strategy import Strategy
from dbsp_core.models.settings import GenerateSettings, side_message
from dbsp_core.models.signature import PIPELINES, ModelSignature
from dbsp_core.models.table import (
    MODEL_SPECS,
    TINY,
    TINY_MODELS,
    find_model_spec,
    model_title,
    published_model,
    signature_of_model,
    tiny_architecture,
)
from dbsp_core.utils.errors import SettingError, UserError, blame_setting, did_you_mean, in_short, require_value
from dbsp_core.utils.files import expand_path, require_file, require_folder_path, user_path
from dbsp_core.utils.process import RECORD
from dbsp_core.utils.yaml_file import (
    Settings,
    find_config,
    parse_value,
    read_settings,
    shipped_configs,
    shown_config,
)
from dbsp_kernels import KernelRequirements, choose_kernel
from dbsp_kernels.errors import install_command, page
from dbsp_kernels.kernel import supports

__all__ = ["Generation", "GenerationRequest", "Output", "require_video", "resolve"]

_NEEDS = ("diffusers", "transformers", "imageio_ffmpeg")
_MOST_VIDEOS = 100_000
_LONGEST_SLUG = 48
_SLOW = "can take days on CPUs; --config tiny-wan-trained is for trying out"


@dataclass(frozen=True)
class GenerationRequest:
    """The options of `dbsp generate`; None and empty mean the usual.

    Attributes:
        config: File, or name of a shipped one.
        model: Name or folder.
        prompt: A text, or "@FILE" for a file with one prompt a line.
        images: Files of the first frame, and maybe of the last.
        video: File of a video to start from.
        seed: Seed of a prompt's first video; the next ones have the next.
        videos: Number of videos for each prompt.
        changes: "key=value", with dots in the key.
        features: Changes to the pipeline in addition to db-SP.
        out: Files to write; may have the fields `{index}`, `{seed}` and `{prompt}`.
        resume: True if files that are there already are left out.
    """

    config: str | None = None
    model: str | None = None
    prompt: str | None = None
    images: Sequence[Path] = ()
    video: Path | None = None
    seed: int | None = None
    videos: int = 1
    changes: Sequence[str] = ()
    features: Features = field(default_factory=Features)
    out: str = "video.mp4"
    resume: bool = False
    report: Path | None = None


@dataclass(frozen=True)
class Output:
    """One video to make."""

    prompt: str
    seed: int
    path: Path


@dataclass(frozen=True)
class Generation:
    """Videos to make, with everything decided.

    Attributes:
        config: The settings, with the model's usual video filled in.
        given: The settings as the user gave them, with the location of each.
        model: Repository or folder that ranks load, or the name of a tiny checkpoint, which they make first.
        frames: Images of the first frame and the last that the video is made from, in its size.
        outputs: All videos that are asked for.
        resume: True if those that are there already are left out.
        report: Folder for reports; with several videos, each has a folder in it.
        warnings: Warnings for the user, shown before.
    """

    config: DbspConfig
    given: Settings
    model: str
    identity: ModelSignature
    features: Features
    video: Path | None
    frames: tuple[Any, ...]
    outputs: tuple[Output, ...]
    resume: bool
    report: Path | None
    warnings: tuple[str, ...]

    @property
    def left(self) -> tuple[Output, ...]:
        """The videos to make, by the files on this node: rank 0's count, see `outputs_left`."""
        return _left(self.outputs, self.resume)

    def report_of(self, output: Output) -> Path | None:
        """Returns the folder of one video's report."""
        if self.report is None or len(self.outputs) == 1:
            return self.report
        return self.report / output.path.stem

    @property
    def effective(self) -> dict[str, Any]:
        """Every setting, with "auto" and defaults replaced by what they mean here."""
        config = self.config
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        order = kernel_order(config.kernel, config.machine, device)
        kernel = choose_kernel(order, device.type, config.generate.torch_dtype)
        found = {"model": self.model, "layout": config.layout, "keys": config.keys, "kernel": kernel.name}
        values = config.to_values()
        generate = values["generate"] | {"dtype": str(config.generate.torch_dtype).removeprefix("torch.")}
        return values | found | {"generate": generate, "report": self.report and str(self.report)}


def resolve(request: GenerationRequest, rank_info: RankInfo) -> Generation:
    """Decides and checks all that can be known before weights are loaded.

    Args:
        rank_info: One of the ranks that make the videos.

    Raises:
        UserError: The user must change something.
    """
    _require_installed()
    from dbsp_diffusers.preflight import require_possible  # here: it takes seconds to import

    if request.model is not None:
        request = replace(request, model=expand_path(request.model))
    # 1. The settings: a file's, the options' over them, the model's usual ones for what neither says.
    prompts = _prompts(request.prompt)
    settings = _settings(request, prompts)
    config = DbspConfig.load(settings)
    model, identity = _model(request, config, settings)
    spec = find_model_spec(model) or published_model(identity)
    with settings.located(), blame_setting("generate"):
        video = config.generate.filled(None if spec is None else spec.video)
    # 2. What the model takes, and this machine can do.
    _require_images(identity, video)
    with settings.located():
        with blame_setting("generate"):
            require_video(identity, video)
        require_possible(config)
    request.features.require_possible()
    _require_source_video(request, identity)
    if video.prompt is None:
        raise UserError("there is no prompt; give one with --prompt, or as generate.prompt in the configuration")
    strategy = config.strategy or _default_strategy(rank_info, config)
    if isinstance(strategy, Strategy):
        strategy.require_world(rank_info.world)
    # 3. What is written, and where: rank 0 does it.
    outputs = _outputs(request, prompts or (video.prompt,), video)
    for output in outputs if rank_info.rank == 0 else ():
        require_file_path(output.path, "--out")
    tiny, named = tiny_architecture(model), find_model_spec(model)
    vocabulary = TRAINED_WAN if tiny == "wan-trained" else Path(model)
    warnings = (
        config.dense_schedule.message(video.steps),
        None if spec is None or torch.accelerator.is_available() else f"there is no GPU, and {spec.name} {_SLOW}",
        *dict.fromkeys(unknown_words(vocabulary, output.prompt) for output in _left(outputs, request.resume)),
    )
    generation = Generation(
        config=replace(config, generate=video, strategy=strategy, origin=_origin(config, request.changes)),
        given=settings,
        model=f"{TINY}{tiny}" if tiny else named.hub if named else os.path.abspath(model),
        identity=identity,
        features=request.features,
        video=request.video,
        frames=_frames(video, settings),
        outputs=outputs,
        resume=request.resume,
        report=_report(request, config, settings, here=rank_info.rank == 0),
        warnings=tuple(filter(None, warnings)),
    )
    _require_apart(generation)
    return generation


def _left(outputs: Sequence[Output], resume: bool) -> tuple[Output, ...]:
    return tuple(output for output in outputs if not (resume and output.path.is_file()))


def _frames(video: GenerateSettings, settings: Settings) -> tuple[Any, ...]:
    """Returns the images that a video is made from, in its size."""
    found = []
    for name in ("image", "last_image"):
        if (path := getattr(video, name)) is not None:
            with settings.located(), blame_setting("generate"), blame_setting(name):
                found.append(fitted(Path(path), video))
    return tuple(found)


def _require_installed() -> None:
    """Raises UserError where a package is missing that makes videos."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{', '.join(missing)} is not installed; {install_command('diffusers')}")


def _prompts(given: str | None) -> tuple[str, ...]:
    """Returns the prompts of an option: a text, or the lines of "@FILE" that are not blank."""
    if given is None:
        return ()
    if not given.startswith("@"):
        return (_in_utf8(given, "--prompt"),)
    with _blame_option("--prompt"):
        file = user_path(given[1:])
    require_file(file, "--prompt: file", "give a text, or @FILE with one prompt a line")
    try:
        lines = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    except UnicodeError as error:
        raise UserError(f"--prompt: {file} is not text in UTF-8") from error
    if not lines:
        raise UserError(f"--prompt: {file} has no prompts; write one a line")
    return lines


def _settings(request: GenerationRequest, prompts: Sequence[str]) -> Settings:
    if request.config is None and request.model is None:
        names = ", ".join(MODEL_SPECS)
        raise UserError(f"nothing says which model; give --model ({names}, or a folder) or --config")
    config = request.config or _shipped_for(request.model)
    if config is not None:
        settings = read_settings(find_config(config), "configuration file")
    else:
        default = default_config(signature_of_model(request.model or ""), find_model_spec(request.model or ""))
        path = Path(default.origin or "")
        settings = (
            read_settings(path, "configuration file") if path.is_file() else Settings({}, {}, default.origin or "")
        )
    for change in request.changes:
        key, equals, text = _in_utf8(change, "--set").partition("=")
        if not equals or not all(key.split(".")):
            raise UserError(f"--set {change} is not of the form KEY=VALUE, for example --set mask.cdf=0.9")
        keys, value = key.split("."), parse_value(text, f"--set {key}")
        if keys[1:] and keys[-1] == "source":  # another source has none of the settings of the one before
            keys, value = keys[:-1], {"source": value}
        settings = settings.changed(keys, value, f"--set {key}")
    if len(request.images) > 2:
        raise UserError(f"--image is given {len(request.images)} times; give the first frame, and maybe the last")
    given = {"prompt": prompts[0] if prompts else None, "seed": request.seed}
    given |= dict(zip(("image", "last_image"), map(str, request.images), strict=False))
    for name, value in given.items():
        if value is not None:
            settings = settings.changed(("generate", name), value, f"--{'image' if 'image' in name else name}")
    return settings


def _shipped_for(model: str | None) -> Path | None:
    """Returns the shipped configuration of a tiny model's name, which has its video's size; None for other models."""
    named = (path for path in shipped_configs().glob(f"{TINY}*.yaml") if path.stem == model)
    return next(named, None)


def _in_utf8(text: str, option: str) -> str:
    """Returns an option's text, read as UTF-8 where the locale's encoding could not read it."""
    try:
        return os.fsencode(text).decode() if any("\udc80" <= one <= "\udcff" for one in text) else text
    except UnicodeError:
        raise UserError(f"{option} {in_short(text)} is not text in UTF-8; set a locale that can read it") from None


def _outputs(request: GenerationRequest, prompts: Sequence[str], video: GenerateSettings) -> tuple[Output, ...]:
    """Returns the videos of every prompt and seed, each with a file of its own."""
    count = len(prompts) * request.videos
    if not 0 < request.videos <= _MOST_VIDEOS or count > _MOST_VIDEOS:
        raise UserError(f"--videos {request.videos} must be at least 1, and all videos at most {_MOST_VIDEOS:,}")
    found: dict[Path, Output] = {}
    for prompt in prompts:
        for number in range(request.videos):
            seed = (video.seed or 0) + number
            path = Path(_named(request.out, index=len(found), seed=seed, prompt=_slug(prompt))).absolute()
            if path.suffix != ".mp4":
                raise UserError(f"--out {request.out} must end in .mp4")
            if path in found:
                raise UserError(
                    f"--out {request.out} names one file for several of {count} videos; put {{index}} in the name, "
                    "for example video-{index:03}.mp4"
                )
            found[path] = Output(prompt, seed, path)
    return tuple(found.values())


def _named(pattern: str, **fields: Any) -> str:
    """Returns a pattern's path with the fields filled in. Raises UserError for a pattern with others."""
    try:
        unknown = {name for _, name, _, _ in string.Formatter().parse(pattern)} - {None, *fields}
        path = pattern.format(**fields) if not unknown else None
    except (ValueError, KeyError, IndexError, AttributeError):
        path = None
    if path is None:
        names = "}, {".join(fields)
        raise UserError(f"--out {pattern}: use the fields {{{names}}}, or double the braces of a name")
    with _blame_option("--out"):
        return expand_path(path)


@contextmanager
def _blame_option(option: str) -> Iterator[None]:
    """Names an option in a UserError inside."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{option}: {error}") from error


def _slug(prompt: str) -> str:
    """Returns a prompt's first words as part of a file's name."""
    return "-".join(re.findall(r"\w+", prompt))[:_LONGEST_SLUG].rstrip("-") or "video"


def _report(request: GenerationRequest, config: DbspConfig, settings: Settings, here: bool) -> Path | None:
    """Returns the folder for the report, checked where `here`: rank 0 writes it."""
    given = request.report or (Path(config.report) if config.report else None)
    report = None if given is None else given.absolute()
    if here and config.record is not None:
        require_folder_path(Path(config.record).absolute(), f"${RECORD}")
    if here and report is not None:
        by_option = request.report is not None
        with settings.located(), nullcontext() if by_option else blame_setting("report"):
            require_folder_path(report, "--report" if by_option else "report")
    return report


def _require_apart(generation: Generation) -> None:
    """Raises UserError where results would be written over one another, or over what the video is made from."""
    config, origin = generation.config, generation.given.origin
    folders = {"--report": generation.report, f"${RECORD}": config.record}
    inputs = {
        "--image": config.generate.image,
        "the last --image": config.generate.last_image,
        "--video": generation.video,
        "--config": origin if os.path.isfile(origin) else None,
    }
    written, read = ({name: Path(one) for name, one in of.items() if one is not None} for of in (folders, inputs))
    for output in generation.outputs:
        require_apart({"--out": output.path}, written, read)


def _origin(config: DbspConfig, changes: Sequence[str]) -> str | None:
    """Returns where the settings come from: their file, and what was changed of it."""
    if config.origin in (None, DEFAULT_ORIGIN) or not changes:
        return config.origin
    keys = ", ".join(change.partition("=")[0] for change in changes)
    return f"{shown_config(config.origin)}, but for {keys}"


def _model(request: GenerationRequest, config: DbspConfig, settings: Settings) -> tuple[str, ModelSignature]:
    model = request.model or config.model
    if model is None:
        raise UserError(f"{request.config} does not say which model it is for; add --model")
    identity = signature_of_model(model)
    if identity is None:
        names = [*MODEL_SPECS, *(f"{TINY}{name}" for name in TINY_MODELS)]
        given = "--model" if request.model else f"{settings.location_of(('model',))}: model"
        raise UserError(
            f"{given} {model}: neither a model that dbsp generate knows ({', '.join(names)}) nor a folder with "
            "model_index.json and transformer/config.json, as save_pretrained writes it"
            f"{did_you_mean(Path(model).name.casefold(), names)}; other families run in a script, by "
            f"dbsp_diffusers.enable: {page('diffusers')}"
        )
    require_same_model(config, identity)
    if identity.pipeline not in PIPELINES:
        raise UserError(f"--model {model} is {model_title(identity)}; db-SP generates with {', '.join(PIPELINES)}")
    spec = find_model_spec(model)
    other = published_model(identity)
    if spec is not None and other not in (None, spec) and other.hub == spec.hub:
        raise UserError(
            f"--model {model}: its weights are in files next to {spec.hub}; merge them into a folder and give that as "
            f"--model, with --config {spec.name}-sparge"
        )
    return model, identity


def _require_images(identity: ModelSignature, video: GenerateSettings) -> None:
    """Raises UserError for an image that the model needs; no setting is blamed for one that is missing."""
    given = sum(image is not None for image in (video.image, video.last_image))
    if given < identity.images[0]:
        again = " twice: the first frame, then the last" if identity.images[0] == 2 else ""
        raise UserError(f"{model_title(identity)} {identity.images_message(given)}; give one with --image FILE{again}")


def _require_source_video(request: GenerationRequest, identity: ModelSignature) -> None:
    """Raises UserError for a video to start from that cannot be read, or that the model does not take."""
    if request.video is None:
        return
    require_file(request.video, "--video", "give a video file, such as an mp4")
    if PIPELINES[identity.pipeline].from_video is None or identity.variant:
        able = [pipeline.title for pipeline in PIPELINES.values() if pipeline.from_video]
        raise UserError(
            f"--video: {model_title(identity)} does not start from a video; {' and '.join(able)} models do"
        )


def require_video(signature: ModelSignature, video: GenerateSettings) -> None:
    """Raises SettingError for what the pipeline would change or reject: frames, a size, or images."""
    spec = published_model(signature)
    if signature.pipeline in PIPELINES and video.num_frames is not None:
        message = PIPELINES[signature.pipeline].frames_message(video.num_frames)
        require_value(video, "num_frames", message is None, str(message), "generate.")
    for side in ("height", "width"):
        value = getattr(video, side)
        message = None if value is None or spec is None else side_message(value, spec.token_pixels)
        require_value(video, side, message is None, str(message), "generate.")
    message = signature.images_message(sum(image is not None for image in (video.image, video.last_image)))
    if message is not None:
        raise SettingError(f"{model_title(signature)} {message}", ("image",))
    if video.last_image is not None and video.image is None:
        raise SettingError("generate.last_image needs generate.image, the first frame", ("last_image",))


def _default_strategy(rank_info: RankInfo, config: DbspConfig) -> Strategy:
    """Divides heads within a node, and blocks between nodes where the kernel can."""
    ring = rank_info.nodes if supports(config.kernel, KernelRequirements(lse=True)) else 1
    return Strategy(rank_info.world // ring, ring)
