"""Sessions with keys in chunks, all or needed: exact while masks change."""

from __future__ import annotations

import pytest

from dbsp_core import BlockGrid, BlockMask, make_plan
from dbsp_core.config import DbspConfig
from dbsp_core.utils.errors import SettingError, UserError
from tests.core.runtime.session_cases import (
    needed_keys_of_growing_masks,
    predicted_masks_with_keys,
    training_with_keys_in_chunks,
)


@pytest.mark.parametrize("strategy", ["U1R4", "U2R2", "U4R1"])
def test_a_mask_that_grew_beyond_what_is_sent_gets_a_new_plan(threads, strategy):
    for worst, plans, by_need in threads(4).run(needed_keys_of_growing_masks, strategy, "needed", True):
        assert worst <= 1e-5
        assert all(by_need)
        assert 2 < plans <= 8, "one for each mask that needs more, and no more than that"


def test_it_is_wrong_where_that_is_not_heeded(pool):
    for worst, _, _ in pool(4).run(needed_keys_of_growing_masks, "U1R4", "needed", False):
        assert worst > 1e-3


def test_where_all_keys_come_a_plan_is_kept(threads):
    for worst, plans, by_need in threads(4).run(needed_keys_of_growing_masks, "U1R4", "all", True):
        assert (worst <= 1e-5, plans, by_need) == (True, 1, [False, False])


@pytest.mark.parametrize("keys", ["all", "needed"])
@pytest.mark.parametrize("strategy", ["U1R4", "U2R2"])
def test_gradients_flow(threads, strategy, keys):
    assert all(threads(4).run(training_with_keys_in_chunks, strategy, keys))


@pytest.mark.parametrize("strategy", ["U1R4", "U2R2"])
def test_masks_predicted_at_every_call(pool, strategy):
    for worst, names in pool(4).run(predicted_masks_with_keys, strategy, "all"):
        assert worst <= 1e-5
        assert names == {"all"}


class TestBadInput:
    def test_masks_predicted_from_queries_and_keys(self):
        refusal = "keys: needed is for masks that are known beforehand.*leave keys out"
        with pytest.raises(SettingError, match=refusal):
            DbspConfig.load({"mask": {"source": "sparge", "cdf": 0.9}, "keys": "needed"})

    def test_an_unknown_way(self):
        with pytest.raises(SettingError, match="keys"):
            DbspConfig.load({"keys": "fetch"})

    @pytest.mark.parametrize("keys", ["kept", "auto", "ring"])
    def test_removed_values_name_what_to_write(self, keys):
        with pytest.raises(SettingError, match=f"keys: {keys} was removed; .*(all|leave it out)") as refused:
            DbspConfig.load({"mask": {"source": "sparge", "cdf": 0.9}, "keys": keys})
        assert refused.value.path == ("keys",)
        mask = BlockMask.dense(2, BlockGrid.uniform(64, 16))
        with pytest.raises(UserError, match=f"keys: {keys} was removed"):
            make_plan(mask, "U1R2", keys=keys)
