"""DbspConfig: all settings, from YAML, a dict or flags."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union

from dbsp_core.cost.prediction import AUTO
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.steps import DenseSchedule
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.signature import ModelSignature
from dbsp_core.models.table import ModelSpec, model_title, published_model, signature_of_model, signature_of_name
from dbsp_core.planning.bags import BagConfig
from dbsp_core.planning.chunks import ALL, NEEDED
from dbsp_core.planning.comm_dtype import MODEL, CommDtype, read_comm_dtype
from dbsp_core.planning.planner_config import DEFAULT_PLANNER, PlannerConfig, read_planner
from dbsp_core.sources import SOURCES, DenseSource, MaskSource, parts_of
from dbsp_core.sources.base import BlockSizes
from dbsp_core.sources.spec import mask_settings, mask_values, names_mask, read_mask
from dbsp_core.sources.static import StoredMasks
from dbsp_core.utils.errors import (
    SettingError,
    UserError,
    blame_setting,
    fingerprint_of,
    in_short,
    kind_of,
    require_value,
)
from dbsp_core.utils.files import expand_path
from dbsp_core.utils.process import DEBUG, RECORD, environment_flag, environment_value
from dbsp_core.utils.schema import (
    build,
    checked,
    convert,
    keys_within,
    plain_value,
    read_path,
    require_known,
    setting_names,
)
from dbsp_core.utils.yaml_file import KeyPath, Settings, find_config, read_settings, shipped_configs, shown_config
from dbsp_kernels import KernelRequirements, require_supported
from dbsp_kernels.kernel import require_kernel_name, supports

_NOT_COMPARED = ("model", "generate", "mask", "machine", "report", "transformer_2", "record", "origin")
"""Settings that may differ by rank, as paths do, or are compared apart."""

_UNNAMED = DenseSource()  # default mask

ConfigLike = Union["DbspConfig", Settings, Mapping[str, Any], MaskSource, Callable[..., Any], str, os.PathLike, None]


def _record_folder() -> str | None:
    folder = environment_value(RECORD)
    return None if folder is None or folder == "0" else expand_path(folder)


def _read_strategy(value: Any, name: str) -> Any:
    if isinstance(value, (Strategy, type(None))) or value == AUTO:
        return value
    if isinstance(value, str):
        return Strategy.parse(value)
    raise UserError(f"{name} must be a strategy such as U4R2 or auto, got {in_short(value)}")


def _read_bags(value: Any, name: str) -> Any:
    return BagConfig(value) if isinstance(value, str) else convert(value, BagConfig | str | None, name, "bags")


def _is_mask(config: Any) -> bool:
    """Returns True if the configuration is only a mask."""
    if isinstance(config, Mapping):
        return "source" in config and not set(setting_names(DbspConfig)) & set(config)
    if isinstance(config, (str, os.PathLike)):
        return names_mask(os.fspath(config))
    return callable(config) or hasattr(config, "mask")


def _with_paths_beside(settings: Settings) -> dict[str, Any]:
    """Returns a file's values with paths of masks made relative to the current folder instead of the file."""
    folder = Path(settings.origin).parent

    def mask_of(value: Any, keys: KeyPath) -> Any:
        if isinstance(value, str):
            with suppress(UserError):  # reported when the mask is read
                written = mask_settings(value)
                value = written if {"path", "of"} & set(written) else value
        if isinstance(value, Mapping):
            path, parts = value.get("path"), value.get("of")
            in_file = settings.location_of((*keys, "path")).startswith(settings.origin)
            if isinstance(path, str) and path and in_file and value.get("source") != "record_qk":  # an output
                value = {**value, "path": str(folder / expand_path(path))}
            if isinstance(parts, list):
                parts = [mask_of(part, (*keys, "of", str(number))) for number, part in enumerate(parts)]
                value = {**value, "of": parts}
        return value

    values = dict(settings.values)
    if "mask" in values:
        values["mask"] = mask_of(values["mask"], ("mask",))
    second = values.get("transformer_2")
    if isinstance(second, Mapping) and "mask" in second:
        values["transformer_2"] = {**second, "mask": mask_of(second["mask"], ("transformer_2", "mask"))}
    return values


@dataclass(frozen=True)
class DbspConfig:
    """All settings of db-SP. Raises UserError for invalid values, naming the key and the fix.

    Attributes:
        model: Checkpoint that the settings are for: a name, or a folder relative to the file. `dbsp generate` loads
            it; enabling db-SP on another one is an error. None: any.
        generate: Settings of `dbsp generate`, such as {height: 480, width: 832, steps: 50}. `xdit` reads the dtype.
        mask: Source of the block masks, in any spelling of docs/masks.md. None: the checkpoint's (NABLA), or dense.
        dense_schedule: Steps and layers that stay dense, such as {first_steps: 10, first_layers: 1}.
        strategy: `UxRy`: x ranks share heads (Ulysses), y ranks share the sequence (ring). `auto`: the predicted
            fastest; see docs/latency-model.md. None: the framework's degrees.
        planner: `dbsp`, `paper` (Alg. 1 of the db-SP paper), `contiguous` (equal split, as USP) or `snake` (xDiT's).
        precision: Dtype in which queries, keys and values are sent. `model`: unchanged. `int8`: 8 bits with a scale
            per token and head, not for gradients; {qkv: int8, out: int8} also sends the output in 8 bits.
        plan: Block counts that plans of predicted masks use. `lagged`: those of the previous call, without waiting.
            `current`: those of this call, as in the paper; the host waits once per call.
        keys: Keys and values that are sent to a rank. `all`: those of its heads. `needed`: those that its rows attend
            to (predicted masks: only with `plan: current`). `auto`: needed if the mask never changes; see
            docs/how-it-works.md.
        reuse: A plan is kept while its imbalance ρ_s on the current mask is at most this. The paper's P_s is 1.10; see
            docs/results/even.md.
        kernel: Attention kernel; see docs/kernels.md. `auto`: the fastest that was exact in `dbsp bench`, else
            `triton` on CUDA and `cpu` on the CPU.
        machine: Hardware profile for predicting times: `a800`, `b200`, `h100`, `h20`, `h200` or `h800` (modelled), or
            a file of `dbsp bench`. None: measured by `dbsp bench` on this machine, else rules without constants.
        bags: Groups of ranks that share the sequences of one call, such as `g8n4`; see docs/packed-sequences.md. None:
            all ranks share every sequence.
        vae: True to decode the video on all ranks together, tile by tile; see docs/diffusers.md.
        report: Folder of the report; see docs/report.md. None: no report.
        transformer_2: Settings that differ for a pipeline's second transformer (Wan2.2 A14B), such as {mask: {source:
            file, path: low-noise.safetensors}}.
        record: Not a setting: the folder of $DBSP_RECORD for recorded masks, or None; see docs/mask-files.md.
        debug: Not a setting: True if $DBSP_DEBUG is set. Ranks then compare inputs, masks, plans and kernels before
            each attention.
        origin: Not a setting: the file that the settings come from, or None.
    """

    model: str | None = field(default=None, metadata={"read": read_path})
    generate: GenerateSettings = field(default_factory=GenerateSettings)
    mask: MaskSource = field(default_factory=lambda: _UNNAMED, metadata={"read": read_mask})
    dense_schedule: DenseSchedule = field(default_factory=DenseSchedule)
    strategy: Strategy | Literal["auto"] | None = field(default=None, metadata={"read": _read_strategy})
    planner: PlannerConfig = field(default=DEFAULT_PLANNER, metadata={"read": read_planner})
    precision: CommDtype = field(default=MODEL, metadata={"read": read_comm_dtype})
    plan: Literal["lagged", "current"] = "lagged"
    keys: Literal["auto", "all", "needed"] = "auto"
    reuse: float = 1.02
    kernel: str = "auto"
    machine: str | None = field(default=None, metadata={"read": read_path})
    bags: BagConfig | None = field(default=None, metadata={"read": _read_bags})
    vae: bool = False
    report: str | None = field(default=None, metadata={"read": read_path})
    transformer_2: Mapping[str, Any] = field(default_factory=dict)
    record: str | None = field(default_factory=_record_folder, metadata={"setting": False})
    debug: bool = field(default_factory=lambda: environment_flag(DEBUG), metadata={"setting": False})
    origin: str | None = field(default=None, compare=False, metadata={"setting": False})

    def __post_init__(self) -> None:
        settings = {name: getattr(self, name) for name in setting_names(DbspConfig)}
        for name, value in checked(DbspConfig, settings, "").items():
            object.__setattr__(self, name, value)
        if self.transformer_2:
            with blame_setting("transformer_2"):
                self.for_transformer("transformer_2")
        require_value(self, "reuse", self.reuse >= 1, "must be at least 1, the smallest possible ρ_s")
        with blame_setting("kernel"):
            require_kernel_name(self.kernel)
        if self.bags is not None:
            for name, shown in (("report", "report"), ("record", f"${RECORD}")):
                if getattr(self, name) is not None:
                    message = "requires that all ranks share every sequence; remove it or bags"
                    raise SettingError(f"{shown} {message}", (name,))
        if self.keys == NEEDED and self.mask.changes == "per_call" and self.plan != "current":
            message = "keys: needed sends what each mask needs, so a predicted mask must come first; set plan: current"
            raise SettingError(message, ("keys",))
        if self.keys == NEEDED and self.whole_heads:
            message = f"keys: needed splits heads, which kernel {self.kernel} does not support; remove keys"
            raise SettingError(message, ("keys",))
        if self.kernel != AUTO:  # sessions compare $DBSP_KERNEL
            ring = isinstance(self.strategy, Strategy) and self.strategy.ring > 1
            known = self.mask_is_named and not isinstance(parts_of(self.mask)[0], StoredMasks)
            blocks = self.blocks if known else None  # files are read when used
            with blame_setting("kernel"):
                require_supported(self.kernel, KernelRequirements(blocks, lse=ring or self.absent_keys))

    def for_transformer(self, name: str) -> DbspConfig:
        """Returns the settings of a pipeline's transformer, "transformer" or "transformer_2"."""
        settings = self.transformer_2 if name == "transformer_2" else {}
        if not settings:
            return replace(self, transformer_2={})
        for key in (key for key in ("model", "generate", "report", "vae", "transformer_2") if key in settings):
            raise SettingError(f"'{key}' in 'transformer_2' is for both transformers; set it one level up", (key,))
        return replace(self, **checked(DbspConfig, {**settings, "transformer_2": {}}, "'transformer_2'"))

    @property
    def mask_is_named(self) -> bool:
        """True if a mask was set, even dense. Otherwise a checkpoint with its own mask keeps it."""
        return self.mask is not _UNNAMED

    @property
    def absent_keys(self) -> bool:
        """True if masks have absent keys (`BlockMask.absent`), which need a kernel that returns its log-sum-exp."""
        return any(getattr(part, "absent_keys", False) for part in parts_of(self.mask))

    @property
    def blocks(self) -> tuple[int, int] | None:
        """(block_q, block_k) of masks, or None for a custom source. Raises UserError for a missing or bad file."""
        mask = parts_of(self.mask)[0]
        return (mask.block_q, mask.block_k) if isinstance(mask, (BlockSizes, StoredMasks)) else None

    @property
    def whole_heads(self) -> bool:
        """True if the kernel supports only whole heads, so that plans must not split heads."""
        return not supports(self.kernel, KernelRequirements(ragged_rows=True))

    def strategy_or(self, default: Strategy) -> Strategy | None:
        """Returns the strategy to use where the framework has `default`; None for "auto"."""
        if isinstance(self.strategy, Strategy):
            return self.strategy
        return None if self.strategy == AUTO else default

    @property
    def keys_sent(self) -> str:
        """Keys and values sent to each rank: "needed" by its rows, or "all"; "auto" is "needed" for static masks.

        "needed" takes a new plan whenever the needed keys change. Kernels for whole heads get all of their keys.
        """
        if self.keys != AUTO:
            return self.keys
        return NEEDED if self.mask.changes == "never" and not self.whole_heads else ALL

    @property
    def layout(self) -> str:
        """Name of the sequence layout: "contiguous" for static masks and selective exchange, else the planner's.

        Stripes make ring ranks nearly even. Contiguous runs of tokens need few keys of other ring ranks, stripes need
        all.
        """
        runs = self.mask.changes == "never" or self.keys == NEEDED
        return "contiguous" if runs else self.planner.layout

    @property
    def fingerprint(self) -> int:
        """Equal for settings that make equal plans; excludes paths, since a mask file's folder may differ by node."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_COMPARED}
        for location, mask in enumerate(parts_of(self.mask)):
            if type(mask) in SOURCES.values() and is_dataclass(mask):
                shown = {f.name: getattr(mask, f.name) for f in fields(mask) if f.init and f.name != "path"}
                plain[f"mask {location}"] = (type(mask).__name__, shown)
        return fingerprint_of(plain)

    @classmethod
    def load(cls, source: ConfigLike) -> DbspConfig:
        """Reads a configuration.

        Args:
            source: A DbspConfig (returned unchanged); a mapping; None for defaults; the path of a YAML file or the
                name of a shipped one; or a mask in any spelling of docs/masks.md: "sparge:cdf=0.92", {"source":
                "sparge"}, a function. In a file, the model's folder and the mask's `path` are relative to the file.

        Raises:
            UserError: A value is invalid. For a file, the message begins with its name and the line.
        """
        if source is None:
            return cls()
        if isinstance(source, DbspConfig):
            return source
        if _is_mask(source):
            return cls._of_mapping({"mask": source}, "the configuration")
        if isinstance(source, Mapping):
            return cls._of_mapping(source, "the configuration")
        if not isinstance(source, (Settings, str, os.PathLike)):
            raise UserError(f"config must be a DbspConfig, a mapping, a YAML file or a mask, got {kind_of(source)}")
        settings = source if isinstance(source, Settings) else read_settings(find_config(source), "configuration file")
        with settings.located():
            values = _with_paths_beside(settings) if settings.origin else settings.values
            config = replace(cls._of_mapping(values, ""), origin=settings.origin or None)
        model, in_file = config.model, settings.location_of(("model",)).startswith(settings.origin)
        if model is None or signature_of_name(model) or not in_file:
            return config
        return replace(config, model=str(Path(settings.origin).parent / model))

    @classmethod
    def _of_mapping(cls, values: Mapping[str, Any], where: str) -> DbspConfig:
        elsewhere = {"source": "mask"}
        for source in SOURCES.values():
            elsewhere |= dict.fromkeys(setting_names(source), "mask")
        elsewhere |= keys_within(cls)
        for key in values:
            require_known(key, setting_names(DbspConfig), where, elsewhere)
        config: DbspConfig = build(cls, values, where)
        return config

    def to_values(self) -> dict[str, Any]:
        """Returns every setting as plain YAML values, from which `load` makes an equal configuration."""
        values = {name: plain_value(getattr(self, name)) for name in setting_names(DbspConfig)}
        nested = {"mask": mask_values(self.mask), "planner": self.planner.setting, "precision": self.precision.setting}
        return values | nested


DEFAULT_ORIGIN = "no configuration was given and none is shipped for this model"
"""Origin of default settings, in place of a file's name."""


def default_config(identity: ModelSignature | None, spec: ModelSpec | None = None) -> DbspConfig:
    """Returns the default settings: shipped ones for a known model, dense attention for others.

    `spec` is the model with this signature, if known by name.
    """
    named = (spec, None if identity is None else published_model(identity))
    paths = (shipped_configs() / f"{known.name}-{known.mask}.yaml" for known in named if known is not None)
    path = next((path for path in paths if path.is_file()), None)
    return DbspConfig(origin=DEFAULT_ORIGIN) if path is None else DbspConfig.load(path)


def require_same_model(config: DbspConfig, actual: ModelSignature | None, with_pipeline: bool = True) -> None:
    """Raises UserError if a configuration names another checkpoint than the actual one (both known).

    `with_pipeline`: True if the pipeline is known, not only its transformer.
    """
    named = None if config.model is None else signature_of_model(config.model)
    if named is None or actual is None:
        return
    same = named == actual if with_pipeline else named.sizes == actual.sizes
    if not same:
        where = f" ({shown_config(config.origin)})" if config.origin else ""
        raise UserError(
            f"the configuration{where} is for {model_title(named)}, the model is {model_title(actual)}; use the "
            "configuration of that model, or remove 'model' to use these settings for any model"
        )
