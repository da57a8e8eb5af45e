"""`torch.set_default_device` is common in scripts; what db-SP has on the host stays there. "meta" represents a GPU."""

from __future__ import annotations

import ast

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid, BlockMask
from tests.core.robustness.device_cases import functions, session
from tests.support.repository import ROOT

SPARGE = {"source": "sparge", "cdf": 0.5}
SETTINGS = [
    {"mask": {"source": "dense"}},
    {"mask": {"source": "svg"}},
    {"mask": {"source": "synthetic"}},
    {"mask": SPARGE, "dense_schedule": {"first_steps": 1}},
]


def assert_same(with_device, without):
    for one, other in zip(with_device, without, strict=True):
        assert len(one) == len(other) > 0
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_functions_compute_the_same(pool):
    assert_same(*(pool(2).run(functions, device) for device in ("meta", None)))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sessions_compute_the_same(pool, settings):
    assert_same(*(pool(2).run(session, settings, device) for device in ("meta", None)))


@pytest.mark.usefixtures("debug")
def test_sessions_that_compare_what_they_attend_with_compute_the_same(pool):
    assert_same(*(pool(2).run(session, {"mask": SPARGE}, device) for device in ("meta", None)))


def test_a_masks_bits_stay_where_they_are():
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
"""What torch makes on its default device where no device is named."""


def test_whatever_makes_a_tensor_names_its_device():
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
