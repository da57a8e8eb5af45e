"""Every launch runs on its tensors' device, and few variants of each kernel are compiled for many sizes. No GPU."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

import dbsp_kernels.triton
from tests.support.programs import run
from tests.support.repository import ROOT, child_environment

pytest.importorskip("triton")
MOST_VARIANTS = {
    "forward_kernel": 12,  # output in the model's dtype or float32, merged with a partial result or not; whole rows,
    # int8 or not, or of rows in parts
    "backward_rows_kernel": 1,
    "backward_keys_kernel": 1,
    "merge_kernel": 1,
    "merge_parts_kernel": 4,  # output in the model's dtype or float32, merged with a partial result or not
    "key_kernel": 1,
    "position_kernel": 2,  # for an order or for parts
    "items_kernel": 1,
    "expand_kernel": 1,
    "pack_kernel": 1,
    "sum_kernel": 2,  # to rows one after another, or to given ones
    "pool_kernel": 1,
    "score_kernel": 1,
    "select_kernel": 2,  # by cumulative chance or by count
    "copy_kernel": 16,  # four segment lengths; one source, one that is added, three; or two destinations
    "quantise_blocks_kernel": 1,
    "quantise_kernel": 12,  # four segment lengths; rotated, with a mean subtracted or not; the output
    "rotate_kernel": 8,  # four segment lengths; tokens or int8 rows
}
"""Variants for one dtype, head size and block size."""


def test_launches_run_on_their_tensors_device_and_compile_few_variants():
    environment = {name: value for name, value in child_environment().items() if name != "TRITON_INTERPRET"}
    done = run([sys.executable, "-m", "tests.kernels.recorded_launches"], env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    launches = json.loads(done.stdout.splitlines()[-1])
    assert launches["elsewhere"] == [], "another device is current there"
    assert launches["variants"] == MOST_VARIANTS


def test_recorded_kernels_are_all_of_the_package():
    files = Path(dbsp_kernels.triton.__file__).parent.glob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    assert {name.lstrip("_") for name in names if name.endswith("_kernel")} == MOST_VARIANTS.keys()
