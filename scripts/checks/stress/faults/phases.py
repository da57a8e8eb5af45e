"""Phases of an attention and of a run in which something goes wrong, and values that differ on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

SPARGE = {"source": "sparge", "cdf": 0.6, "similarity": -1.0, "block_q": 16, "block_k": 16}
WINDOW = {"source": "window", "window": [3, 3, 3], "block_q": 16, "block_k": 16}
ALWAYS_ANEW = {"reuse": 1.0}
RUNTIME, COMM, REPORTS = "dbsp_core.runtime", "dbsp_core.comm", "dbsp_core.reports"


@dataclass(frozen=True)
class Phase:
    """One phase.

    program: of `faults.programs`;  target, nth: the function that represents the phase, see `Injection`

    values: that the program needs for it, see `faults.programs.Values`
    harmless: whether what goes wrong there must not end a run that has succeeded: one line says what is lacking
    awaited: its first calls, those after which other ranks wait for the rank; None: all
    """

    program: str
    target: str
    nth: int = 1
    values: Mapping[str, Any] = field(default_factory=dict)
    harmless: bool = False
    awaited: int | None = None


def _session(target: str, nth: int = 1, debug: bool = False, **settings: Any) -> Phase:
    return Phase("session", target, nth, {"settings": {"mask": SPARGE, **settings}, "debug": debug})


def _report(target: str) -> Phase:
    return replace(_session(target, report="report"), harmless=True)


def _transformer(target: str, nth: int = 1) -> Phase:
    return Phase("transformer", target, nth)


NEEDED, BACKWARD = {"keys": "needed", "band": True}, {"backward": True}
PHASES: dict[str, Phase] = {
    "settings": _session(f"{RUNTIME}.session.check_settings"),
    "new size": _session(f"{RUNTIME}.size_context.SizeContext.from_config"),
    "agreement on a pass": _session(f"{RUNTIME}.pass_checks.PassChecks.check"),
    "static mask": _session(f"{RUNTIME}.mask_provider.MaskProvider.mask", mask=WINDOW),
    "agreement on shapes": _session(f"{RUNTIME}.session.check_attention"),
    "mask exchange: pooling": _session("dbsp_core.sources.sparge.pool_own_heads", 2),
    "mask exchange: exchange": _session("dbsp_core.comm.block_pooling.exchange_heads", 2),
    "mask exchange: bits": _session("dbsp_core.sources.head_shares.gather_bits", 2),
    "planning": _session(f"{RUNTIME}.size_context.SizeContext._new_plan"),
    "planning: a new plan": _session(f"{RUNTIME}.size_context.plan_from_counts", 3, **ALWAYS_ANEW),
    "planning: agreement": _session(f"{RUNTIME}.size_context.run_consistently", **ALWAYS_ANEW),
    "counts of the last call": replace(_session(f"{RUNTIME}.plan_keeper.PlanKeeper._count"), awaited=2),
    "agreement under debug": _session(f"{RUNTIME}.session.check_prepared", 2, debug=True),
    "prepare": Phase("attention", f"{RUNTIME}.attention.check_consistent"),
    "first call's agreement": Phase("attention", f"{RUNTIME}.attention.check_attention"),
    "dispatch": Phase("attention", f"{COMM}.exchange.Route.dispatch", 2),
    "dispatch: exchange": Phase("attention", f"{COMM}.groups.SequenceGroup.all_to_all", 3),
    "kernel: first chunk": Phase("attention", f"{RUNTIME}.chunk_attention.block_attention", 4),
    "kernel: 2nd chunk": Phase("attention", f"{RUNTIME}.chunk_attention.block_attention", 5),
    "kernel: last chunk": Phase("attention", f"{RUNTIME}.chunk_attention.block_attention", 6),
    "chunk: request": Phase("attention", f"{COMM}.exchange.Exchange.start", 3),
    "chunk: arrival": Phase("attention", f"{COMM}.exchange.Route._arrived", 3),
    "combine": Phase("attention", f"{COMM}.exchange.Route.combine", 2),
    "combine: exchange": Phase("attention", f"{COMM}.groups.SequenceGroup.all_to_all", 4),
    "fetch": Phase("attention", f"{COMM}.groups.SequenceGroup.start_all_to_all", 2, values=NEEDED),
    "fetch: arrival": Phase("attention", f"{COMM}.exchange.Route._arrived", values=NEEDED),
    "backward: dispatch": Phase("attention", "dbsp_core.runtime.backward.gradient_to_owners", values=BACKWARD),
    "backward: kernel": Phase("attention", f"{RUNTIME}.backward.block_attention_backward", 2, BACKWARD),
    "backward: chunk": Phase("attention", f"{COMM}.exchange_backward.LocalGradients.add_chunk", values=BACKWARD),
    "backward: local shard": Phase("attention", f"{COMM}.exchange_backward.LocalGradients.finish", values=BACKWARD),
    "redistribution": Phase("redistribution", f"{COMM}.redistribution.Redistribution._check", 2),
    "redistribution: all-to-all": Phase("redistribution", f"{COMM}.groups.SequenceGroup.all_to_all", 3),
    "attaching: session": _transformer("dbsp_diffusers.attach.observed_session"),
    "attaching: agreement": _transformer("dbsp_diffusers.attach.check_settings"),
    "inputs of the first rank": _transformer("dbsp_diffusers.sharding.generation_checks._broadcast"),
    "sharding": _transformer("dbsp_diffusers.sharding.stream_shards.StreamShards.take", 2),
    "gathering the output": _transformer("dbsp_diffusers.sharding.stream_shards.StreamShards.gather"),
    "report: meeting": _report(f"{COMM}.groups.SequenceGroup.barrier"),
    "report: gathering": _report(f"{REPORTS}.collect.gather_texts"),
    "report: writing": _report(f"{REPORTS}.collect.report_page"),
    "recording": Phase(
        "session",
        f"{REPORTS}.mask_recorder.write_atomically",
        values={"settings": {"mask": SPARGE}, "record": "masks"},
        harmless=True,
    ),
}
WRITERS = ("report: writing", "recording")
"""Phases of rank 0 alone."""
MAKES_A_GROUP = ("attaching: agreement",)
"""Phases that begin with making a process group."""


@dataclass(frozen=True)
class Divergence:
    """A value that every rank must name. Tests hold the words of each message.

    program: see `faults.programs`;  odd: the odd rank's values, of which "other" is what the others do not have

    quiet: whether only $DBSP_DEBUG looks for it: without, nothing is said, and nothing hangs
    later: whether without it something is said only after an attention
    settings: on all ranks
    """

    program: str
    odd: dict[str, Any] = field(default_factory=dict)
    quiet: bool = False
    later: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.program}: {self.odd}"


def _each(**values: Any) -> list[dict[str, Any]]:
    return [{name: value} for name, value in values.items()]


_SPARGE = {"mask": SPARGE}
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
_NAMED = {
    "attention": [
        *_each(seed=1, planner="contiguous", layout="striped", heads=3, head_dim=8, gradients=True, debug="other"),
        *_each(**_INPUTS),
    ],
    "session": [
        *({"settings": {**_SPARGE, **setting}} for setting in _SETTINGS),
        *_each(heads=5, strategy="other", thw=(4, 6, 6), layer=1, debug="other", **_INPUTS),
        *({"mask_file": "whole", **file} for file in _each(mask_file="vanished", seed=1)),
        {"mask_file": "truncated"},
    ],
    "transformer": _each(settings=_SPARGE, batch=2, latents_seed=8),
    "redistribution": _each(dtype=torch.float64, head_dim=8, debug="other"),
}
_QUIET = {
    "attention": [*_each(kernel="reference", finite=False, version="torch"), {"version": "triton"}],
    "session": [*_each(cfg_branch=1, version="torch"), {"version": "dbsp-attention"}],
    "transformer": _each(version="diffusers"),
}
_OF_SESSIONS = {"session": _SPARGE}
DIVERGENCES = (
    *(
        Divergence(name, odd, quiet, settings=_OF_SESSIONS.get(name, {}))
        for quiet, table in ((False, _NAMED), (True, _QUIET))
        for name, odds in table.items()
        for odd in odds
    ),
    Divergence("session", {"flipped": True}, later=True, settings=_SPARGE),
    Divergence("session", {"finite": False}, quiet=True, settings={"mask": WINDOW}),
)
