"""Video Sparse Attention: tiles, masks and the coarse branch written out; for ranks see test_engine_session.py."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from dbsp_core import SequenceGroup, Strategy
from dbsp_core.config import DbspConfig
from dbsp_core.masks.branches import CoarseBranch
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import LocalQK, MaskRequest, VsaSource
from dbsp_core.utils.errors import UserError
from tests.core.sources.predicted.sparge_cases import SpargeCase

BLOCKS = {"tile": [2, 3, 4], "block_q": 24, "block_k": 24}


@dataclass(frozen=True)
class VsaCase(SpargeCase):
    """A prediction of VSA, perhaps with text of several kinds."""

    heads: int = 3
    kind: type[Any] = VsaSource
    text_runs: tuple[int, ...] = ()

    @property
    def request(self) -> MaskRequest:
        return replace(super().request, text_runs=self.text_runs)


CASES = {
    "tiles that divide the video": VsaCase(thw=(4, 6, 8), settings={"sparsity": 0.6, **BLOCKS}),
    "smaller tiles at the far sides": VsaCase(thw=(5, 7, 9), settings={"sparsity": 0.8, **BLOCKS}),
    "text, batch of two": VsaCase(thw=(3, 7, 6), text_tokens=30, batch=2, settings={"sparsity": 0.5, **BLOCKS}),
    "text of three kinds": VsaCase(
        thw=(5, 7, 6), text_tokens=30, text_runs=(5, 2, 23), settings={"sparsity": 0.7, **BLOCKS}
    ),
}


def tiles(case: SpargeCase) -> list[list[int]]:
    """Returns the tokens of each block: runs of text, then tile after tile."""
    ends = list(itertools.accumulate(case.text_runs or (case.text_tokens,), initial=0))
    text = [
        list(range(first, min(first + 24, end)))
        for start, end in itertools.pairwise(ends)
        for first in range(start, end, 24)
    ]
    sides = [
        [range(a, min(a + step, n)) for a in range(0, n, step)] for n, step in zip(case.thw, (2, 3, 4), strict=True)
    ]
    _, h, w = case.thw
    return text + [
        [case.text_tokens + (i * h + j) * w + k for i, j, k in itertools.product(*tile)]
        for tile in itertools.product(*sides)
    ]


def gate_and_values(case: SpargeCase) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, _ = case.tensors()
    return tuple(torch.randn(q.shape, generator=generator) for _ in range(2))


def written_out(case: SpargeCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns bool[B · H, nq, nk], and the coarse branch of every token, float64[B · H, tokens, D]."""
    q, k = case.tensors()
    gate, v = gate_and_values(case)
    q, k, v, gate = (one.double().flatten(0, 1) for one in (q, k, v, gate))
    means = [torch.stack([one[:, tile].mean(dim=1) for tile in tiles(case)], dim=1) for one in (q, k, v)]
    scores = means[0] @ means[1].mT * case.head_dim**-0.5
    text = sum(-(-run // 24) for run in case.text_runs or (case.text_tokens,))
    count = math.ceil((1 - case.settings["sparsity"]) * (scores.shape[-1] - text))
    chosen = text + scores[:, :, text:].topk(count).indices
    bits = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    bits[:, :text], bits[:, :, :text] = True, True
    branch = torch.zeros_like(q)
    for tile, row in zip(tiles(case), (scores.softmax(-1) @ means[2]).unbind(1), strict=True):
        branch[:, tile] = row[:, None] * gate[:, tile]
    return bits, branch


def alone(case):
    gate, v = gate_and_values(case)
    return case.source.mask(case.request, LocalQK.alone(*case.tensors(), v=v, gate=gate))


def branch_of(alongside: CoarseBranch, like: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(like)
    alongside.add_to(out)
    return out.flatten(0, 1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_follows_its_definition(case):
    bits, branch = written_out(case)
    mask = alone(case)
    assert mask.grid.q_axis.lengths.tolist() == [len(tile) for tile in tiles(case)]
    assert torch.equal(mask.bits, bits)
    assert (branch_of(mask.branch, case.tensors()[0]) - branch).abs().max() < 1e-5


def test_gradients_of_a_coarse_branch_are_rejected():
    case = CASES["tiles that divide the video"]
    q, k = case.tensors()
    gate, v = gate_and_values(case)
    session = AttentionSession(DbspConfig(mask=case.source), SequenceGroup(0, 1), Strategy(1, 1), case.heads, 1)
    session.begin(Video(case.thw))
    with pytest.raises(UserError, match="coarse branch"):
        session.attend(0, q.requires_grad_(), k, v, gate=gate)
