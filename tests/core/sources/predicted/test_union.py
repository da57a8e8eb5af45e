"""Unions of masks: what either keeps, at the pace of the faster one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from dbsp_core import BlockMask
from dbsp_core.config import DbspConfig
from dbsp_core.sources import LocalQK, MaskRequest, MaskSource
from dbsp_core.sources.spec import mask_settings
from dbsp_core.utils.errors import UserError
from tests.core.runtime.session_cases import Session
from tests.core.sources.predicted.sparge_cases import SpargeCase

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
    """Returns each part's mask, made alone in one process."""
    alone = [DbspConfig.load({"mask": one}).mask for one in mask_settings(case.mask)["of"]]
    return [
        part.mask(request, LocalQK.alone(q, k)) if part.changes == "per_call" else part.mask(request) for part in alone
    ]


def joined(masks: list[BlockMask], batch: int) -> BlockMask:
    """Returns the union by sample and head, written out."""
    heads = min(mask.heads for mask in masks)
    bits = [
        torch.stack([mask.bits[(head + sample * heads) % mask.heads] for mask in masks]).any(dim=0)
        for sample in range(batch)
        for head in range(heads)
    ]
    return BlockMask(torch.stack(bits), masks[-1].grid)


def run_session(rank: int, world: int, case: UnionCase, strategy: str) -> tuple[float, bool]:
    """Returns how far two steps of a session are from one process's, and by_step."""
    settings = {"mask": mask_settings(case.mask), "dense_schedule": {"first_steps": case.dense_first}}
    session = Session(settings, strategy, layers=2, heads=case.heads)
    worst = max(session.attend(timestep, case.batch, case.thw, case.text_tokens) for timestep in (900.0, 800.0))
    return worst, session.inner.by_step


CASES = {
    "window and predicted": UnionCase(),
    "by step and predicted, batch of two": UnionCase(mask=f"{PREDICTED}+{BAND},depends_on=step", batch=2),
    "by layer, dense first step, text": UnionCase(mask=f"{BAND}+{APART}", text_tokens=9, dense_first=1),
    "window and a threshold": UnionCase(mask=f"{WINDOW}+{SOL}", batch=2),
    "tiles, three of them": UnionCase(
        mask=f"window:tile=[2,4,4],window=[1,1,1],block_q=16,block_k=8,shifted=false+{PREDICTED},token_order=tile:2x4x4"
        f"+{BAND},token_orders=['tile:2x4x4']",
        thw=(4, 8, 9),
    ),
}


@pytest.mark.parametrize("name", ["by step and predicted, batch of two", "by layer, dense first step, text"])
def test_session_equals_one_process(threads, name):
    case = CASES[name]
    for difference, by_step in threads(3).run(run_session, case, "U1R3"):
        assert difference <= 1e-5
        assert by_step == ("depends_on=step" in case.mask or case.dense_first > 0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_union_equals_its_parts_joined(case):
    q, k = case.tensors()
    source = case.source
    predicted = source.changes == "per_call"
    for number in range(2):
        request = replace(case.request, layer=number, step=number, layers=2)
        parts = parts_alone(case, request, q, k)
        found = source.mask(request, LocalQK.alone(q, k)) if predicted else source.mask(request)
        assert torch.equal(found.bits, joined(parts, case.batch if predicted else 1).bits)
        assert max(part.density for part in parts) + 0.01 < found.density < 0.95, "no part may hold the others"


def test_known_part_is_kept_for_each_size_of_video():
    source = UnionCase().source
    for thw in ((5, 7, 9), (3, 7, 15)):  # of equally many tokens
        case = UnionCase(thw=thw)
        q, k = case.tensors()
        found = source.mask(case.request, LocalQK.alone(q, k))
        assert torch.equal(found.bits, joined(parts_alone(case, case.request, q, k), 1).bits)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("window+sparge:block_q=128", "64×64 blocks in order thw and .* 128×64 blocks"),
        ("window:tile=[1,8,8]+sparge", "in order tile:1x8x8 and .* in order thw"),
        ("vsa+sparge:token_order=tile:4x4x4", "with smaller tiles at the far sides and .* in order tile:4x4x4; "),
    ],
)
def test_blocks_that_differ_are_rejected_in_one_line(mask, message):
    with pytest.raises(UserError, match=message):
        UnionCase(mask=mask).source.grid(MaskRequest(0, 2, (3, 8, 8)))


def test_window_of_whole_tiles_joins_masks_with_smaller_tiles_at_the_far_sides():
    case = UnionCase(thw=(5, 6, 9), mask="window:tile=[4,4,4],window=[3,1,1],whole_tiles=true+cube:topk=0.1")
    q, k = case.tensors()
    parts = parts_alone(case, case.request, q, k)
    assert parts[0].grid.whole_tiles
    assert torch.equal(case.source.mask(case.request, LocalQK.alone(q, k)).bits, joined(parts, 1).bits)
    tiles = np.stack(np.unravel_index(np.arange(12), (2, 2, 3)), axis=1)
    near = (tiles[:, None, 1:] == tiles[None, :, 1:]).all(axis=2)  # three of two frames of tiles: all of them
    assert torch.equal(parts[0].bits, torch.from_numpy(near).expand(case.heads, -1, -1))


def test_coarse_branch_of_one_part_is_kept_and_of_two_rejected():
    case = UnionCase(thw=(4, 8, 8))
    q, k = case.tensors()
    tokens = LocalQK.alone(q, k, v=k, gate=q)
    kept = UnionCase(mask="vsa+sol:token_order=tile:4x4x4").source.mask(case.request, tokens).branch
    alone = UnionCase(mask="vsa+window:tile=[4,4,4]").source.of[0].mask(case.request, tokens).branch
    assert kept is not None
    assert torch.equal(kept.coarse, alone.coarse)
    with pytest.raises(UserError, match="several masks of a union have a coarse branch; give all but one"):
        UnionCase(mask="vsa+vsa:sparsity=0.5").source.mask(case.request, tokens)
