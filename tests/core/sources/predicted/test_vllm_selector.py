"""Source vllm_selector: selectors of vLLM-Omni select the same on any ranks, and mistakes are one line on all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dbsp_core.config.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.sources import LocalQK, VllmSelectorSource
from dbsp_core.utils.errors import UserError
from tests.core.sources.predicted.sparge_cases import SpargeCase, local_tokens
from tests.support.block_selectors import LikelyBlocks
from tests.support.thread_ranks import ThreadRanks

HERE = "tests.support.block_selectors"


@dataclass(frozen=True)
class SelectorCase(SpargeCase):
    """settings: the selector's class, and its options"""

    settings: dict[str, Any] = field(default_factory=lambda: {"selector": f"{HERE}:LikelyBlocks"})

    @property
    def source(self) -> VllmSelectorSource:  # type: ignore[override]
        return VllmSelectorSource(**{"block_q": 32, "block_k": 16, **self.settings})


def select_together(rank: int, world: int, case: SelectorCase, strategy: str) -> int:
    tokens = local_tokens(rank, world, case, Strategy.parse(strategy))
    return case.source.mask(case.request, tokens).fingerprint


def alone(case: SelectorCase) -> torch.Tensor:
    return case.source.mask(case.request, LocalQK.alone(*case.tensors())).bits


@pytest.mark.parametrize("text", [0, 21])
def test_it_is_what_the_selector_says_and_text_is_dense(text):
    case = SelectorCase(text_tokens=text, batch=2)
    bits = alone(case).unflatten(0, (2, case.heads))
    selector = LikelyBlocks({})
    selector.prepare((32, 16), case.width, torch.device("cpu"))
    q, k = (one[:, :, text:].transpose(1, 2) for one in case.tensors())
    indices, counts = selector.select(q, k, case.width**-0.5, 0)
    text_q, text_k = -(-text // 32), -(-text // 16)
    assert bits[:, :, :text_q].all()
    assert bits[..., :text_k].all()
    for place in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        row = bits[:, :, text_q:, text_k:][tuple(place)]
        assert row.nonzero().flatten().tolist() == indices[tuple(place)][: counts[tuple(place)]].tolist()
    assert 0.2 < bits.float().mean() < 0.8


@pytest.mark.parametrize(("world", "strategy"), [(2, "U1R2"), (3, "U3R1"), (4, "U2R2"), (7, "U7R1")])
@pytest.mark.parametrize("case", [SelectorCase(batch=2), SelectorCase(text_tokens=21, layout="shuffled")])
def test_every_number_of_ranks_gives_the_same_bits(world, strategy, case):
    expected = case.source.mask(case.request, LocalQK.alone(*case.tensors())).fingerprint
    assert set(ThreadRanks(world).run(select_together, case, strategy)) == {expected}


def test_from_a_command_line_with_options():
    text = f"vllm_selector:selector={HERE}:LikelyBlocks,options={{share: 0.2}},block_q=32,block_k=16"
    mine = DbspConfig.load(text).mask
    assert mine == VllmSelectorSource(32, 16, f"{HERE}:LikelyBlocks", {"share": 0.2})
    settings = {"selector": f"{HERE}:LikelyBlocks", "options": {"share": 0.2}}
    assert alone(SelectorCase(settings=settings)).sum() < alone(SelectorCase()).sum()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "needs selector: package.module:Class"),
        ({"selector": f"{HERE}:Missing"}, "has no such name; name a class"),
        ({"selector": "no_such_module:Missing"}, "importing no_such_module failed"),
    ],
)
def test_what_cannot_be_imported_is_refused_at_once(settings, said):
    with pytest.raises(UserError, match=said):
        VllmSelectorSource(**settings)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"settings": {"selector": f"{HERE}:Failing"}}, "RuntimeError: one head is too few for layer 0"),
        ({"settings": {"selector": f"{HERE}:Misshapen"}}, "and the same without the last"),
        ({"width": 80}, "ValueError: at most 64 for layer 0"),
    ],
)
def test_a_selector_that_fails_on_one_rank_fails_on_all_in_one_line(changed, said):
    def refusal(rank: int, world: int) -> str:
        with pytest.raises(UserError) as refused:
            select_together(rank, world, SelectorCase(heads=3, **changed), "U1R2")
        return str(refused.value)

    assert all(said in one and "\n" not in one for one in ThreadRanks(2).run(refusal))
