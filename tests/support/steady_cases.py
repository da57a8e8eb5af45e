"""What the workers run: a step in the middle of a denoising, watched for whatever would wait for a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

import dbsp_core.runtime.ring
from dbsp_core import SequenceGroup
from dbsp_core.config.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.reports.observed import observed_session

_SCALARS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose")
_SIZES = ("nonzero", "masked_select", "unique")
WAITS = frozenset(("cpu", "numpy", *_SCALARS, *_SIZES))
"""Functions whose values the host needs, or whose result's size: on a GPU each waits for all that is queued."""


class Watch(TorchFunctionMode):
    """Counts calls of WAITS in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def waits_of_a_steady_step(rank: int, world: int, settings: dict[str, Any], strategy: str) -> dict[str, int]:
    """The third step of one layer. The kernel is left out: the CPU's own reads its tables, a GPU's does not."""
    config = DbspConfig.load(settings)
    session = observed_session(config, SequenceGroup.of(), Strategy.parse(strategy), heads=4, layers=1)
    watch = Watch()

    def no_kernel(q: torch.Tensor, *_: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(q), torch.zeros(q.shape[:2])

    with mock.patch.object(dbsp_core.runtime.ring, "block_attention", no_kernel):
        for step in range(3):
            layout = session.begin((4, 8, 8), 0, 900.0 - step)
            q, k, v = torch.randn(3, 1, 4, layout.shard, 16, generator=torch.Generator().manual_seed(step))
            if step < 2:
                session.attend(0, q, k, v)
        with watch:
            session.attend(0, q, k, v)
    session.reuse  # noqa: B018  waits for what is being planned
    return dict(watch.seen)
