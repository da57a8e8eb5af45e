"""DbspConfig: every setting, in one place, from YAML, a dict or flags."""

from __future__ import annotations

import difflib
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from dbsp_core.config.video import VideoSettings
from dbsp_core.cost.selection import AUTO
from dbsp_core.layout.sequence_layout import LAYOUT_ORDERS
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.schedule import DenseSchedule
from dbsp_core.planning.planners import PlannerSettings, require_planner
from dbsp_core.sources import SOURCES, DenseSource, MaskSource
from dbsp_core.utils.errors import SettingError, UserError, bad_value, blame_setting
from dbsp_core.utils.fingerprint import fingerprint_of
from dbsp_core.utils.yaml_file import Settings, find_config, read_settings, require_known
from dbsp_kernels import KERNELS, KernelRequirements, require_fit

__all__ = ["DTYPES", "ConfigLike", "DbspConfig", "setting_names"]

PLANNING = ("auto", "immediate", "lagged")
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")

_LOCAL = ("report", "record", "origin", "model", "video", "hardware", "mask")
"""Settings that may differ by rank, as paths do, or are compared apart."""

ConfigLike = Union["DbspConfig", Settings, Mapping[str, Any], str, os.PathLike, None]


@dataclass(frozen=True)
class DbspConfig:
    """All settings of db-SP. Raises ValueError, naming the key and the fix, for a value that makes no sense.

    mask:             where masks come from, a mapping such as {source: window, window: [5, 9, 9]}
    dense:            where attention stays dense, a mapping such as {first_steps: 10, first_layers: 1}
    strategy:         "UxRy", "auto" for the one predicted to be fastest at each attention, or None for the host's own
                      degrees
    hardware:         whose constants predict it: a name or file for `dbsp_core.cost.hardware.load_hardware`; None:
                      shipped ones that come nearest
    planner:          a name from dbsp_core.planning.planners.PLANNERS: "dbsp" (ours), "paper" (Alg. 1), "contiguous" …
    home:             how tokens are laid out between attentions: "contiguous", "striped" or "learned"; None: as the
                      planner is meant for
    reward:           R_b of the paper's biased greedy: how strongly blocks are held where they are
    head_cap:         whether the paper's planner keeps head counts per Ulysses column equal (up to one)
    tolerance:        ρ_s at which planner "dbsp" is content; None: 1.002 for Ulysses alone, 1.005 with a ring
    exchange_cost:    what exchanging all of Q, K, V once costs in units of ρ_s, for planner "dbsp" to weigh; None: as
                      the constants of `hardware` say
    replan_threshold: P_s: a layer's plan is kept while ρ_s of its current mask under it stays at or below this
    replan_budget:    and while what it has wasted, Σ over its calls of ρ_s less the least known when it was made,
                      stays at or below this; new plans then look ahead. None: the threshold alone, as in the paper
    planning:         "immediate" plans from each call's own mask, "lagged" one call behind, without waiting; "auto" is
                      lagged for masks computed from queries and keys
    kernel:           "auto" or a kernel's name
    dtype:            in which weights are loaded; auto is bfloat16 on an accelerator, float32 without
    report:           folder for the report (see docs/report.md), or None: nothing is observed
    record:           folder for the masks of the run (see docs/mask-files.md), or None: $DBSP_RECORD if set
    debug:            all ranks check before each attention that inputs are finite and plans equal
    model:            the checkpoint that the other settings are for, a name or a folder (see dbsp_core.config.models):
                      attaching to another one is refused; None: for any
    video:            what `dbsp generate` makes, a mapping such as {height: 480, width: 832, steps: 50}
    origin:           no setting: the file that the settings come from, or None
    """

    mask: MaskSource = field(default_factory=DenseSource)
    dense: DenseSchedule = field(default_factory=DenseSchedule)
    strategy: Strategy | Literal["auto"] | None = None
    hardware: str | None = None
    planner: str = "dbsp"
    home: str | None = None
    reward: float = 1.0
    head_cap: bool = False
    tolerance: float | None = None
    exchange_cost: float | None = None
    replan_threshold: float = 1.10
    replan_budget: float | None = 0.30
    planning: str = "auto"
    kernel: str = "auto"
    dtype: str = "auto"
    report: str | None = None
    record: str | None = None
    debug: bool = False
    model: str | None = None
    video: VideoSettings = field(default_factory=VideoSettings)
    origin: str | None = field(default=None, compare=False, metadata={"setting": False})

    def __post_init__(self) -> None:
        if isinstance(self.strategy, str) and self.strategy != AUTO:
            with blame_setting("strategy"):
                object.__setattr__(self, "strategy", Strategy.parse(self.strategy))
        if isinstance(self.mask, Mapping):
            with blame_setting("mask"):
                object.__setattr__(self, "mask", _source_from(self.mask))
        for name, cls in (("dense", DenseSchedule), ("video", VideoSettings)):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                with blame_setting(name):
                    object.__setattr__(self, name, _build(cls, value, repr(name)))
        with blame_setting("planner"):
            require_planner(self.planner)
        if self.home is not None:
            _require("home", self.home, tuple(LAYOUT_ORDERS))
        _require("kernel", self.kernel, ("auto", *KERNELS))
        _require("planning", self.planning, PLANNING)
        _require("dtype", self.dtype, DTYPES)
        PlannerSettings(self.reward, self.head_cap, self.tolerance, self.exchange_cost or 0.0)
        if not self.replan_threshold >= 1:
            raise bad_value(self, "replan_threshold", "must be at least 1, the least ρ_s there is")
        if self.replan_budget is not None and not self.replan_budget > 0:
            raise bad_value(self, "replan_budget", "must be positive, or null to replan by the threshold alone")
        if isinstance(self.strategy, Strategy):
            with blame_setting("kernel"):
                require_fit(self.kernel, KernelRequirements(lse=self.strategy.ring > 1))

    def strategy_or(self, host: Strategy) -> Strategy | None:
        """The strategy to use where the host has its own; None for "auto"."""
        if isinstance(self.strategy, Strategy):
            return self.strategy
        return None if self.strategy == AUTO else host

    @property
    def home_layout(self) -> str:
        """The name of the home layout in force."""
        return self.home or require_planner(self.planner).home

    @property
    def fingerprint(self) -> int:
        """Equal for settings that make the same plans. A mask file may be in another folder on another node."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _LOCAL}
        mask = self.mask
        if type(mask) in SOURCES.values() and is_dataclass(mask):
            shown = {f.name: getattr(mask, f.name) for f in fields(mask) if f.name != "path"}
            plain["mask"] = (type(mask).__name__, shown)
        return fingerprint_of(plain)

    @property
    def torch_dtype(self) -> torch.dtype:
        """In which a checkpoint is loaded."""
        if self.dtype == "auto":
            return torch.bfloat16 if torch.accelerator.is_available() else torch.float32
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @classmethod
    def load(cls, source: ConfigLike) -> DbspConfig:
        """From a DbspConfig (as it is), a mapping, None for the defaults, or a YAML file: its path, or a shipped one's
        name. In a file's errors stand its name and the line."""
        if source is None:
            return cls()
        if isinstance(source, DbspConfig):
            return source
        if isinstance(source, Settings):
            with source.located():
                return replace(_build(cls, source.values, ""), origin=source.origin or None)
        if isinstance(source, Mapping):
            return _build(cls, source, "the configuration")
        return cls.load(read_settings(find_config(source), "configuration file"))

    def with_overrides(self, **values: Any) -> DbspConfig:
        """A copy in which every value that is not None replaces the setting of that name."""
        given = {key: value for key, value in values.items() if value is not None}
        return replace(self, **_checked(DbspConfig, given, "the overrides")) if given else self


def setting_names(cls: type) -> list[str]:
    """The keys that a mapping for a settings class may have."""
    return [f.name for f in fields(cls) if f.metadata.get("setting", True)]


def _source_from(settings: Mapping[str, Any]) -> MaskSource:
    values = dict(settings)
    name = values.pop("source", None)
    if not isinstance(name, str) or name not in SOURCES:
        close = difflib.get_close_matches(str(name), SOURCES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise SettingError(
            f"unknown mask source {name!r}; set mask.source to one of {', '.join(SOURCES)}{hint}", ("source",)
        )
    source: MaskSource = _build(SOURCES[name], values, f"mask source {name!r}")
    return source


def _build(cls: type, values: Mapping[str, Any], where: str) -> Any:
    """cls(**values), once every key is known and every value of the right type. Raises SettingError."""
    checked = _checked(cls, values, where)
    try:
        return cls(**checked)
    except SettingError:
        raise
    except UserError as error:  # what makes no sense together is told of as a whole
        raise SettingError(str(error)) from error


def _checked(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a dataclass's fields, converted to the fields' types. Raises SettingError otherwise."""
    hints = get_type_hints(cls)
    converted = {}
    for key in values:
        require_known(key, setting_names(cls), where, _elsewhere() if cls is DbspConfig else None)
    for key, value in values.items():
        with blame_setting(key):
            converted[key] = _convert(value, hints[key], f"{key!r} in {where}" if where else repr(key))
    return converted


def _elsewhere() -> dict[str, str]:
    """Keys that are not DbspConfig's own but of a mapping in it, and which."""
    inner: dict[str, list[type]] = {"mask": list(SOURCES.values()), "dense": [DenseSchedule], "video": [VideoSettings]}
    own = setting_names(DbspConfig)
    nested = {key: repr(name) for name, classes in inner.items() for cls in classes for key in setting_names(cls)}
    return {key: place for key, place in ({"source": "'mask'"} | nested).items() if key not in own}


_IN_WORDS = {
    DenseSchedule: "a mapping such as {first_steps: 10}",
    VideoSettings: "a mapping such as {height: 480, width: 832}",
    MaskSource: "a mapping such as {source: dense}",
    Strategy: "a strategy such as U4R2",
}


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as YAML gives it, for a field of type `hint`. Nested settings are checked by their own class."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    if any(get_origin(option) is Literal and value in get_args(option) for option in options):
        return value
    for option in options:
        if option is bool and isinstance(value, bool):
            return value
        if option is int and type(value) is int:
            return value
        if option is float and type(value) in (int, float):
            return float(value)
        if option is str and isinstance(value, (str, os.PathLike)):
            return os.fspath(value)
        if option is Strategy and isinstance(value, (str, Strategy)):
            return Strategy.parse(value)
        if is_dataclass(option) and isinstance(option, type) and isinstance(value, option):
            return value
        if option in (DenseSchedule, VideoSettings) and isinstance(value, Mapping):
            return _build(option, value, "'dense'" if option is DenseSchedule else "'video'")
        if option is MaskSource and isinstance(value, Mapping):
            return _source_from(value)
        if option is MaskSource and hasattr(value, "mask"):
            return value
        if get_origin(option) is Mapping and isinstance(value, Mapping):
            return dict(value)
        if get_origin(option) is tuple and _is_list_of(get_args(option)[0], value):
            return tuple(value)
    wanted = " or ".join(_in_words(option) for option in options if option is not type(None))
    raise UserError(f"{where} must be {wanted}, got {value!r}")


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(element) is kind for element in value)


def _in_words(option: Any) -> str:
    """What a value of that type is called."""
    if get_origin(option) is tuple:
        return f"a list of {get_args(option)[0].__name__}"
    if get_origin(option) is Mapping:
        return "a mapping"
    if get_origin(option) is Literal:
        return " or ".join(get_args(option))
    return _IN_WORDS.get(option, getattr(option, "__name__", str(option)))


def _require(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingError(f"unknown {key} {value!r}; use one of {', '.join(choices)}", (key,))
