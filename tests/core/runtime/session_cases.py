"""Sessions whose batch, size, masks or settings change, against attention in one process: what ranks run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dbsp_core import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.reports.observer import observed_session
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import LocalQK
from tests.support.attention_cases import shards
from tests.support.oracle import largest_difference
from tests.support.single_process import masked_attention
from tests.support.thread_ranks import once

HEADS, WIDTH, THW = 5, 16, (3, 6, 10)


@dataclass
class Session:
    """One rank of a session that attends and compares. strategy: UxRy or auto; device, dtype: of its q, k and v."""

    settings: dict[str, Any]
    strategy: str
    layers: int = 1
    steps: int = 50
    heads: int = HEADS
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    inner: AttentionSession = field(init=False)
    feed: MaskProvider = field(init=False)

    def __post_init__(self) -> None:
        strategy = None if self.strategy == "auto" else Strategy.parse(self.strategy)
        parts = DbspConfig(**self.settings), SequenceGroup.from_group(), strategy, self.heads, self.layers
        self.inner = observed_session(*parts, lambda: self.steps)
        config = DbspConfig(**self.settings)  # the masks of one process are from a source of its own
        made = partial(MaskProvider, config.mask, config.dense_schedule, self.heads, self.layers, lambda: self.steps)
        self.feed = once(made)

    def attend(
        self,
        timestep: float,
        batch: int = 1,
        thw: tuple[int, int, int] = THW,
        text_tokens: int = 0,
        settle: bool = False,
        more: tuple[Video, ...] = (),
    ) -> float:
        """Runs a pass over one video and `more`. Returns how far this rank's output is from one process's."""
        if settle:
            self.inner.flush()
        videos = (Video(thw, text_tokens), *more)
        layout = self.inner.begin(*videos, timestep=timestep, device=self.device)
        once(lambda: self.feed.begin(videos, timestep))
        shape, worst = (batch, self.heads, layout.tokens, WIDTH), 0.0
        for layer in range(self.layers):
            full, expected = once(partial(self._alone, layer, shape, self.layers * int(timestep) + layer))
            local, token, slot = shards(full, layout, self.inner.group.rank, padded=True)
            out = self.inner.attend(layer, *(shard.to(self.device, self.dtype) for shard in local)).cpu()
            assert not out.requires_grad
            worst = max(worst, largest_difference(out[:, :, slot], expected[:, :, token]))
        return worst

    def _alone(
        self, layer: int, shape: tuple[int, int, int, int], seed: int
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Returns q, k and v of all tokens, and attention to them in one process."""
        generator = torch.Generator().manual_seed(seed)
        full = [(torch.randn(shape, generator=generator) * 2).to(self.dtype).float() for _ in range(3)]
        mask = self.feed.mask(layer, LocalQK.alone(full[0], full[1]))
        return full, masked_attention(*full, mask)


PREDICTED = {"mask": {"source": "sparge", "cdf": 0.6, "similarity": -1.0, "block_q": 16, "block_k": 16}}
