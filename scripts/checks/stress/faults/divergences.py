"""Divergences: values that differ on one rank, and the message about each on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scripts.checks.stress.faults.phases import SPARGE, WINDOW

INPUTS = "batch, head size, dtype or device type of q, k and v, or whether they need gradients, differ on rank(s) [{}]"
SETTINGS = "the settings differ on rank(s) [{}]"


@dataclass(frozen=True)
class Divergence:
    """program: see `faults.programs`;  odd: the odd rank's values;  version: package of which it has another one

    message: on every rank, {} for the odd one
    quiet: whether only $DBSP_DEBUG looks for it: without, nothing is said, and nothing hangs
    later: whether without it something is said only after an attention
    settings: on all ranks
    """

    program: str
    message: str
    odd: dict[str, Any] = field(default_factory=dict)
    version: str | None = None
    quiet: bool = False
    later: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def _attention(message: str, quiet: bool = False, version: str | None = None, **odd: Any) -> Divergence:
    return Divergence("attention", message, odd, version, quiet)


def _session(
    message: str, quiet: bool = False, mask: Any = SPARGE, version: str | None = None, **odd: Any
) -> Divergence:
    return Divergence("session", message, odd, version, quiet, settings={"mask": mask})


def _setting(**changed: Any) -> Divergence:
    return Divergence("session", SETTINGS, {"settings": {"mask": SPARGE, **changed}}, settings={"mask": SPARGE})


VERSION = "the version of {} differs on rank(s) [{{}}]"
DIVERGENCES: dict[str, Divergence] = {
    "attention: mask": _attention("the {} differs on rank(s) [{{}}]", mask_seed=1),
    "attention: plan": _attention("the plan differs on rank(s) [{}]", planner="contiguous"),
    "attention: layout": _attention("the sequence layout differs on rank(s) [{}]", layout="striped"),
    "attention: scale": _attention("the scale of the scores differs on rank(s) [{}]", scale=0.5),
    "attention: kernel": _attention("rank(s) [{}] selected a different attention kernel", True, kernel="reference"),
    "attention: batch": _attention(INPUTS, batch=2),
    "attention: dtype": _attention(INPUTS, dtype="float64"),
    "attention: head size": _attention(INPUTS, head_dim=8),
    "attention: heads": _attention("differs on rank(s) [{}]", heads=3),
    "attention: positions": _attention("rank(s) [{}]: q of shape", extra=1),
    "attention: gradients": _attention(INPUTS, gradients=True),
    "attention: debug": _attention("debug differs on rank(s) [{}]", settings={"debug": "other"}),
    "attention: not finite": _attention("rank(s) [{}]: q, k or v has values that are not finite", True, finite=False),
    "attention: torch": _attention(VERSION.format("torch"), True, "torch"),
    "attention: triton": _attention(VERSION.format("triton"), True, "triton"),
    "session: cdf": _setting(mask={**SPARGE, "cdf": 0.7}),
    "session: blocks": _setting(mask={**SPARGE, "block_k": 32}),
    "session: another source": _setting(mask=WINDOW),
    "session: kernel": _setting(kernel="reference"),
    "session: threshold": _setting(reuse=1.5),
    "session: precision": _setting(precision="int8"),
    "session: planner": _setting(planner="snake"),
    "session: dense steps": _setting(dense_schedule={"first_steps": 1}),
    "session: debug": _setting(debug="other"),
    "session: heads": _session(SETTINGS, heads=5),
    "session: strategy": _session(SETTINGS, strategy="other"),
    "session: size": _session("differs on rank(s) [{}]", thw=(4, 6, 6)),
    "session: CFG pass": _session("the denoising step or CFG pass differs on rank(s) [{}]", True, cfg_branch=1),
    "session: layer": _session("another layer's attention is reached on rank(s) [{}]", layer=1),
    "session: predicted mask": Divergence(
        "session", "the mask differs on rank(s) [{}]", {"flipped": True}, later=True, settings={"mask": SPARGE}
    ),
    "session: scale": _session("the scale of the scores differs on rank(s) [{}]", scale=0.5),
    "session: batch": _session(INPUTS, batch=2),
    "session: dtype": _session(INPUTS, dtype="float64"),
    "session: positions": _session("rank(s) [{}]: q of shape", extra=1),
    "session: not finite": _session("rank(s) [{}]: q, k or v has values", True, WINDOW, finite=False),
    "session: torch": _session(VERSION.format("torch"), True, version="torch"),
    "session: db-SP": _session(VERSION.format("dbsp-attention"), True, version="dbsp-attention"),
    "session: hardware file": Divergence(
        "session",
        "rank(s) [{}]: ",
        {"settings": {"mask": SPARGE, "machine": "nowhere.yaml"}},
        settings={"mask": SPARGE},
    ),
    "mask file: vanished": _session("rank(s) [{}]: ", mask_file="vanished"),
    "mask file: truncated": _session("rank(s) [{}]: ", mask_file="truncated"),
    "mask file: another": _session("differs on rank(s) [{}]", mask_seed=1),
    "transformer: configuration": Divergence(
        "transformer", "the configuration differs on rank(s) [{}]", {"settings": {"mask": SPARGE}}
    ),
    "transformer: batch": Divergence("transformer", "the size of the video differs on rank(s) [{}]", {"batch": 2}),
    "transformer: latents": Divergence(
        "transformer", "the latents that a generation begins with differ on rank(s) [{}]", {"latents_seed": 8}
    ),
    "transformer: diffusers": Divergence("transformer", VERSION.format("diffusers"), version="diffusers", quiet=True),
    "redistribution: dtype": Divergence("redistribution", "differ on rank(s) [{}]", {"dtype": "float64"}),
    "redistribution: head_dim": Divergence("redistribution", "differ on rank(s) [{}]", {"head_dim": 8}),
    "redistribution: debug": Divergence(
        "redistribution", "debug differs on rank(s) [{}]", {"settings": {"debug": "other"}}
    ),
}
