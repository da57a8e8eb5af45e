"""Results and errors of ranks, for functions that run on ranks and compare them with one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.support.oracle import largest_difference
from tests.support.single_process import attach_single_process


def outputs(transformer: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns a sample, or a list of one for each item, and audio."""
    parts = transformer(**inputs)
    return [one for part in parts for one in (part if isinstance(part, list) else [part]) if torch.is_tensor(one)]


@torch.no_grad()
def alone(transformer: Any, inputs: dict[str, Any], config: Any) -> list[torch.Tensor]:
    """Returns the outputs of one process with a configuration's masks; the transformer is as before afterwards."""
    single = attach_single_process(transformer, config)
    try:
        return outputs(transformer, inputs)
    finally:
        single.detach()


Tensors = torch.Tensor | Iterable[torch.Tensor]


def apart(found: Tensors, expected: Tensors) -> float:
    """Returns the largest difference of two tensors, or of two lists of tensors, on any devices."""
    if isinstance(found, torch.Tensor):
        found, expected = [found], [expected]  # type: ignore[list-item]
    pairs = zip(found, expected, strict=True)
    return max((largest_difference(a.detach().cpu(), b.detach().cpu()) for a, b in pairs), default=0.0)


def share_apart(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """Returns `apart` as a share of the largest value."""
    expected = list(expected)
    return apart(found, expected) / max(float(one.detach().abs().max()) for one in expected)


def assert_near(found: Tensors, expected: Tensors, other: Tensors | None = None, tolerance: float = 1e-5) -> None:
    """Asserts equality up to rounding; other: a result without the mask or feature, from which it must differ."""
    difference = apart(found, expected)
    assert difference <= tolerance, f"apart by {difference}"
    assert other is None or apart(expected, other) > 100 * tolerance, "the mask or feature must matter"


def said(action: Callable[[], Any]) -> str:
    """Returns the kind and message of the error that an action raises, or "nothing"."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
