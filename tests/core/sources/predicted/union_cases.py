"""What the workers run: sessions whose masks are unions, on tokens that ranks share, against the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dbsp_core import BlockMask, SequenceGroup, SequenceLayout
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.masks.steps import DenseSchedule
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import LocalQK, MaskRequest, MaskSource
from dbsp_core.sources.spec import mask_settings
from tests.core.sources.predicted.sparge_cases import SpargeCase
from tests.support.oracle import dense_attention, largest_difference

LAYERS = 2
TIMESTEPS = (900.0, 800.0)
PREDICTED = "sparge:cdf=0.4,similarity=-1,block_q=16,block_k=8"
SOL = "sol:tau=1.0,block_q=16,block_k=8"
APART = "callable:function=tests.support.user_masks:heads_apart,block_q=16,block_k=8"
BAND = "callable:function=tests.support.user_masks:band,block_q=16,block_k=8"
WINDOW = "window:window=[1,3,3],block_q=16,block_k=8"


@dataclass(frozen=True)
class UnionCase(SpargeCase):
    """A mask on a command line, with `dense_first` steps dense."""

    mask: str = f"{WINDOW}+{PREDICTED}"
    dense_first: int = 0

    @property
    def source(self) -> MaskSource:
        return DbspConfig.load({"mask": mask_settings(self.mask)}).mask


def parts_alone(case: UnionCase, request: MaskRequest, q: torch.Tensor, k: torch.Tensor) -> list[BlockMask]:
    """Each part's own mask, made by itself in one process."""
    alone = [DbspConfig.load({"mask": one}).mask for one in mask_settings(case.mask)["of"]]
    return [
        part.mask(request, LocalQK.alone(q, k)) if part.changes == "per_call" else part.mask(request) for part in alone
    ]


def joined(masks: list[BlockMask], batch: int) -> BlockMask:
    """Written out: by sample and head."""
    heads = min(mask.heads for mask in masks)
    bits = torch.stack(
        [
            torch.stack([mask.bits[(head + sample * heads) % mask.heads] for mask in masks]).any(dim=0)
            for sample in range(batch)
            for head in range(heads)
        ]
    )
    return BlockMask(bits, masks[-1].grid)


def run_session(rank: int, world: int, case: UnionCase, strategy: str) -> tuple[float, float, bool]:
    """(largest difference from the oracle, smallest density of the union less that of its densest part, by_step)"""
    config = DbspConfig.load({"mask": mask_settings(case.mask)})
    config = replace(config, dense_schedule=DenseSchedule(first_steps=case.dense_first))
    session = AttentionSession(config, SequenceGroup.from_group(), Strategy.parse(strategy), case.heads, LAYERS)
    worst, gained = 0.0, 1.0
    for step, timestep in enumerate(TIMESTEPS):
        layout = session.begin(Video(case.thw, case.text_tokens), timestep=timestep)
        for layer in range(LAYERS):
            q, k = replace(case, seed=10 * step + layer).tensors()
            v = k.roll(1, dims=2) + q
            out = session.attend(layer, *(_local(t, layout, rank) for t in (q, k, v)))
            request = MaskRequest(layer, case.heads, case.thw, case.text_tokens, step, 0, LAYERS)
            masks = parts_alone(case, request, q, k)
            union = joined(masks, case.batch)
            gained = min(gained, union.density - max(mask.density for mask in masks))
            if step < case.dense_first:
                union = BlockMask.dense(case.heads, union.grid)
            mine, places = (torch.from_numpy(a) for a in layout.tokens_at(rank))
            for sample in range(case.batch):
                per = union.heads // case.heads
                bits = union.bits.view(per, case.heads, *union.bits.shape[1:])[sample % per]
                own = BlockMask(bits, union.grid)
                expected = dense_attention(*(t[[sample]] for t in (q[:, :, mine], k, v)), own, mine)
                worst = max(worst, largest_difference(out[[sample]][:, :, places], expected))
    return worst, gained, session.by_step


def _local(tokens: torch.Tensor, layout: SequenceLayout, rank: int) -> torch.Tensor:
    mine, places = (torch.from_numpy(a) for a in layout.tokens_at(rank))
    here = tokens.new_zeros(*tokens.shape[:2], layout.shard, tokens.shape[-1])
    here[:, :, places] = tokens[:, :, mine]
    return here
