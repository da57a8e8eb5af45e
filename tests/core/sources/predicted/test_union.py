"""Unions of masks: what either keeps, at the pace of the faster one, identical bits on every number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dbsp_core.config import DbspConfig
from dbsp_core.sources import LocalQK, MaskRequest, SpargeSource, UnionSource, WindowSource, packed_mask
from dbsp_core.sources.spec import mask_in_words, mask_settings
from dbsp_core.utils.errors import UserError
from tests.core.sources.predicted.sparge_cases import predict_together
from tests.core.sources.predicted.union_cases import (
    APART,
    BAND,
    PREDICTED,
    SOL,
    WINDOW,
    UnionCase,
    joined,
    parts_alone,
    run_session,
)
from tests.support.workers import WorkerError

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
WAYS = [(2, "U2R1"), (3, "U1R3"), (4, "U2R2")]


@pytest.mark.parametrize(
    ("name", "world", "strategy"),
    [*((name, *WAYS[place % 2]) for place, name in enumerate(CASES)), *((name, *WAYS[2]) for name in CASES)],
)
def test_attention_equals_the_oracle(threads, name, world, strategy):
    case = CASES[name]
    for difference, gained, by_step in threads(world).run(run_session, case, strategy):
        assert difference <= 1e-5
        assert gained > 0.01, "no part may hold the others"
        assert by_step == ("depends_on=step" in case.mask or case.dense_first > 0)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", ["window and predicted", "nabla"])
def test_every_number_of_ranks_gives_identical_bits_and_plans(threads, name, world):
    nabla = UnionCase(mask="nabla:cdf=0.5,window=[1,1,1],block_q=16,block_k=8", thw=(3, 11, 13), batch=2)
    case = CASES.get(name, nabla)
    expected = case.source.mask(case.request, LocalQK.alone(*case.tensors()))
    layout = ("contiguous", "striped", "shuffled")[world % 3]
    answers = threads(world).run(predict_together, replace(case, layout=layout), f"U{world}R1")
    assert {mask for mask, _ in answers} == {expected.fingerprint}
    assert len({plan for _, plan in answers}) == 1


def test_it_keeps_what_either_keeps():
    for case in CASES.values():
        q, k = case.tensors()
        parts = parts_alone(case, case.request, q, k)
        source = case.source
        predicted = source.changes == "per_call"
        found = source.mask(case.request, LocalQK.alone(q, k)) if predicted else source.mask(case.request)
        assert torch.equal(found.bits, joined(parts, case.batch if predicted else 1).bits)
        assert 0 < found.density < 0.95


def test_packed_sequences_have_unions_of_their_own():
    case = UnionCase(thw=(2, 5, 6))
    q, k = case.tensors()
    grid = case.source.grid(case.request)
    both = LocalQK.alone(torch.cat([q, q], dim=2), torch.cat([k, k], dim=2))
    packed = packed_mask([(grid, case.source)] * 2, case.request, both)
    alone = case.source.mask(case.request, LocalQK.alone(q, k))
    assert [part.fingerprint for part in packed.parts] == [alone.fingerprint] * 2


def test_written_in_yaml_and_in_one_word_it_is_the_same():
    text = "window:tile=[1,8,8],shifted=false+sparge:cdf=0.9,token_order=tile:1x8x8"
    source = DbspConfig.load(text).mask
    predicted = SpargeSource(cdf=0.9, token_order="tile:1x8x8")
    assert source == UnionSource((WindowSource(tile=(1, 8, 8), shifted=False), predicted))
    values = DbspConfig.load(text).to_values()["mask"]
    assert values["source"] == "union"
    assert DbspConfig.load({"mask": values}).mask == source
    assert DbspConfig.load({"mask": mask_settings(mask_in_words(source))}).mask == source
    nested = {"source": "union", "of": [{"source": "dense"}, mask_settings(text)]}
    assert [type(part).__name__ for part in DbspConfig.load({"mask": nested}).mask.of] == [
        *("DenseSource", "WindowSource", "SpargeSource")
    ]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("window+sparge:block_q=128", "64×64 blocks in order thw and .* 128×64 blocks"),
        ("window:tile=[1,8,8]+sparge", "in order tile:1x8x8 and .* in order thw"),
        ("svg:temporal_heads=[0]+sparge", "in order hwt/thw and"),
        (
            "vsa+sparge:token_order=tile:4x4x4",
            "with smaller tiles at the far sides and .* blocks in order tile:4x4x4; ",
        ),
    ],
)
def test_blocks_that_differ_are_rejected_in_one_line(mask, message):
    with pytest.raises(ValueError, match=message) as caught:
        UnionCase(mask=mask).source.grid(MaskRequest(0, 2, (3, 8, 8)))
    assert "\n" not in str(caught.value)


def test_coarse_branch_of_one_part_is_kept_and_of_two_rejected():
    case = UnionCase(thw=(4, 8, 8))
    q, k = case.tensors()
    tokens = LocalQK.alone(q, k, v=k, gate=q)
    kept = UnionCase(mask="vsa+sol:token_order=tile:4x4x4").source.mask(case.request, tokens).coarse
    alone = UnionCase(mask="vsa+window:tile=[4,4,4]").source.of[0].mask(case.request, tokens).coarse
    assert kept is not None
    assert torch.equal(kept.coarse, alone.coarse)
    with pytest.raises(UserError, match="several masks of a union have a coarse branch; give all but one"):
        UnionCase(mask="vsa+vsa:sparsity=0.5").source.mask(case.request, tokens)


def test_a_part_that_fails_on_one_rank_fails_on_all(threads):
    case = UnionCase(mask=f"{PREDICTED}+{BAND}".replace("tests.support.user_masks:band", f"{__name__}:failing"))
    with pytest.raises(WorkerError) as caught:
        threads(2).run(predict_together, case, "U2R1")
    assert [kind for _, kind, _ in caught.value.errors] == ["UserError"] * 2
    assert all("no mask here" in text for _, _, text in caught.value.errors)


_calls: list[None] = []


def failing(grid, request):
    """At the first call, of whichever rank."""
    _calls.append(None)
    if len(_calls) == 1:
        raise ValueError("no mask here")
    return torch.ones(grid.nq, grid.nk, dtype=torch.bool)
