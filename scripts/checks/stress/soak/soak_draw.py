"""Cases of long runs: transformers that stay attached, blocks of denoising steps on them, and whole pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

STEPS = 25
"""Denoising steps of a block."""

_BLOCKS = {"block_q": 16, "block_k": 8}
SYNTHETIC = {"source": "synthetic", "density": 0.3, **_BLOCKS}
WINDOW = {"source": "window", "tile": [2, 3, 4], "window": [1, 1, 1], **_BLOCKS}
RADIAL = {"source": "radial", "width": 0.4, "sink_frames": 0, **_BLOCKS}
SVG = {"source": "svg", "frames": 1, "bandwidth": 0.2, **_BLOCKS}
SPARGE = {"source": "sparge", "cdf": 0.6, "similarity": 0.1, **_BLOCKS}
BY_STEP = {"source": "callable", "function": "tests.support.user_masks:band", "depends_on": "step", **_BLOCKS}


@dataclass(frozen=True)
class Setup:
    """A transformer with db-SP on it.

    framework: "diffusers", "para", "para-attn", by its own function and mesh, or "xdit"
    model:     a name in tests/support/models/tiny_transformers.py
    config:    of db-SP
    cache:     a step cache that is enabled all the time, named as in tests/diffusers/cache_cases.py
    """

    framework: str
    model: str
    config: Mapping[str, Any]
    cache: str | None = None

    @property
    def by_input_alone(self) -> bool:
        """True if a forward pass depends on no other."""
        return self.cache is None and self.config["mask"].get("depends_on") != "step"


def _of(mask: Mapping[str, Any], strategy: str, **others: Any) -> dict[str, Any]:
    return {"mask": mask, "strategy": strategy, **others}


SETUPS = (
    Setup("diffusers", "wan", _of(SYNTHETIC, "U2R1")),
    Setup("para", "cogvideox", _of(SPARGE, "U1R2")),
    Setup("xdit", "wan", _of(WINDOW, "U2R1")),
    Setup("diffusers", "wan", _of(BY_STEP, "U1R2", dense_schedule={"first_layers": 1})),
    Setup("para-attn", "wan", {"mask": RADIAL}),
    Setup("xdit", "wan", _of(SPARGE, "auto", machine="a800")),
    Setup("diffusers", "hunyuan", _of(SVG, "U1R2", planner="contiguous")),
    Setup("diffusers", "wan", _of(WINDOW, "U1R2"), cache="first block"),
    Setup("xdit", "cogvideox", _of(SPARGE, "U2R1")),
    Setup("diffusers", "flux", _of(WINDOW, "U1R2")),
    Setup("para", "wan", _of(BY_STEP, "U2R1"), cache="cache-dit"),
)
"""Of blocks, one after another."""


@dataclass(frozen=True)
class Block:
    """Denoising steps on one setup, of one video.

    thw: token grid;  batch: samples;  text: tokens;  passes: of guidance in each step
    """

    setup: int
    thw: tuple[int, int, int]
    batch: int
    text: int
    passes: int
    seed: int
    steps: int = STEPS


@dataclass(frozen=True)
class Cycle:
    """A pipeline that is made, attached, called, detached and forgotten.

    model: of `dbsp_cli.tiny_models`;  report: whether its call ends with a report
    """

    framework: str
    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    size: Mapping[str, int] = field(default_factory=dict)
    report: bool = False


def draw_block(seed: int, number: int) -> Block:
    rng = np.random.default_rng([seed, number])
    setup = number % len(SETUPS)
    t, h, w = (int(rng.integers(*ends)) for ends in ((1, 5), (3, 7), (3, 7)))  # two key blocks at least
    return Block(
        setup,
        (t, h, w),
        batch=int(rng.integers(1, 3)),
        text=int(rng.integers(1, 10)),
        passes=1 if SETUPS[setup].cache else int(rng.integers(1, 3)),
        seed=int(rng.integers(2**31)),
    )


def draw_cycle(seed: int, number: int) -> Cycle:
    rng = np.random.default_rng([seed, number, 1])
    framework = ("diffusers", "para", "para-attn", "xdit")[number % 4]
    mask = (SYNTHETIC, SPARGE, BY_STEP, WINDOW, SVG)[int(rng.integers(5))]
    strategy = {} if framework == "para-attn" else {"strategy": ("U2R1", "U1R2")[int(rng.integers(2))]}
    model = ("wan", "cogvideox")[int(rng.integers(2))]
    size = {
        "height": 16 * int(rng.integers(2, 5)),
        "width": 16 * int(rng.integers(2, 5)),
        "num_frames": 9,
        "num_inference_steps": int(rng.integers(1, 3)),
    }
    return Cycle(framework, model, {"mask": mask, **strategy}, size, report=number % 10 == 5)
