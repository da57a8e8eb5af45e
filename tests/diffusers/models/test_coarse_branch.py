"""A Wan with the gates of FastWan: sparse attention and its coarse branch as in one process, in every framework."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dbsp_diffusers
from dbsp_core.sources import vsa
from tests.diffusers.models.model_cases import apart, outputs
from tests.support.models.gated_wan import VSA, put_gates
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.shared import shared
from tests.support.single_process import attach_single_process


def make_gated() -> Any:
    return put_gates(make_tiny_transformer("wan"))


@shared
def one_process(batch: int, coarse: bool) -> list[torch.Tensor]:
    transformer = make_gated()
    attached = attach_single_process(transformer, {"mask": VSA | {"coarse": coarse}})
    with torch.no_grad():
        found = outputs(transformer, tiny_inputs("wan", batch=batch))
    attached.detach()
    return found


def run(rank: int, world: int, strategy: str) -> list[tuple[float, float]]:
    """By batch: how far from one process, and how far that is from the same without the coarse branch."""
    expected = {(batch, coarse): one_process(batch, coarse) for batch in (1, 2) for coarse in (False, True)}
    transformer, found = make_gated(), []
    dbsp_diffusers.enable(transformer, {"mask": VSA, "strategy": strategy})
    for batch in (1, 2):
        with torch.no_grad():
            out = outputs(transformer, tiny_inputs("wan", batch=batch))
        found.append((apart(out, expected[batch, True]), apart(out, expected[batch, False])))
    return found


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("strategy", ["U2R1", "U1R3"])
def test_equals_one_process(threads, strategy):
    world = {"U2R1": 2, "U1R3": 3}[strategy]
    for found in threads(world).run(run, strategy):
        for difference, from_mask_alone in found:
            assert difference <= 1e-5
            assert from_mask_alone > 1e-3, "the branch must matter"


def test_tokens_of_a_tile_get_the_same_times_their_gates():
    """What one attention's output projection is given with the branch, less what it is given without it."""
    transformer, seen, given = make_gated(), {}, []
    attention = transformer.blocks[0].attn1
    attention.to_q.register_forward_pre_hook(lambda module, args: seen.update(hidden=args[0]))
    attention.to_out[0].register_forward_pre_hook(lambda module, args: given.append(args[0]))
    with torch.no_grad():
        for coarse in (False, True):
            attached = attach_single_process(transformer, {"mask": VSA | {"coarse": coarse}})
            outputs(transformer, tiny_inputs("wan"))
            attached.detach()
        gate = attention.to_gate_compress(seen["hidden"])
    branch = ((given[1] - given[0]) / gate)[0]
    tile = [(t * 5 + h) * 7 + w for t in range(2) for h in range(2) for w in range(4)]
    plain = gate[0, tile].abs() > 0.1  # elsewhere the quotient is mostly rounding
    apart_in_tile = (branch[tile] - branch[tile].median(dim=0).values).abs()[plain]
    assert float(apart_in_tile.max()) < 1e-4 < float(branch[tile].abs().max())


def test_wan_without_gates_warns_once(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(vsa.log, "warning", said.append)
    vsa._say_without_gate.cache_clear()
    transformer = make_tiny_transformer("wan")
    attach_single_process(transformer, {"mask": VSA})
    with torch.no_grad():
        outputs(transformer, tiny_inputs("wan"))
    assert len(said) == 1
    assert "no gate (attn1.to_gate_compress) reaches it" in said[0]
