"""`torch.set_default_device` is common in scripts; what db-SP has on the host stays there. "meta" represents a GPU."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid, BlockMask
from dbsp_core.masks.grid import Video
from tests.support.repository import ROOT
from tests.support.settings import session_of

HEADS, WIDTH, TOKENS = 4, 16, 200


def session(rank: int, world: int, settings: dict[str, Any], device: str | None) -> list[np.ndarray]:
    """Runs two steps of a session. Returns outputs."""
    given, found = {**settings, "mask": {"block_q": 16, "block_k": 16} | settings["mask"]}, []
    with nullcontext() if device is None else torch.device(device):
        one = session_of(given, f"U{world}R1", HEADS)
        for step in range(2):
            layout = one.begin(Video((2, 8, 8)), timestep=1000.0 - step, device=torch.device("cpu"))
            generator = torch.Generator().manual_seed(10 * rank + step)
            q, k, v = torch.randn(3, 1, HEADS, layout.shard, WIDTH, generator=generator, device="cpu")
            found.append(one.attend(0, q, k, v).numpy())
        one.flush()
    return found


SPARGE = {"source": "sparge", "cdf": 0.5}


@pytest.mark.parametrize(
    ("settings", "debug"),
    [
        ({"mask": {"source": "synthetic"}}, ""),
        ({"mask": SPARGE, "dense_schedule": {"first_steps": 1}}, ""),
        ({"mask": SPARGE}, "1"),
    ],
    ids=str,
)
def test_sessions_compute_the_same(pool, monkeypatch, settings, debug):
    monkeypatch.setenv("DBSP_DEBUG", debug)
    with_device, without = (pool(2).run(session, settings, device) for device in ("meta", None))
    torch.testing.assert_close(with_device, without, rtol=0, atol=0)


def test_bits_of_a_mask_stay_on_their_device():
    bits = torch.ones(2, 3, 3, dtype=torch.bool)
    grid = BlockGrid.uniform(48, 16)
    with torch.device("meta"):
        for given in (bits, bits.numpy(), bits.tolist()):
            assert BlockMask(given, grid).bits.device.type == "cpu"
    assert BlockMask(bits.to("meta"), grid).bits.is_meta


MADE = {
    *("tensor", "as_tensor", "asarray", "zeros", "ones", "full", "empty", "empty_strided", "arange", "range", "eye"),
    *("linspace", "logspace", "rand", "randn", "randint", "randperm", "scalar_tensor", "tril_indices", "triu_indices"),
}
"""Functions of torch that make tensors on its default device where no device is named."""


def test_every_tensor_is_made_on_a_named_device():
    packages = [file.parent for file in ROOT.glob("dbsp_*/__init__.py")] + [ROOT / "kernels"]
    assert len(packages) > 4
    nowhere = []
    for file in sorted(file for package in packages for file in package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if _makes_a_tensor(node) and not {keyword.arg for keyword in node.keywords} & {"device", None}:
                nowhere.append(f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not nowhere


def _makes_a_tensor(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in MADE}
