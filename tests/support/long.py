"""Parameters of which some are marked long."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from dbsp_core import Strategy


def some_long(cases: Iterable[tuple[int, Strategy]], long: Collection[str]) -> list[Any]:
    """Returns worlds and strategies as parameters; long: strategies that only a run with --long tries."""
    return [
        pytest.param(world, strategy, marks=pytest.mark.long if str(strategy) in long else ())
        for world, strategy in cases
    ]
