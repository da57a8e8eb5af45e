"""Runs `examples/method.py` on the ranks of a pool, also with faults that its comparison must find."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import numpy as np
import torch

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
        return route, [(sends, _by_block(receives)) for sends, receives in chunks]

    method.make_routes = by_block


def _by_block(receives: list[np.ndarray]) -> list[np.ndarray]:
    return [pairs[np.lexsort(pairs.T)] for pairs in receives]


def _transposed_mask(method: ModuleType) -> None:
    """Exchanges query and key blocks."""
    attention = method.attention
    method.attention = lambda q, kv, mask, *rest: attention(q, kv, mask.swapaxes(1, 2), *rest)


def _no_number(method: ModuleType) -> None:
    """Makes the outputs of the last rank NaN."""
    attention = method.attention

    def spoiled(*arguments):
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        return attention(*arguments) * (torch.nan if last else 1)

    method.attention = spoiled


FAULTS = {
    "keys in another order": _keys_in_another_order,
    "transposed mask": _transposed_mask,
    "no number": _no_number,
}
"""Each makes the outputs wrong and leaves the sizes of messages as they are, so that no rank waits for ever."""
