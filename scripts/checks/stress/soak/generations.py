"""Cases of long runs: generations of pipelines that stay attached or are of one case."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import dbsp_diffusers
import dbsp_para
from dbsp_cli.tiny_models import MAKERS
from dbsp_diffusers.patching import PatchSet
from tests.diffusers.cache_cases import CACHES
from tests.para.test_para import para_mesh
from tests.support.oracle import largest_difference
from tests.support.single_process import attach_single_process
from tests.xdit.xdit_cases import start_xfuser

_BLOCKS = {"block_q": 16, "block_k": 8}
SYNTHETIC = {"source": "synthetic", "density": 0.3, **_BLOCKS}
WINDOW = {"source": "window", "tile": [2, 3, 4], "window": [1, 1, 1], **_BLOCKS}
RADIAL = {"source": "radial", "width": 0.4, "sink_frames": 0, **_BLOCKS}
SVG = {"source": "svg", "frames": 1, "bandwidth": 0.2, **_BLOCKS}
SPARGE = {"source": "sparge", "cdf": 0.6, "similarity": 0.1, **_BLOCKS}
BY_STEP = {"source": "callable", "function": "tests.support.user_masks:band", "depends_on": "step", **_BLOCKS}


@dataclass(frozen=True)
class Setup:
    """A pipeline with db-SP on it.

    framework: "diffusers", "para", "para-attn", by its own function and mesh, or "xdit"
    model:     a name in `dbsp_cli.tiny_models`;  mask, settings: of the configuration
    cache:     a step cache, named as in tests/diffusers/cache_cases.py;  report: whether each generation writes one
    stays:     whether it stays attached; else each of its cases makes one, attaches, calls, detaches and drops it
    """

    framework: str
    model: str
    mask: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    report: bool = False
    stays: bool = False

    @property
    def by_input_alone(self) -> bool:
        """True if a forward pass depends on no other."""
        return self.cache is None and self.mask.get("depends_on") != "step"


SETUPS = (
    Setup("diffusers", "wan", SYNTHETIC, {"strategy": "U2R1"}, stays=True),
    Setup("diffusers", "wan", BY_STEP, {"strategy": "U1R2", "dense_schedule": {"first_layers": 1}}, stays=True),
    Setup("para-attn", "wan", RADIAL, stays=True),
    Setup("diffusers", "hunyuan1.5", SVG, {"strategy": "U1R2", "planner": "contiguous"}, stays=True),
    Setup("xdit", "cogvideox", SPARGE, {"strategy": "U2R1"}, stays=True),
    Setup("para", "wan", BY_STEP, {"strategy": "U2R1"}, cache="cache-dit", stays=True),
    Setup("para", "cogvideox", SPARGE, {"strategy": "U1R2"}),
    Setup("xdit", "wan", WINDOW, {"strategy": "U2R1"}),
    Setup("xdit", "wan", SPARGE, {"strategy": "auto", "machine": "a800"}),
    Setup("diffusers", "wan", WINDOW, {"strategy": "U1R2"}, cache="first block"),
    Setup("diffusers", "cogvideox", SVG, {"strategy": "U2R1"}, report=True),
)


@dataclass(frozen=True)
class Generation:
    """One call of a setup's pipeline."""

    setup: int
    height: int
    width: int
    steps: int
    seed: int


@dataclass
class _Attached:
    """A setup's pipeline in this process. alone: the same transformer without parallelism, to compare with"""

    pipe: Any
    detach: Callable[[], object]
    alone: Any


_attached: dict[int, _Attached] = {}
_leaked: list[Any] = []


def generate(rank: int, world: int, case: Generation, leak: bool = False) -> tuple[float, float]:
    """Runs a case. leak: whether one is planted in it, for a negative control

    Returns the sum of the latents, which all ranks have identically, and the error of the last forward pass from one
    process, where that was compared.
    """
    if not gc.get_freeze_count():
        start_xfuser(rank, world)
        gc.collect()
        gc.freeze()  # leaves what there is now out of each census
    setup, reports = SETUPS[case.setup], Path(tempfile.gettempdir(), f"dbsp-soak-{os.getpid()}")
    if case.setup not in _attached:
        _attached[case.setup] = _attach(setup, world, reports)
    one, seen = _attached[case.setup], {}
    hooks = [  # around db-SP's own, so that they see what is whole
        one.pipe.transformer.register_forward_pre_hook(
            lambda _, args, options: seen.update(options=dict(options)), with_kwargs=True, prepend=True
        ),
        one.pipe.transformer.register_forward_hook(lambda _, args, out: seen.update(out=out[0].clone())),
    ]
    scale = {} if setup.model == "hunyuan1.5" else {"guidance_scale": 1.0 if setup.cache else 2.0}
    text = {"max_sequence_length": 16} if setup.model == "wan" else {}  # of 512 tokens, nearly all padding
    latents = one.pipe(
        "the sea at dusk",
        output_type="latent",
        generator=torch.Generator().manual_seed(case.seed),
        height=case.height,
        width=case.width,
        num_frames=9,
        num_inference_steps=case.steps,
        **scale | text,
    ).frames
    for hook in hooks:
        hook.remove()
    if setup.cache == "first block":
        one.pipe.transformer._reset_stateful_cache()
    if setup.report and rank == 0:
        shutil.rmtree(reports)  # raises if no report was written
    error = 0.0
    if one.alone is not None and rank == 0:
        with torch.no_grad():
            error = largest_difference(one.alone(**seen["options"])[0], seen["out"])
    result = float(latents.double().sum())
    if not setup.stays:
        _attached.pop(case.setup).detach()
    del one, latents, hooks, hook
    seen.clear()
    if leak:
        _leaked.append((torch.ones(1 << 18), PatchSet(), open(os.devnull, encoding="utf-8")))  # noqa: SIM115
    return result, error


def _attach(setup: Setup, world: int, reports: Path) -> _Attached:
    pipe, alone = _made(setup.model), None
    if setup.by_input_alone:
        alone = _made(setup.model).transformer
        attach_single_process(alone, {"mask": setup.mask})
    config = {"mask": setup.mask, **setup.settings, **({"report": str(reports)} if setup.report else {})}
    detach = _attach_to(setup.framework, pipe, config, world)
    if setup.cache:
        CACHES[setup.cache].enable(pipe.transformer, 0.2)
    return _Attached(pipe, detach, alone)


def _made(model: str) -> Any:
    """Makes a pipeline with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = MAKERS[model]()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _attach_to(framework: str, pipe: Any, config: Mapping[str, Any], world: int) -> Callable[[], object]:
    """Attaches db-SP, and returns what detaches it."""
    if framework == "diffusers":
        dbsp_diffusers.enable(pipe, config)
        return lambda: dbsp_diffusers.disable(pipe)
    if framework == "xdit":
        from dbsp_xdit import attach, detach

        attach(pipe, config)
        return lambda: detach(pipe)
    if framework == "para":
        dbsp_para.parallelize_pipe(pipe, config=config)
    else:
        from para_attn.context_parallel import diffusers_adapters

        mesh = para_mesh(world, max_ring_dim_size=world)
        diffusers_adapters.parallelize_pipe(pipe, mesh=mesh, attn="dbsp", config=config)
    return lambda: dbsp_para.unparallelize(pipe)
