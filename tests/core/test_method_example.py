"""`examples/method.py` equals dense attention on real processes, and stays what it is for: short, and db-SP-free."""

from __future__ import annotations

import ast
import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest

from tests.support.repository import ROOT

METHOD = ROOT / "examples" / "method.py"


def load_method() -> ModuleType:
    """Returns a new module of the example, so that a fault ends with its case."""
    spec = importlib.util.spec_from_file_location("method_example", METHOD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_comparison(
    rank: int, world: int, size: tuple[int, int, int, int], fault: str | None = None
) -> dict[str, list[float]]:
    """Returns the example's results for (ulysses, heads, tokens, block), with a fault of `FAULTS` or None."""
    method = load_method()
    if fault is not None:
        FAULTS[fault](method)
    return method.compare(*size)


def _keys_in_another_order(method: ModuleType) -> None:
    """Reads the tables of chunks by block, while the sources of k and v read them by head."""
    make_routes = method.make_routes

    def by_block(*arguments):
        route, chunks = make_routes(*arguments)
        return route, [(sends, [pairs[np.lexsort(pairs.T)] for pairs in receives]) for sends, receives in chunks]

    method.make_routes = by_block


def _transposed_mask(method: ModuleType) -> None:
    """Exchanges query and key blocks."""
    attention = method.attention
    method.attention = lambda q, kv, mask, *rest: attention(q, kv, mask.swapaxes(1, 2), *rest)


FAULTS = {"keys in another order": _keys_in_another_order, "transposed mask": _transposed_mask}
"""Each makes the outputs wrong and leaves the sizes of messages as they are, so that no rank waits for ever."""


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


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_by_the_comparison(pool, fault):
    for results in pool(4).run(run_comparison, (2, 5, 203, 16), fault):
        assert not results["balanced"][2] <= 1e-2


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
