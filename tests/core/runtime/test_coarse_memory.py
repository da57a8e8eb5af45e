"""A coarse branch and its gate, each as large as the output, are freed when their attention has been computed."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch

from dbsp_core import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import CoarseBranch
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from tests.support.settings import with_debug

VSA = {"source": "vsa", "sparsity": 0.5, "tile": [2, 2, 4], "block_q": 16, "block_k": 16}
LAYERS = 3


def branches_alive(rank: int, world: int, debug: bool) -> tuple[int, int]:
    """Returns how many gates and coarse branches were made in a pass, and how many are alive after it."""
    config = with_debug({"mask": VSA}, debug)
    session = AttentionSession(config, SequenceGroup.from_group(), Strategy(1, world), 4, LAYERS)
    made: list[weakref.ref[torch.Tensor]] = []

    def note(branch: CoarseBranch, out: torch.Tensor, add: Any = CoarseBranch.add_to) -> None:
        made.extend((weakref.ref(branch.gate), weakref.ref(branch.coarse)))
        add(branch, out)

    with mock.patch.object(CoarseBranch, "add_to", note), torch.no_grad():
        layout = session.begin(Video((4, 8, 8)), timestep=900.0)
        for layer in range(LAYERS):
            q, k, v = torch.randn(3, 1, 4, layout.shard, 16)
            gate = torch.randn_like(q)
            session.attend(layer, q, k, v, gate=gate)
            del q, k, v, gate
    gc.collect()
    return len(made), sum(one() is not None for one in made)


@pytest.mark.parametrize("debug", [False, True])
def test_gate_and_coarse_branch_are_freed(pool, debug):
    for made, alive in pool(2).run(branches_alive, debug):
        assert made == 2 * LAYERS
        assert alive == 0
