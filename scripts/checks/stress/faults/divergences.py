"""Divergences: values that differ on one rank, which every rank must name. Tests hold the words of each message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.checks.stress.faults.phases import SPARGE, WINDOW


@dataclass(frozen=True)
class Divergence:
    """program: see `faults.programs`;  odd: the odd rank's values, of which "other" is what the others do not have

    version: package of which the odd rank has another one
    quiet: whether only $DBSP_DEBUG looks for it: without, nothing is said, and nothing hangs
    later: whether without it something is said only after an attention
    settings: on all ranks
    """

    program: str
    odd: dict[str, Any] = field(default_factory=dict)
    version: str | None = None
    quiet: bool = False
    later: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.program}: {self.odd or f'version of {self.version}'}"


_ATTENTION: dict[str, Any] = {"mask_seed": 1, "planner": "contiguous", "layout": "striped", "heads": 3}
_INPUTS: dict[str, Any] = {"scale": 0.5, "batch": 2, "dtype": "float64", "extra": 1}
_SESSION: dict[str, Any] = {"heads": 5, "strategy": "other", "thw": (4, 6, 6), "layer": 1}
_FILES: dict[str, Any] = {"mask_file": ("vanished", "truncated"), "mask_seed": (1,)}
_DEBUG: dict[str, Any] = {"settings": {"debug": "other"}}
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"mask": {**SPARGE, "cdf": 0.7}},
    {"mask": {**SPARGE, "block_k": 32}},
    {"mask": WINDOW},
    {"kernel": "reference"},
    {"reuse": 1.5},
    {"precision": "int8"},
    {"planner": "snake"},
    {"dense_schedule": {"first_steps": 1}},
    {"debug": "other"},
    {"machine": "nowhere.yaml"},
)


def _all() -> Iterator[Divergence]:
    for name, value in (_ATTENTION | _INPUTS | {"head_dim": 8, "gradients": True} | _DEBUG).items():
        yield Divergence("attention", {name: value})
    for name, value in {"kernel": "reference", "finite": False}.items():
        yield Divergence("attention", {name: value}, quiet=True)
    for package in ("torch", "triton"):
        yield Divergence("attention", version=package, quiet=True)
    sparge = {"mask": SPARGE}
    for setting in _SETTINGS:
        yield Divergence("session", {"settings": {**sparge, **setting}}, settings=sparge)
    for name, value in (_SESSION | _INPUTS).items():
        yield Divergence("session", {name: value}, settings=sparge)
    yield Divergence("session", {"flipped": True}, later=True, settings=sparge)
    yield Divergence("session", {"cfg_branch": 1}, quiet=True, settings=sparge)
    yield Divergence("session", {"finite": False}, quiet=True, settings={"mask": WINDOW})
    for package in ("torch", "dbsp-attention"):
        yield Divergence("session", version=package, quiet=True, settings=sparge)
    for name, values in _FILES.items():
        for value in values:
            yield Divergence("session", {"mask_file": "whole", name: value}, settings=sparge)
    yield Divergence("transformer", {"settings": {"mask": SPARGE}})
    for name, value in {"batch": 2, "latents_seed": 8}.items():
        yield Divergence("transformer", {name: value})
    yield Divergence("transformer", version="diffusers", quiet=True)
    for name, value in ({"dtype": "float64", "head_dim": 8} | _DEBUG).items():
        yield Divergence("redistribution", {name: value})


DIVERGENCES = tuple(_all())
