"""Decides everything about a job from a user's request, and checks what can be checked before processes start."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dbsp_cli.generate.hosts import HOSTS, find_host
from dbsp_cli.generate.images import fitted
from dbsp_cli.generate.launch import Launch, Rendezvous
from dbsp_cli.generate.rank_output import require_own_log
from dbsp_cli.generate.resources import duration_notice
from dbsp_cli.output import require_apart, require_file_place
from dbsp_cli.tiny_models import TRAINED_WAN, unknown_words
from dbsp_core.config import DEFAULT_ORIGIN, DbspConfig, default_config, require_same_model
from dbsp_core.layout.strategy import Strategy
from dbsp_core.models.settings import GenerateSettings, side_complaint
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
from dbsp_core.utils.files import expand_path, require_folder_place
from dbsp_core.utils.process import RECORD
from dbsp_core.utils.yaml_file import Settings, find_config, parse_value, read_settings, shown_config
from dbsp_kernels import KernelRequirements, choose_kernel
from dbsp_kernels.kernel import supports

__all__ = ["TIMEOUT_S", "GenerateJob", "GenerateRequest", "require_video", "resolve"]

TIMEOUT_S = 600.0
"""NCCL's default: longer than any rank waits for the others in a run that goes well."""
_MAX_TIMEOUT_S = 1_000_000


@dataclass(frozen=True)
class GenerateRequest:
    """What a user asks for; None and empty mean the usual.

    Attributes:
        config: File, or name of a shipped one.
        model: Name or folder.
        changes: "key=value", with dots in the key.
        host: A key of `HOSTS`, or another name of one.
        nproc: Processes on this node; `launch` says all else about processes and nodes.
        timeout: Seconds that a rank waits for others.
    """

    config: str | None = None
    model: str | None = None
    prompt: str | None = None
    image: Path | None = None
    last_image: Path | None = None
    seed: int | None = None
    changes: Sequence[str] = ()
    host: str | None = None
    nproc: int | None = None
    launch: Launch = field(default_factory=Launch)
    out: Path = Path("video.mp4")
    report: Path | None = None
    timeout: float = TIMEOUT_S


@dataclass(frozen=True)
class GenerateJob:
    """One video to make, with everything decided.

    Attributes:
        settings: Content of the configuration file that the ranks read, but for paths.
        given: The settings as the user gave them, with the place of each.
        origin: Where they come from, in words.
        model: Repository or folder that the ranks load; None for a tiny checkpoint of architecture `tiny`, which is
            made first.
        warnings: What the user should know before the run.
    """

    config: DbspConfig
    settings: dict[str, Any]
    given: Settings
    origin: str
    model: str | None
    tiny: str | None
    host: str
    launch: Launch
    out: Path
    report: Path | None
    timeout: float
    warnings: tuple[str, ...] = ()

    def command(self, work: Path) -> list[str]:
        arguments = [str(work / "dbsp.yaml"), str(work / "video.mp4"), f"{self.timeout:g}"]
        return self.launch.command(HOSTS[self.host].module, arguments, self.rendezvous)

    @property
    def rendezvous(self) -> Rendezvous | None:
        return self.launch.rendezvous(self.timeout)

    def settings_in(self, work: Path) -> dict[str, Any]:
        """The settings that the ranks read, with paths in the work folder, where they always leave a report."""
        images = {name: str(work / f"{name}.png") for name in self.images}
        model = self.model or str(work / f"{TINY}{self.tiny}")
        return self.settings | {
            "model": model,
            "report": str(work / "report"),
            "generate": self.settings["generate"] | images,
        }

    @property
    def images(self) -> dict[str, Path]:
        """The files that the video is made from, by setting; ranks read copies in the video's size."""
        video = self.config.generate
        given = {"image": video.image, "last_image": video.last_image}
        return {name: Path(path) for name, path in given.items() if path is not None}

    @property
    def effective(self) -> dict[str, Any]:
        """Every setting, with "auto" and defaults replaced by what they mean here."""
        config = self.config
        kernel = choose_kernel(
            config.kernel, "cuda" if torch.cuda.is_available() else "cpu", config.generate.torch_dtype
        )
        found = {
            "model": self.model or f"{TINY}{self.tiny}",
            "layout": config.layout,
            "keys": config.keys,
            "kernel": kernel.name,
        }
        values = config.to_values()
        generate = values["generate"] | {"dtype": str(config.generate.torch_dtype).removeprefix("torch.")}
        return values | found | {"generate": generate, "report": self.report and str(self.report)}

    @property
    def name(self) -> str:
        """Stem of the log and lock file; unique per node and rank, which may share a folder."""
        joined = self.launch.joined
        if joined:
            return self.out.stem + (f".rank{joined.rank}" if joined.rank else "")
        return self.out.stem + (f".{platform.node()}" if self.launch.nnodes > 1 else "")

    @property
    def log(self) -> Path:
        return self.out.with_name(f"{self.name}.log")

    @property
    def lock(self) -> Path:
        return self.out.with_name(f".{self.name}.lock")


def resolve(request: GenerateRequest) -> GenerateJob:
    """Decides and checks all that can be known before a process is started.

    Raises:
        UserError: The user must change something.
    """
    from dbsp_diffusers.preflight import require_possible  # here: it takes seconds to import

    if request.model is not None:
        request = replace(request, model=expand_path(request.model))
    settings = _settings(request)
    config = DbspConfig.load(settings)
    model, identity = _model(request, config, settings)
    spec = find_model_spec(model) or published_model(identity)
    with settings.located(), blame_setting("generate"):
        video = config.generate.filled(None if spec is None else spec.video)
    _require_images(identity, video)
    with settings.located():
        with blame_setting("generate"):
            require_video(identity, video)
        require_possible(config)
    if video.prompt is None:
        raise UserError("there is no prompt; give one with --prompt, or as generate.prompt in the configuration")
    launch = request.launch.on_this_node(request.nproc)
    strategy = config.strategy or _default_strategy(launch, config)
    if isinstance(strategy, Strategy):
        strategy.require_world(launch.world)
    out = request.out.absolute()
    if out.suffix != ".mp4":
        raise UserError(f"--out {request.out} must end in .mp4")
    require_file_place(out, "--out")
    report = _report(request, config, settings, here=bool(launch.leads))
    if not 0 < request.timeout <= _MAX_TIMEOUT_S:
        bound = "above 0" if not request.timeout > 0 else f"at most {_MAX_TIMEOUT_S:,}"
        raise UserError(f"--timeout {request.timeout:g} must be {bound} seconds; {TIMEOUT_S:g} is usual")
    tiny, named = tiny_architecture(model), find_model_spec(model)
    warnings = (
        config.dense_schedule.complaint(video.steps),
        duration_notice(spec, video, launch.world),
        unknown_words(TRAINED_WAN if tiny == "wan-trained" else Path(model), video.prompt),
    )
    given_video = {key: value for key, value in asdict(video).items() if value is not None}
    job = GenerateJob(
        config=replace(config, generate=video, strategy=strategy),
        settings={**settings.values, "generate": given_video, "strategy": str(strategy)},
        given=settings,
        origin=_origin_in_words(settings, request.changes),
        model=None if tiny else named.hub if named else os.path.abspath(model),
        tiny=tiny,
        host=find_host(request.host),
        launch=launch,
        out=out,
        report=report,
        timeout=request.timeout,
        warnings=tuple(filter(None, warnings)),
    )
    require_own_log(job.log)
    _require_apart(job)
    for name, path in job.images.items():
        with settings.located(), blame_setting("generate"), blame_setting(name):
            fitted(path, video)
    # what only the host knows to refuse
    check: Callable[[DbspConfig, str, ModelSignature], None] = importlib.import_module(HOSTS[job.host].module).check
    if job.model is not None:
        check(job.config, job.model, identity)
    return job


def _settings(request: GenerateRequest) -> Settings:
    if request.config is None and request.model is None:
        names = ", ".join(MODEL_SPECS)
        raise UserError(f"nothing says which model; give --model ({names}, or a folder) or --config")
    if request.config is not None:
        settings = read_settings(find_config(request.config), "configuration file")
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
        settings = settings.changed(key.split("."), parse_value(text, f"--set {key}"), f"--set {key}")
    for name in ("prompt", "seed", "image", "last_image"):
        value = getattr(request, name)
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            value = str(value) if isinstance(value, Path) else value
            value = _in_utf8(value, option) if name == "prompt" else value
            settings = settings.changed(("generate", name), value, option)
    return settings


def _in_utf8(text: str, option: str) -> str:
    """Returns an option's text, read as UTF-8 where the locale's encoding could not read it."""
    try:
        return os.fsencode(text).decode() if any("\udc80" <= one <= "\udcff" for one in text) else text
    except UnicodeError:
        raise UserError(f"{option} {in_short(text)} is not text in UTF-8; set a locale that can read it") from None


def _report(request: GenerateRequest, config: DbspConfig, settings: Settings, here: bool) -> Path | None:
    """The folder for the report, checked where `here`: it is written on the node of rank 0."""
    given = request.report or (Path(config.report) if config.report else None)
    report = None if given is None else given.absolute()
    if config.record is not None and here:
        require_folder_place(Path(config.record).absolute(), f"${RECORD}")
    if here and request.report is not None:
        require_folder_place(request.report.absolute(), "--report")
    elif here and report is not None:
        with settings.located(), blame_setting("report"):
            require_folder_place(report, "report")
    return report


def _require_apart(job: GenerateJob) -> None:
    """Raises UserError where results would be written over one another, or over what the video is made from."""
    folders = {"--report": job.report, f"${RECORD}": None if job.config.record is None else Path(job.config.record)}
    inputs = {f"--{name.replace('_', '-')}": path for name, path in job.images.items()}
    if os.path.isfile(job.given.origin):
        inputs["--config"] = Path(job.given.origin)
    require_apart(
        {"--out": job.out, "the log of --out": job.log},
        {name: path for name, path in folders.items() if path is not None},
        inputs,
    )


def _origin_in_words(settings: Settings, changes: Sequence[str]) -> str:
    from_file = settings.origin if settings.origin in ("", DEFAULT_ORIGIN) else f"from {shown_config(settings.origin)}"
    keys = ", ".join(change.partition("=")[0] for change in changes)
    return from_file + (f", but for {keys}" if keys else "")


def _model(request: GenerateRequest, config: DbspConfig, settings: Settings) -> tuple[str, ModelSignature]:
    model = request.model or config.model
    if model is None:
        raise UserError(f"{request.config} does not say which model it is for; add --model")
    identity = signature_of_model(model)
    if identity is None:
        names = [*MODEL_SPECS, *(f"{TINY}{name}" for name in TINY_MODELS)]
        given = "--model" if request.model else f"{settings.place_of(('model',))}: model"
        raise UserError(
            f"{given} {model}: neither a known model ({', '.join(names)}) nor a folder with model_index.json and "
            f"transformer/config.json, as save_pretrained writes it{did_you_mean(Path(model).name.casefold(), names)}"
        )
    require_same_model(config, identity)
    spec = find_model_spec(model)
    other = published_model(identity)
    if spec is not None and other not in (None, spec) and other.hub == spec.hub:
        raise UserError(
            f"--model {model}: its weights are in files beside {spec.hub}; merge them into a folder and give that as "
            f"--model, with --config {spec.name}-sparge"
        )
    return model, identity


def _require_images(identity: ModelSignature, video: GenerateSettings) -> None:
    """Raises UserError for an image that the model needs; no setting is blamed for one that is missing."""
    given = {"--image": video.image, "--last-image": video.last_image}
    missing = [option for option, image in given.items() if image is None]
    if len(given) - len(missing) < identity.images[0]:
        complaint = identity.images_complaint(len(given) - len(missing))
        raise UserError(f"{model_title(identity)} {complaint}; give one with {missing[0]} FILE")


def require_video(signature: ModelSignature, video: GenerateSettings) -> None:
    """Raises SettingError for what the pipeline would change or refuse: frames, a size, or images."""
    spec = published_model(signature)
    if signature.pipeline in PIPELINES and video.num_frames is not None:
        complaint = PIPELINES[signature.pipeline].frames_complaint(video.num_frames)
        require_value(video, "num_frames", complaint is None, str(complaint), "generate.")
    for side in ("height", "width"):
        value = getattr(video, side)
        complaint = None if value is None or spec is None else side_complaint(value, spec.token_pixels)
        require_value(video, side, complaint is None, str(complaint), "generate.")
    complaint = signature.images_complaint(sum(image is not None for image in (video.image, video.last_image)))
    if complaint is not None:
        raise SettingError(f"{model_title(signature)} {complaint}", ("image",))
    if video.last_image is not None and video.image is None:
        raise SettingError("generate.last_image needs generate.image, the first frame", ("last_image",))


def _default_strategy(launch: Launch, config: DbspConfig) -> Strategy:
    """Divides heads within a node, and blocks between nodes where the kernel can."""
    ring = launch.nodes if supports(config.kernel, KernelRequirements(lse=True)) else 1
    return Strategy(launch.world // ring, ring)
