"""Ranks of `dbsp generate` in the tests' own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from dbsp_cli.generate.ranks import RankInfo

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes this process the only rank; what `RankInfo.export` sets is taken back after the test."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    RankInfo().export()
    yield
    if dist.is_initialized():  # still, after an error that would have ended the process
        dist.destroy_process_group()
