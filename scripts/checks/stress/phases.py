"""Steps of an attention and of a run in which something fails, and values that differ on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

SPARGE = {"source": "sparge", "cdf": 0.6, "similarity": -1.0, "block_q": 16, "block_k": 16}
WINDOW = {"source": "window", "window": [3, 3, 3], "block_q": 16, "block_k": 16}
RUNTIME, COMM, REPORTS = "dbsp_core.runtime", "dbsp_core.comm", "dbsp_core.reports"


@dataclass(frozen=True)
class Phase:
    """A step of a program."""

    program: str  # in `programs.PROGRAMS`
    target: str  # the function that represents the step
    calls: int = 3  # number of its calls, from the first, that other ranks wait for
    values: Mapping[str, Any] = field(default_factory=dict)  # what the program needs to reach it


def _session(target: str, calls: int = 3, debug: bool = False, **settings: Any) -> Phase:
    return Phase("session", target, calls, {"settings": {"mask": SPARGE, **settings}, "debug": debug})


def _attention(target: str, calls: int = 9, **values: Any) -> Phase:
    return Phase("attention", target, calls, values)


def _transformer(target: str, calls: int = 1) -> Phase:
    return Phase("transformer", target, calls)


PHASES: dict[str, Phase] = {
    "settings": _session(f"{RUNTIME}.session.check_settings", 1),
    "new size": _session(f"{RUNTIME}.session.Size", 1),
    "static mask": _session(f"{RUNTIME}.mask_provider.MaskProvider.mask", mask=WINDOW),
    "agreement on shapes": _session(f"{RUNTIME}.session.check_attention", 1),
    "mask exchange: pooling": _session("dbsp_core.sources.sparge.pool_own_heads"),
    "mask exchange: exchange": _session("dbsp_core.comm.block_pooling.exchange_heads"),
    "mask exchange: bits": _session("dbsp_core.sources.sparge.predict_bits"),
    "planning": _session(f"{RUNTIME}.size.Size.plan_predicted", 1),
    "planning: a new plan": _session(f"{RUNTIME}.size.plan_from_counts", reuse=1.0),
    "planning: agreement": _session(f"{RUNTIME}.size.run_consistently", reuse=1.0),
    "counts of the last call": _session(f"{RUNTIME}.slot.Slot.counted", 2),  # the third's end the run
    "agreement under debug": _session(f"{RUNTIME}.session.check_prepared", debug=True),
    "prepare": _attention(f"{RUNTIME}.attention.agree", 1),
    "first call's agreement": _attention(f"{RUNTIME}.attention.check_attention", 1),
    "dispatch": _attention(f"{COMM}.exchange.Route.start"),
    "dispatch: arrival": _attention(f"{COMM}.exchange.Route.arrive"),
    "kernel": _attention(f"{RUNTIME}.chunk_attention.block_attention"),
    "chunk: request": _attention(f"{COMM}.exchange.Exchange.start"),
    "chunk: arrival": _attention(f"{COMM}.exchange.Route._arrived"),
    "combine": _attention(f"{COMM}.exchange.Route.combine"),
    "fetch": _attention(f"{COMM}.groups.SequenceGroup.start_all_to_all", keys="needed", band=True),
    "backward: dispatch": _attention(f"{RUNTIME}.backward._exchange", 3, backward=True),
    "backward: kernel": _attention(f"{RUNTIME}.backward.block_attention_backward", 6, backward=True),
    "backward: chunk": _attention(f"{RUNTIME}.backward.LocalGradients.add_chunk", 3, backward=True),
    "backward: local shard": _attention(f"{RUNTIME}.backward.LocalGradients.finish", 3, backward=True),
    "redistribution": Phase("redistribution", f"{COMM}.redistribution.Redistribution._problem"),
    "redistribution: all-to-all": Phase("redistribution", f"{COMM}.groups.SequenceGroup.all_to_all"),
    "attaching: session": _transformer("dbsp_diffusers.attach.observed_session"),
    "attaching: agreement": _transformer("dbsp_diffusers.attach.check_settings"),
    "inputs of the first rank": _transformer("dbsp_diffusers.sharding.generation_checks._broadcast", 2),
    "sharding": _transformer("dbsp_diffusers.sharding.stream_shards.StreamShards.take", 4),
    "gathering the output": _transformer("dbsp_diffusers.sharding.stream_shards.StreamShards.gather", 2),
    "report: gathering": _session(f"{REPORTS}.collect.gather_texts", 1, report="report"),
    "report: writing": _session(f"{REPORTS}.collect.report_page", 1, report="report"),
}
HARMLESS = ("report: gathering", "report: writing")  # phases in which an error must not end a run that has succeeded


@dataclass(frozen=True)
class Divergence:
    """A value that every rank must name. Tests hold the words of each message."""

    program: str  # in `programs.PROGRAMS`
    odd: dict[str, Any] = field(default_factory=dict)  # the odd rank's values; "other": what others have not
    quiet: bool = False  # whether only $DBSP_DEBUG looks for it: without, nothing hangs
    settings: Mapping[str, Any] = field(default_factory=dict)  # on all ranks


_INPUTS: dict[str, Any] = {"scale": 0.5, "batch": 2, "dtype": torch.float64, "extra": 1}
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"mask": {**SPARGE, "cdf": 0.7}},
    {"mask": {**SPARGE, "block_k": 32}},
    {"mask": WINDOW},
    {"kernel": "reference"},
    {"reuse": 1.5},
    {"precision": "int8"},
    {"planner": "snake"},
    {"dense_schedule": {"first_steps": 1}},
    {"machine": "nowhere.yaml"},
)
_NAMED: dict[str, dict[str, Any]] = {
    "attention": {
        "seed": 1,
        "planner": "contiguous",
        "layout": "striped",
        "heads": 3,
        "head_dim": 8,
        "gradients": True,
        **_INPUTS,
        "debug": "other",
    },
    "session": {
        "heads": 5,
        "strategy": "other",
        "thw": (4, 6, 6),
        "layer": 1,
        "cfg_branch": 1,
        "debug": "other",
        **_INPUTS,
    },
    "transformer": {"settings": {"mask": SPARGE}, "batch": 2, "latents_seed": 8},
    "redistribution": {"dtype": torch.float64, "head_dim": 8, "debug": "other"},
}
_QUIET: dict[str, dict[str, Any]] = {
    "attention": {"kernel": "reference", "finite": False},
}

DIVERGENCES = (
    *(
        Divergence(program, {name: value}, quiet, {"mask": SPARGE} if program == "session" else {})
        for quiet, table in ((False, _NAMED), (True, _QUIET))
        for program, values in table.items()
        for name, value in values.items()
    ),
    *(
        Divergence("session", {"settings": {"mask": SPARGE, **setting}}, settings={"mask": SPARGE})
        for setting in _SETTINGS
    ),
    Divergence("session", {"finite": False}, quiet=True, settings={"mask": WINDOW}),
)
