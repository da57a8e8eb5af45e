"""DbspConfig: every setting, in one place, from YAML, a dict or flags."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union

from dbsp_core.cost.prediction import AUTO
from dbsp_core.layout.sequence_layout import LAYOUTS
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.steps import DenseSchedule
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.signature import ModelSignature
from dbsp_core.models.table import ModelSpec, model_title, published_model, signature_of_model, signature_of_name
from dbsp_core.planning.bags import BagConfig
from dbsp_core.planning.chunks import ALL, NEEDED, require_keys
from dbsp_core.planning.planners import PlannerConfig, require_planner
from dbsp_core.planning.wire_format import MODEL, WIRE_FORMATS, WireFormat
from dbsp_core.sources import SOURCES, DenseSource, MaskSource, parts_of
from dbsp_core.sources.spec import mask_settings, mask_values, names_mask, read_mask
from dbsp_core.utils.errors import SettingError, UserError, bad_value, blame_setting, fingerprint_of, in_short
from dbsp_core.utils.schema import (
    build,
    checked,
    convert,
    keys_within,
    plain_value,
    read_path,
    require_choice,
    setting_names,
)
from dbsp_core.utils.yaml_file import (
    Settings,
    find_config,
    read_settings,
    require_known,
    shipped_configs,
    shown_config,
)
from dbsp_kernels import KernelRequirements, require_supported
from dbsp_kernels.kernel import require_kernel_name

__all__ = [
    "DEFAULT_ORIGIN",
    "ConfigLike",
    "DbspConfig",
    "ExchangeConfig",
    "ReuseConfig",
    "default_config",
    "require_same_model",
]


MODES = ("auto", "sync", "async")

_NOT_COMPARED = ("report", "record", "origin", "generate", "cost_model", "mask", "transformer_2")
"""Settings that may differ by rank, as paths do, or are compared apart."""

_UNNAMED = DenseSource()
"""The mask where none is named."""

ConfigLike = Union["DbspConfig", Settings, Mapping[str, Any], str, os.PathLike, None]


@dataclass(frozen=True)
class ReuseConfig:
    """How long plans are kept, and when new ones are made.

    Attributes:
        threshold: P_s: a layer's plan is kept while ρ_s of its current mask under it stays at or below this.
        mode: "sync" plans from each call's own mask, "async" one call behind, without waiting; "auto" is async for
            masks computed from queries and keys.
    """

    threshold: float = 1.10
    mode: str = "auto"

    def __post_init__(self) -> None:
        if not self.threshold >= 1:
            raise bad_value(self, "threshold", "must be at least 1, the least ρ_s there is", "reuse.")
        require_choice("mode", self.mode, MODES, "reuse.")


@dataclass(frozen=True)
class ExchangeConfig:
    """How queries, keys and values travel between ranks.

    Attributes:
        precision: "model": as the model has them; "int8": rounded, with a scale for each token and head.
    """

    precision: str = MODEL.name

    def __post_init__(self) -> None:
        require_choice("precision", self.precision, tuple(WIRE_FORMATS), "exchange.")

    @property
    def wire(self) -> WireFormat:
        """The format of that name."""
        return WIRE_FORMATS[self.precision]


def _read_strategy(value: Any, name: str) -> Any:
    if isinstance(value, (Strategy, type(None))) or value == AUTO:
        return value
    if isinstance(value, str):
        return Strategy.parse(value)
    raise UserError(f"{name} must be a strategy such as U4R2 or auto, got {in_short(value)}")


def _read_planner(value: Any, name: str) -> Any:
    return PlannerConfig(value) if isinstance(value, str) else convert(value, PlannerConfig | str, name, "planner")


def _read_bags(value: Any, name: str) -> Any:
    return BagConfig(value) if isinstance(value, str) else convert(value, BagConfig | str | None, name, "bags")


@dataclass(frozen=True)
class DbspConfig:
    """All settings of db-SP. Raises UserError, naming the key and the fix, for a value that makes no sense.

    Attributes:
        mask: Where masks come from, a mapping such as {source: window, window: [5, 9, 9]}. Dense where none is named,
            unless the model's checkpoint brings one of its own (NABLA).
        dense_schedule: Where attention stays dense, a mapping such as {first_steps: 10, first_layers: 1}.
        strategy: "UxRy", "auto" for the one predicted to be fastest at each attention (by a rule, if this machine was
            not measured), or None for the host's own degrees.
        layout: How tokens are laid out between attentions: "contiguous" or "striped"; None: contiguous with needed
            keys, else as the planner is meant for.
        planner: A `PlannerConfig`, a mapping for one, or only its name.
        keys: Keys and values come in chunks from where they live. "all": each rank is sent all of its heads';
            "needed": those that its rows need, for masks that are known beforehand. See docs/needed-keys.md.
        exchange: An `ExchangeConfig`, or a mapping for one.
        reuse: A `ReuseConfig`, or a mapping for one.
        cost_model: Constants that predict times: a name or file for `dbsp_core.cost.machine.load_hardware`. None:
            those that `python -m scripts.calibrate` measured here; without these, rules that need no constants.
        kernel: "auto", or a kernel's name.
        bags: How several sequences of one call are shared out: a `BagConfig`, a mapping for one, or only its topology,
            such as "g8n4" or "auto"; None: every rank shares in each sequence (see docs/bags.md).
        vae: Whether the ranks of a video decode it together, tile by tile (see docs/diffusers.md).
        report: Folder for the report (see docs/report.md), or None: nothing is observed.
        record: Folder for the masks of the run (see docs/mask-files.md), or None: $DBSP_RECORD if set.
        debug: All ranks check before each attention that inputs are finite, and that inputs, masks, plans and kernels
            fit together: see docs/configuration.md.
        transformer_2: What differs for a pipeline's second transformer (Wan2.2's for little noise), a mapping of
            settings such as {mask: {source: file, path: …}}.
        generate: No setting of attention: what else the same file says, see `GenerateSettings`.
        origin: No setting: the file that the settings come from, or None.
    """

    mask: MaskSource = field(default_factory=lambda: _UNNAMED, metadata={"read": read_mask})
    dense_schedule: DenseSchedule = field(default_factory=DenseSchedule)
    strategy: Strategy | Literal["auto"] | None = field(default=None, metadata={"read": _read_strategy})
    layout: str | None = None
    planner: PlannerConfig = field(default_factory=PlannerConfig, metadata={"read": _read_planner})
    keys: str = ALL
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    cost_model: str | None = field(default=None, metadata={"read": read_path})
    kernel: str = "auto"
    bags: BagConfig | None = field(default=None, metadata={"read": _read_bags})
    vae: bool = False
    report: str | None = field(default=None, metadata={"read": read_path})
    record: str | None = field(default=None, metadata={"read": read_path})
    debug: bool = False
    transformer_2: Mapping[str, Any] = field(default_factory=dict)
    generate: GenerateSettings = field(default_factory=GenerateSettings, metadata={"setting": False})
    origin: str | None = field(default=None, compare=False, metadata={"setting": False})

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in setting_names(DbspConfig)}
        for name, value in checked(DbspConfig, given, "").items():
            object.__setattr__(self, name, value)
        if self.transformer_2:
            with blame_setting("transformer_2"):
                self.for_transformer("transformer_2")
        if self.layout is not None:
            require_choice("layout", self.layout, LAYOUTS)
        with blame_setting("kernel"):
            require_kernel_name(self.kernel)
        with blame_setting("keys"):
            require_keys(self.keys)
        if self.keys == NEEDED and self.mask.changes == "per_call":
            raise SettingError(
                f"keys: {self.keys} is for masks that are known beforehand, and these are predicted from the queries "
                "and keys of each call, too late to choose what is sent; leave keys out",
                ("keys",),
            )
        if self.bags is not None:
            for name in ("report", "record"):
                if getattr(self, name) is not None:
                    raise SettingError(
                        f"a {name} is of ranks that share all sequences; leave out {name}, or bags", (name,)
                    )
        if isinstance(self.strategy, Strategy) and self.kernel != AUTO:  # $DBSP_KERNEL is compared by sessions
            with blame_setting("kernel"):
                require_supported(self.kernel, KernelRequirements(lse=self.strategy.ring > 1))

    def for_transformer(self, name: str) -> DbspConfig:
        """The settings of the transformer that a pipeline has by this name: "transformer" or "transformer_2"."""
        own = self.transformer_2 if name == "transformer_2" else {}
        if not own:
            return replace(self, transformer_2={})
        for key in (key for key in ("report", "vae", "transformer_2") if key in own):
            raise SettingError(f"'{key}' in 'transformer_2' is for both transformers; set it beside it", (key,))
        return replace(self, **checked(DbspConfig, {**own, "transformer_2": {}}, "'transformer_2'"))

    @property
    def mask_is_named(self) -> bool:
        """Whether a mask was given, maybe dense. Otherwise a model whose checkpoint brings a mask keeps it."""
        return self.mask is not _UNNAMED

    def strategy_or(self, host: Strategy) -> Strategy | None:
        """The strategy to use where the host has its own; None for "auto"."""
        if isinstance(self.strategy, Strategy):
            return self.strategy
        return None if self.strategy == AUTO else host

    @property
    def effective_layout(self) -> str:
        """The name of the layout that is used: the one that is set, else the default.

        Stripes make ring ranks nearly even. Runs of tokens need few keys of other ring ranks, stripes need all.
        """
        return self.layout or ("contiguous" if self.keys == NEEDED else require_planner(self.planner.name).layout)

    @property
    def effective_planning(self) -> str:
        """ "sync" or "async": what "auto" comes to for these masks."""
        if self.reuse.mode != "auto":
            return self.reuse.mode
        return "async" if self.mask.changes == "per_call" else "sync"

    @property
    def fingerprint(self) -> int:
        """Equal for settings that make the same plans. A mask file may be in another folder on another node."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_COMPARED}
        for place, mask in enumerate(parts_of(self.mask)):
            if type(mask) in SOURCES.values() and is_dataclass(mask):
                shown = {f.name: getattr(mask, f.name) for f in fields(mask) if f.name != "path"}
                plain[f"mask {place}"] = (type(mask).__name__, shown)
        return fingerprint_of(plain)

    @classmethod
    def load(cls, source: ConfigLike) -> DbspConfig:
        """Reads a configuration.

        Args:
            source: a DbspConfig (returned as it is), a mapping, None for the defaults, a YAML file: its path, or a
                shipped one's name; or a mask alone: "sparge:cdf=0.92", "masks.safetensors".

        Returns:
            The configuration. What the source says besides, which model and which video, is in its `generate`.

        Raises:
            UserError: for a value that makes no sense. For a file, the message begins with its name and the line.

        A folder that a file names as its model is relative to the file.
        """
        if source is None:
            return cls()
        if isinstance(source, DbspConfig):
            return source
        if isinstance(source, Mapping):
            return cls._of_mapping(source, "the configuration")
        if isinstance(source, (str, os.PathLike)) and names_mask(os.fspath(source)):
            return cls._of_mapping({"mask": mask_settings(os.fspath(source))}, "the configuration")
        settings = source if isinstance(source, Settings) else read_settings(find_config(source), "configuration file")
        with settings.located():
            config = replace(cls._of_mapping(settings.values, ""), origin=settings.origin or None)
        model = config.generate.model
        if model is None or signature_of_name(model) or not settings.place_of(("model",)).startswith(settings.origin):
            return config
        folder = str(Path(settings.origin).parent / model)
        return replace(config, generate=replace(config.generate, model=folder))

    @classmethod
    def _of_mapping(cls, values: Mapping[str, Any], where: str) -> DbspConfig:
        beside, elsewhere = setting_names(GenerateSettings), {"source": "mask"}
        for source in SOURCES.values():
            elsewhere |= dict.fromkeys(setting_names(source), "mask")
        elsewhere |= keys_within(cls) | keys_within(GenerateSettings)
        for key in values:
            require_known(key, [*setting_names(cls), *beside], where, elsewhere)
        generate = build(GenerateSettings, {key: values[key] for key in values if key in beside}, where)
        config = build(cls, {key: values[key] for key in values if key not in beside}, where)
        return replace(config, generate=generate)

    def to_values(self) -> dict[str, Any]:
        """Every setting as YAML can hold it: what `load` makes an equal configuration of."""
        beside = {name: plain_value(getattr(self.generate, name)) for name in setting_names(GenerateSettings)}
        own = {name: plain_value(getattr(self, name)) for name in setting_names(DbspConfig)}
        return beside | own | {"mask": mask_values(self.mask)}

    def with_overrides(self, **values: Any) -> DbspConfig:
        """A copy in which every value that is not None replaces the setting of that name.

        A planner's name replaces only the name: what else is set of planners stays.
        """
        given = {key: value for key, value in values.items() if value is not None}
        if isinstance(given.get("planner"), str):
            given["planner"] = replace(self.planner, name=given["planner"])
        return replace(self, **checked(DbspConfig, given, "the overrides")) if given else self


DEFAULT_ORIGIN = "no configuration was given and none is shipped for this model"
"""Stands for a file's name as the origin of settings."""


def default_config(identity: ModelSignature | None, spec: ModelSpec | None = None) -> DbspConfig:
    """The settings where nothing is configured: those shipped for a known model, dense attention for others.

    Args:
        spec: Which of the models with this signature it is, where a name tells.
    """
    spec = spec or (None if identity is None else published_model(identity))
    path = None if spec is None else shipped_configs() / f"{spec.name}-sparge.yaml"
    if path is None or not path.is_file():
        return DbspConfig(origin=DEFAULT_ORIGIN)
    return DbspConfig.load(path)


def require_same_model(config: DbspConfig, actual: ModelSignature | None, with_pipeline: bool = True) -> None:
    """Raises UserError when a configuration names another checkpoint than the actual one, if both can be told.

    Args:
        with_pipeline: Whether the actual pipeline is known, not only its transformer.
    """
    wanted = None if config.generate.model is None else signature_of_model(config.generate.model)
    if wanted is None or actual is None:
        return
    same = wanted == actual if with_pipeline else wanted.sizes == actual.sizes
    if not same:
        where = f" ({shown_config(config.origin)})" if config.origin else ""
        raise UserError(
            f"the configuration{where} is for {model_title(wanted)}, the model is {model_title(actual)}; take the "
            "configuration of that model, or leave out 'model' to use these settings for any"
        )
