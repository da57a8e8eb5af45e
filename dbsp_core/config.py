"""DbspConfig: every setting, in one place, from YAML, a dict or flags."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dbsp_core.home import HOME_ORDERS
from dbsp_core.planners import PlannerSettings, require_planner
from dbsp_core.selection import AUTO
from dbsp_core.settings import read_mapping, require_known
from dbsp_core.sources import SOURCES, DenseSource, MaskSource
from dbsp_core.steps import DenseSchedule
from dbsp_core.strategy import Strategy
from dbsp_kernels import KERNELS

__all__ = ["DTYPES", "ConfigLike", "DbspConfig"]

PLANNING = ("auto", "immediate", "lagged")
DTYPES = ("auto", "float32", "bfloat16", "float16")

ConfigLike = Union["DbspConfig", Mapping[str, Any], str, os.PathLike, None]


@dataclass(frozen=True)
class DbspConfig:
    """All settings of db-SP. Raises ValueError, naming the key and the fix, for a value that makes no sense.

    mask:             where masks come from, a mapping such as {source: window, window: [5, 9, 9]}
    dense:            where attention stays dense, a mapping such as {first_steps: 10, first_layers: 1}
    strategy:         "UxRy", "auto" for the one predicted to be fastest at each attention, or None for the host's own
                      degrees
    hardware:         whose constants predict it: a name or file for `dbsp_core.hardware.load_hardware`; None: shipped
                      ones that come nearest
    planner:          a name from dbsp_core.planners.PLANNERS: "dbsp" (ours), "paper" (Alg. 1), "contiguous" (USP's) …
    home:             how tokens are laid out between attentions: "contiguous", "striped" or "learned"; None: as the
                      planner is meant for
    reward:           R_b of the paper's biased greedy: how strongly blocks are held where they are
    head_cap:         whether the paper's planner keeps head counts per Ulysses column equal (up to one)
    tolerance:        ρ_s at which planner "dbsp" is content; None: 1.002 for Ulysses alone, 1.005 with a ring
    exchange_cost:    what exchanging all of Q, K, V once costs in units of ρ_s, for planner "dbsp" to weigh
    replan_threshold: P_s: a layer's plan is kept while ρ_s of its current mask under it stays at or below this
    planning:         "immediate" plans from each call's own mask, "lagged" one call behind, without waiting; "auto" is
                      lagged for masks computed from queries and keys
    kernel:           "auto" or a kernel's name
    dtype:            in which a local checkpoint is loaded; auto is bfloat16 on an accelerator, float32 without
    report:           folder for the report (see docs/report.md), or None: nothing is observed
    record:           folder for the masks of the run (see docs/mask-files.md), or None: $DBSP_RECORD if set
    debug:            all ranks check before each attention that inputs are finite and plans equal
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
    exchange_cost: float = 0.0
    replan_threshold: float = 1.10
    planning: str = "auto"
    kernel: str = "auto"
    dtype: str = "auto"
    report: str | None = None
    record: str | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.strategy, str) and self.strategy != AUTO:
            object.__setattr__(self, "strategy", Strategy.parse(self.strategy))
        if isinstance(self.mask, Mapping):
            object.__setattr__(self, "mask", _source_from(self.mask))
        if isinstance(self.dense, Mapping):
            object.__setattr__(self, "dense", _build(DenseSchedule, self.dense, "'dense'"))
        require_planner(self.planner)
        if self.home is not None:
            _require("home", self.home, tuple(HOME_ORDERS))
        _require("kernel", self.kernel, ("auto", *KERNELS))
        _require("planning", self.planning, PLANNING)
        _require("dtype", self.dtype, DTYPES)
        PlannerSettings(self.reward, self.head_cap, self.tolerance, self.exchange_cost)
        if not self.replan_threshold >= 1:
            raise ValueError(f"replan_threshold={self.replan_threshold} must be at least 1, the least ρ_s there is")

    def strategy_or(self, host: Strategy) -> Strategy | None:
        """The strategy to use where the host has its own; None for "auto"."""
        if isinstance(self.strategy, Strategy):
            return self.strategy
        return None if self.strategy == AUTO else host

    @property
    def home_layout(self) -> str:
        """The name of the home layout in force."""
        return self.home or require_planner(self.planner).home

    @classmethod
    def load(cls, source: ConfigLike) -> DbspConfig:
        """From a DbspConfig (as it is), a mapping, the path of a YAML file, or None for the defaults."""
        if source is None:
            return cls()
        if isinstance(source, DbspConfig):
            return source
        if isinstance(source, Mapping):
            return _build(cls, source, "the configuration")
        return _build(cls, read_mapping(source, "configuration file"), str(source))

    def with_overrides(self, **values: Any) -> DbspConfig:
        """A copy in which every value that is not None replaces the setting of that name."""
        given = {key: value for key, value in values.items() if value is not None}
        return replace(self, **_checked(DbspConfig, given, "the overrides")) if given else self


def _source_from(settings: Mapping[str, Any]) -> MaskSource:
    values = dict(settings)
    name = values.pop("source", None)
    if not isinstance(name, str) or name not in SOURCES:
        raise ValueError(f"unknown mask source {name!r}; set mask.source to one of {', '.join(SOURCES)}")
    source: MaskSource = _build(SOURCES[name], values, f"mask source {name!r}")
    return source


def _build(cls: type, values: Mapping[str, Any], where: str) -> Any:
    """cls(**values), once every key is known and every value of the right type."""
    return cls(**_checked(cls, values, where))


def _checked(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a dataclass's fields, converted to the fields' types. Raises ValueError for what does not fit."""
    hints = get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    converted = {}
    for key, value in values.items():
        require_known(key, known, where)
        converted[key] = _convert(value, hints[key], f"{key!r} in {where}")
    return converted


_IN_WORDS = {
    DenseSchedule: "a mapping such as {first_steps: 10}",
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
        if option is DenseSchedule and isinstance(value, (Mapping, DenseSchedule)):
            return value
        if option is MaskSource and (isinstance(value, Mapping) or hasattr(value, "mask")):
            return value
        if get_origin(option) is Mapping and isinstance(value, Mapping):
            return dict(value)
        if get_origin(option) is tuple and _is_list_of(get_args(option)[0], value):
            return tuple(value)
    wanted = " or ".join(_in_words(option) for option in options if option is not type(None))
    raise ValueError(f"{where} must be {wanted}, got {value!r}")


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
        raise ValueError(f"unknown {key} {value!r}; use one of {', '.join(choices)}")
