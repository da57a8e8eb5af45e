"""Redistribution of tokens: forth, back, bytes and gradients."""

from __future__ import annotations

import pytest

from dbsp_core import Redistribution, SequenceGroup, SequenceLayout
from dbsp_core.utils.errors import UserError
from tests.core.sequences.packed_cases import redistribute_wrongly, run_redistribution
from tests.support.workers import assert_all_raise


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_round_trips_are_bitwise_and_bytes_are_counted(pool, world, seed):
    for rank, found in enumerate(pool(world).run(run_redistribution, seed)):
        assert found["there"]
        assert found["round trip"]
        assert found["gradient"]
        assert found["exchanges"] == 5, "one each there and back, one of gradients, and two to compare with"
        assert [sum(one) - one[rank] for one in found["bytes"]] == list(found["said"]) == found["moved"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("slots", "dimension 0"),
        ("dtype", "differ on rank(s) [1]"),
        ("layouts", "layouts of a redistribution differ"),
        ("debug", "debug differs on rank(s) [1]"),
    ],
)
def test_difference_on_one_rank_raises_on_all(pool, fault, message):
    assert_all_raise(pool, 3, message, redistribute_wrongly, fault, 1)


def test_layouts_that_do_not_fit():
    alone = SequenceGroup(0, 1)
    source = SequenceLayout.whole_sequences([5, 3], [0, 0], 1)
    with pytest.raises(UserError, match="8 tokens on 1; make source and target from the same sequences"):
        Redistribution.between(source, SequenceLayout.contiguous(9, 1), alone)
    with pytest.raises(UserError, match="on 2 ranks does not fit 8 tokens on 1"):
        Redistribution.between(SequenceLayout.contiguous(8, 2), SequenceLayout.contiguous(8, 2), alone)
    with pytest.raises(UserError, match="has 7 slots, expected 8 to 8"):
        Redistribution.between(source, SequenceLayout.contiguous(8, 1), alone, source_slots=7)
    with pytest.raises(UserError, match="at least one tensor"):
        Redistribution.between(source, SequenceLayout.contiguous(8, 1), alone).there()
