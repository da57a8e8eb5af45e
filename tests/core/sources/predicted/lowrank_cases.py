"""What the workers run: low-rank prediction, and what it is fitted to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dbsp_core import BlockGrid, SequenceGroup, SequenceLayout
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import LocalQK, LowRankSource, RecordQKSource
from tests.core.sources.predicted.sparge_cases import SpargeCase, local_tokens


@dataclass(frozen=True)
class LowRankCase(SpargeCase):
    """path: of a fitted file"""

    path: str = ""
    settings: dict[str, Any] = field(default_factory=lambda: {"topk": 0.3})

    @property
    def source(self) -> LowRankSource:  # type: ignore[override]
        return LowRankSource(**{"block_q": 32, "block_k": 16, **self.settings}, path=self.path)


def record_together(rank: int, world: int, folder: str, case: LowRankCase) -> None:
    """Writes this rank's moments."""
    recorder = RecordQKSource(path=folder)
    grid = BlockGrid.uniform(case.request.tokens, 16)
    tokens = local_tokens(rank, world, case, Strategy(1, world), grid)
    recorder.mask(replace(case.request, layers=1), tokens)
    recorder.write()


def predict_with_fitted(rank: int, world: int, case: LowRankCase, fault: str, folder: str) -> None:
    """A session whose second attention would wait for ever where one rank stopped alone."""
    path = case.path
    if rank == 1 and fault in ("other file", "broken file"):
        path = str(Path(folder) / fault.partition(" ")[0])
    mask = {"source": "lowrank", "path": path, "topk": 0.3}
    config = DbspConfig.load({"mask": mask, "strategy": f"U1R{world}"})
    session = AttentionSession(
        config,
        SequenceGroup.from_group(),
        config.strategy_or(None),
        heads=case.heads,
        layers=1 if fault != "layer" else 4,
    )
    layout: SequenceLayout = session.begin(Video(case.thw))
    width = 8 if fault == "width" else case.width
    q = torch.ones(1, case.heads, layout.shard, width)
    session.attend(3 if fault == "layer" else 0, q, q, q)


def predict_with_another_group_before(rank: int, world: int, case: LowRankCase, other: str) -> None:
    """Each rank predicts in a group of its own, where its file is all there is; then all ranks together."""
    source = replace(case, path=other if rank == 1 else case.path).source
    alone = [dist.new_group([one]) for one in range(world)][rank]
    order = SequenceLayout.contiguous(case.request.tokens, 1)
    tokens = local_tokens(rank, world, case, Strategy(1, world))
    source.mask(case.request, LocalQK(*case.tensors(), order, SequenceGroup.from_group(alone), tokens.scale))
    source.mask(case.request, tokens)
