"""`dbsp masks convert` against PAROAttention's own reading of its plans (jamescsq47/PAROAtten).

Its repository has no code that makes plans: those read here are random, of one layer and six heads, one for each token
order, in two step groups. Its functions have CogVideoX's and Wan's sizes built in.
"""

from __future__ import annotations

import importlib.util
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from dbsp_cli.mask_tools.convert import PARO_ORDERS, ConvertOptions, convert_masks, even_groups
from dbsp_core import BlockGrid
from dbsp_core.masks.mask_file import MaskFile
from scripts.checks.upstream.upstream_refs.finding import Finding, compared, make_importable

PROJECT = "PAROAtten"
HEADS, GROUPS, BLOCK, DENSITY = len(PARO_ORDERS), 2, 64, 0.3
BATCH, WIDTH = 2, 2
COGVIDEOX, TEXT = (13, 30, 45), 226
WAN = (21, 45, 80)
SCHEDULES = ((4, 50), (10, 50), (10, 30), (7, 20))
"""Step groups, and denoising steps."""


def findings(folder: Path) -> Iterator[Finding]:
    make_importable(
        folder, "paroattention._qattn_sm80", "paroattention._fused", "paroattention.wan", "sageattention", "omegaconf"
    )
    from paroattention.cogvideox import permute_qk
    from paroattention.prefetch_utils import TimestepCallback

    yield _orders(folder, "cogvideox", permute_qk, COGVIDEOX, TEXT)
    wan = _module(folder / "paroattention" / "wan.py", "wan_of_paroattention")
    yield _orders(folder, "wan", wan.permute_qk, WAN, 0)
    for groups, steps in SCHEDULES:
        yield _step_groups(folder, TimestepCallback(groups), groups, steps)
    yield from _masks(folder)


def _module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _orders(folder: Path, model: str, permute: Callable[..., object], thw: tuple[int, int, int], text: int) -> Finding:
    """Compares which token its reordering puts where, in heads of all orders."""
    tokens = text + math.prod(thw)
    numbers = [torch.arange(tokens)[:, None].repeat(BATCH, HEADS, 1, WIDTH) for _ in range(3)]
    permute(*numbers, {"permute": torch.arange(HEADS)[None]}, 0)
    grid = BlockGrid(tokens, text, BLOCK, BLOCK, thw)
    same = [
        theirs[-1, head, :, -1].numpy() == grid.token_permutation(order)
        for theirs in numbers
        for head, order in enumerate(PARO_ORDERS)
    ]
    return compared(
        PROJECT, folder, f"{model}, order of tokens of Q, K, V, six heads", same, np.ones_like(same), unit="tokens"
    )


def _step_groups(folder: Path, callback: Any, groups: int, steps: int) -> Finding:
    """Compares the step group of each step, which its callback sets at the end of the step before."""
    pipe = mock.MagicMock()
    pipe.scheduler.timesteps = range(steps)
    theirs = [0]
    for step in range(steps - 1):
        callback.on_step_end(pipe, step, 0, {})
        theirs.append(int(pipe.transformer.i_timestep))
    ours = [even_groups(groups, steps).find(step) for step in range(steps)]
    one_hot = [np.arange(groups) == np.array(one)[:, None] for one in (theirs, ours)]
    return compared(PROJECT, folder, f"{groups} step groups of {steps} steps", *one_hot, unit="pairs")


def _masks(folder: Path) -> Iterator[Finding]:
    """Compares its CogVideoX example's reading of a plan, and the mask file that we make of the same plan."""
    rng = torch.Generator().manual_seed(0)
    blocks = -(-(math.prod(COGVIDEOX) + TEXT) // BLOCK) - -(-TEXT // BLOCK)
    plan = {"sparse": (torch.rand(GROUPS, 1, HEADS, blocks, blocks, generator=rng) < DENSITY).float()}
    permute = {"permute": torch.arange(HEADS)[None], "empty": torch.zeros(1, HEADS)}
    example = _module(folder / "example" / "pipeline_cogvideox.py", "example_of_paroattention")
    example.args = SimpleNamespace(prefetch=False)  # type: ignore[attr-defined]
    pipe = mock.MagicMock()
    pipe.transformer.transformer_blocks = [mock.MagicMock()]
    with mock.patch("torch.load", lambda path, **_: permute if "permute" in os.path.basename(path) else plan):
        example.paroattn_convert(pipe)
    theirs = pipe.transformer.transformer_blocks[0].attn1.processor.sparse_mask[:, 0].numpy()

    with tempfile.TemporaryDirectory() as made:
        torch.save(plan, f"{made}/sparse_plan.pth")
        torch.save(permute, f"{made}/permute_plan.pth")
        options = ConvertOptions(thw=COGVIDEOX, text_tokens=TEXT, orders=f"{made}/permute_plan.pth", steps=50)
        convert_masks(f"{made}/sparse_plan.pth", f"{made}/ours.safetensors", options)
        masks = [MaskFile(f"{made}/ours.safetensors").layer(0, group) for group in range(GROUPS)]
    ours = np.stack([mask.bits.numpy() for mask in masks])
    assert masks[0].grid.orders == PARO_ORDERS

    grid = masks[0].grid
    edges = np.unique([*range(0, grid.tokens, BLOCK), *grid.q_axis.starts])
    block, own = edges // BLOCK, np.searchsorted(grid.q_axis.starts, edges, side="right") - 1
    piecewise = [mask[..., piece[:, None], piece] for mask, piece in ((theirs, block), (ours, own))]
    note = (
        "theirs: blocks run on from text into video, one holds 34 tokens of text and 30 of video; ours: text and "
        "video have blocks of their own, dense where any of theirs that share tokens with it is"
    )
    yield compared(PROJECT, folder, "cogvideox, token by token", *piecewise, note, unit="pieces of blocks")
    shared = np.zeros((len(grid.q_axis.starts), theirs.shape[-1]), dtype=np.float32)
    shared[own, block] = 1
    spread = (shared @ theirs.astype(np.float32) @ shared.T) > 0
    yield compared(
        PROJECT, folder, "cogvideox, blocks of ours that share tokens with a dense one of theirs", spread, ours
    )
