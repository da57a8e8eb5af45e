"""`examples/method.py` equals dense attention on real processes, and stays what it is for: short, and db-SP-free."""

from __future__ import annotations

import ast
import runpy
import sys

import pytest

from tests.support.repository import ROOT

METHOD = ROOT / "examples" / "method.py"


def run_comparison(rank: int, world: int, size: tuple[int, int, int, int]) -> dict[str, list[float]]:
    """Returns the example's results for (ulysses, heads, tokens, block)."""
    results: dict[str, list[float]] = runpy.run_path(str(METHOD))["compare"](*size)
    return results


@pytest.mark.parametrize(
    ("world", "size", "balanced"),
    [
        *((world, (ulysses, 5, 790, 16), True) for world, ulysses in ((4, 4), (4, 2), (4, 1), (3, 3), (2, 1))),
        (4, (2, 5, 20, 16), False),  # fewer blocks than ranks
        (4, (4, 1, 203, 16), False),  # one head on four columns
        (3, (1, 2, 5, 8), False),  # one block, shorter than a whole one
    ],
)
def test_outputs_equal_dense_attention_and_work_is_balanced(pool, world, size, balanced):
    found = pool(world).run(run_comparison, size)
    assert all(results == found[0] for results in found)
    (before, _, usp_difference), (after, _, difference) = found[0]["plain USP"], found[0]["balanced"]
    assert max(usp_difference, difference) <= 1e-5
    assert not balanced or (1 <= after <= 1.003 and before > 1.03)


def test_file_is_short_and_needs_only_torch_and_numpy():
    text = METHOD.read_text()
    assert len(text.splitlines()) <= 200
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert {"torch", "numpy"} <= imported
    assert imported <= {"torch", "numpy", *sys.stdlib_module_names}
