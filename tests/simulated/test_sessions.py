"""Sessions on simulated GPUs: every mask source and strategy, and changes between calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dbsp_cli.mask_tools.fit import fit_recording
from dbsp_core import BlockGrid, BlockMask, Strategy, save_mask
from dbsp_core.sources import LocalQK, MaskRequest, RecordQKSource
from tests.core.runtime.session_cases import WIDTH, Session
from tests.gpu_node.node import GpuNode
from tests.simulated.model_cases import own_device

THW = (3, 3, 5)
"""45 tokens: three blocks of 16 queries, six of 8 keys, the last ones short."""


@dataclass(frozen=True)
class Call:
    """One forward pass of a session."""

    timestep: float
    batch: int = 1
    thw: tuple[int, int, int] = THW
    text_tokens: int = 0
    settle: bool = False


@dataclass(frozen=True)
class SessionCase:
    """Forward passes of one session."""

    settings: dict[str, Any]
    strategy: str
    calls: tuple[Call, ...] = (Call(900.0), Call(800.0))
    layers: int = 1
    heads: int = 3
    dtype: torch.dtype = torch.float32


def largest_errors(rank: int, world: int, case: SessionCase) -> tuple[list[float], list[int]]:
    """Returns how far this rank's output is from one process's, and the plans made so far, by forward pass."""
    device = own_device(rank)
    session = Session(case.settings, case.strategy, case.layers, heads=case.heads, device=device, dtype=case.dtype)
    errors, plans = [], []
    for call in case.calls:
        errors.append(session.attend(call.timestep, call.batch, call.thw, call.text_tokens, call.settle))
        plans.append(session.inner.reuse.plans)
    return errors, plans


BLOCKS = {"block_q": 16, "block_k": 8}
SPARGE = {"source": "sparge", "cdf": 0.6, "similarity": -1.0, **BLOCKS}
WINDOW = {"source": "window", "window": [2, 3, 3], **BLOCKS}
MASKS: dict[str, dict[str, Any]] = {
    "dense": {"source": "dense", **BLOCKS},
    "window": WINDOW,
    "radial": {"source": "radial", **BLOCKS},
    "svg": {"source": "svg", **BLOCKS},
    "sparge": SPARGE,
    "sol": {"source": "sol", "tau": 1.0, **BLOCKS},
    "vsa": {"source": "vsa", "sparsity": 0.5, "tile": [2, 2, 4], "block_q": 16, "block_k": 16},
    "sla": {"source": "sla", "topk": 0.4, **BLOCKS},
    "subblock": {"source": "subblock", "sparsity": 0.5, "multiple": 1, **BLOCKS},
    "cube": {"source": "cube", "topk": 0.3, "tile": [2, 2, 4], "block_q": 16, "block_k": 16},
    "ssta": {"source": "ssta", "topk": 4, "tile": [2, 2, 4], "window": [1, 1, 1], **BLOCKS},
    "nabla": {"source": "nabla", **BLOCKS},
    "union": {"source": "union", "of": [WINDOW, SPARGE]},
    "callable": {"source": "callable", "function": "tests.support.user_masks:heads_apart", **BLOCKS},
    "synthetic": {"source": "synthetic", "preset": "wan2.1-t2v-14b", "density": 0.4, **BLOCKS},
}
BFLOAT16 = 5e-2
BY_SOURCE = {
    "dense": "U2R1", "window": "U1R2", "radial": "U2R1", "svg": "U1R2", "sparge": "U2R2", "sol": "U2R1",
    "vsa": "U2R1", "sla": "U1R2", "nabla": "U1R2", "union": "U2R1", "callable": "U2R1", "synthetic": "U1R2",
    "file": "U2R1", "paro": "U1R2", "lowrank": "U2R1", "record_qk": "U1R2",
    "subblock": "U2R1", "cube": "U1R2", "ssta": "U2R2",
}  # fmt: skip


SOURCES = [
    pytest.param(*one, marks=() if one[0] in ("sparge", "file", "subblock", "ssta") else pytest.mark.long)
    for one in BY_SOURCE.items()
]
"""All but subblock, cube and ssta have run on a GPU (docs/results/exact.md)."""


@pytest.mark.parametrize(("name", "strategy"), SOURCES)
def test_source_on_gpus_equals_one_process(gpu_node: GpuNode, tmp_path: Path, name: str, strategy: str) -> None:
    mask = MASKS[name] if name in MASKS else source_with_file(name, tmp_path)
    check(gpu_node, SessionCase({"mask": mask}, strategy))


@pytest.mark.parametrize(
    ("settings", "strategy", "dtype", "least", "most"),
    [
        ({"mask": SPARGE}, "U2R1", torch.bfloat16, 0, BFLOAT16),
        ({"mask": WINDOW, "precision": {"qkv": "int8", "out": "int8"}}, "U2R1", torch.float32, 1e-4, 0.2),
    ],
    ids=["sparge in bfloat16", "inputs and outputs in int8"],
)
def test_rounded_numbers_are_near_one_process(
    gpu_node: GpuNode, settings: dict[str, Any], strategy: str, dtype: torch.dtype, least: float, most: float
) -> None:
    for errors, _ in gpu_node.run(2, largest_errors, SessionCase(settings, strategy, dtype=dtype)):
        assert least < max(errors) <= most, errors


def test_dense_steps_and_layers_on_gpus_equal_one_process(gpu_node: GpuNode) -> None:
    settings = {"mask": MASKS["window"], "dense_schedule": {"first_steps": 1, "first_layers": 1}}
    check(gpu_node, SessionCase(settings, "U1R2", layers=2))


CHANGES = (
    Call(900.0), Call(900.0),  # two CFG passes
    Call(800.0, batch=2),
    Call(700.0, thw=(1, 5, 7)),
    Call(600.0, text_tokens=5), Call(600.0, text_tokens=9), Call(500.0, text_tokens=5),
    Call(400.0, settle=True),
    Call(900.0), Call(800.0),  # another generation
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "strategy", "calls"),
    [("sparge", "U2R1", (CHANGES[0], *CHANGES[2:5])), ("window", "U1R2", CHANGES[5:9])],
    ids=["sparge", "window"],
)
def test_changes_between_calls_on_gpus_equal_one_process(
    gpu_node: GpuNode, name: str, strategy: str, calls: tuple[Call, ...]
) -> None:
    check(gpu_node, SessionCase({"mask": MASKS[name]}, strategy, calls))


def test_plan_replaced_at_every_call_equals_one_process(gpu_node: GpuNode) -> None:
    calls = tuple(Call(900.0 - step, settle=True) for step in range(3))
    for plans in check(gpu_node, SessionCase({"mask": SPARGE, "reuse": 1.0}, "U2R2", calls)):
        assert plans == [1, 2, 3]


@pytest.mark.long
def test_other_architecture_equals_one_process(gpu_node: GpuNode) -> None:
    check(gpu_node, SessionCase({"mask": SPARGE}, "U2R1"), arch=120)


def check(node: GpuNode, case: SessionCase, arch: int = 90) -> list[list[int]]:
    """Asserts that every rank's output is one process's, but for rounding. Returns the ranks' numbers of plans."""
    found = node.run(Strategy.parse(case.strategy).world, largest_errors, case, arch=arch)
    assert max(max(errors) for errors, _ in found) <= 1e-5, found
    return [plans for _, plans in found]


def source_with_file(name: str, folder: Path) -> dict[str, Any]:
    """Returns a mask source's settings, with the file that it reads; `record_qk` writes its own."""
    heads, tokens, path = SessionCase.heads, THW[0] * THW[1] * THW[2], folder / "masks.safetensors"
    bits = np.random.default_rng(0).random((2, heads, 3, 6)) < np.linspace(0.3, 0.7, heads)[:, None, None]
    if name == "file":
        save_mask(path, BlockMask(bits[0], BlockGrid(tokens, 0, 16, 8, THW)))
    if name == "paro":
        grid = BlockGrid(tokens, 0, 16, 8, THW, ("thw", "wht", "htw"))
        save_mask(path, [[BlockMask(one, grid)] for one in bits], groups="0-0,1-1", packed=True)
    if name == "lowrank":
        draws = torch.Generator().manual_seed(1)
        q, k = torch.randn(2, 1, heads, tokens, WIDTH, generator=draws)
        recorder = RecordQKSource(16, 8, path=str(folder))
        recorder.mask(MaskRequest(0, heads, THW, layers=1), LocalQK.alone(q, k))
        recorder.write()
        fit_recording([folder], path, 6)
        return {"source": "lowrank", "path": str(path), "topk": 0.4, **BLOCKS}
    if name == "record_qk":
        return {"source": "record_qk", "path": str(folder), **BLOCKS}
    return {"source": name, "path": str(path)}
