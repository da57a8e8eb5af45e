"""Sessions with keys in chunks, all or needed: exact while masks change, and chosen where predicted to be faster."""

from __future__ import annotations

import re
import threading
from unittest import mock

import pytest

from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.hardware import SHIPPED
from dbsp_core.runtime.added_keys import AddedKeys
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.utils.errors import SettingError, UserError
from tests.core.runtime.session_cases import (
    kept_keys,
    needed_keys_of_growing_masks,
    predicted_masks_with_keys,
    training_with_keys_in_chunks,
    way_of_keys,
)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("strategy", ["U1R4", "U2R2", "U4R1"])
def test_a_mask_that_grew_beyond_what_is_sent_gets_a_new_plan(threads, strategy, mode):
    for worst, plans, by_need in threads(4).run(needed_keys_of_growing_masks, strategy, "needed", mode, True):
        assert worst <= 1e-5
        assert all(by_need)
        assert 2 < plans <= 8, "one for each mask that needs more, and no more than that"


def test_it_is_wrong_where_that_is_not_heeded(pool):
    for worst, _, _ in pool(4).run(needed_keys_of_growing_masks, "U1R4", "needed", "sync", False):
        assert worst > 1e-3


@pytest.mark.parametrize("keys", ["ring", "all", "kept"])
def test_where_all_keys_come_a_plan_is_kept(threads, keys):
    for worst, plans, by_need in threads(4).run(needed_keys_of_growing_masks, "U1R4", keys, "sync", True):
        assert (worst <= 1e-5, plans, by_need) == (True, 1, [False, False])


@pytest.mark.parametrize("keys", ["all", "needed", "kept"])
@pytest.mark.parametrize("strategy", ["U1R4", "U2R2"])
def test_gradients_flow(threads, strategy, keys):
    assert all(threads(4).run(training_with_keys_in_chunks, strategy, keys))


@pytest.mark.parametrize(("strategy", "keys"), [("U1R4", "all"), ("U2R2", "kept"), ("U1R4", "auto")])
def test_masks_predicted_at_every_call(pool, tmp_path, strategy, keys):
    for worst, names in pool(4).run(predicted_masks_with_keys, strategy, keys, _machine(tmp_path, 1e7)):
        assert worst <= 1e-5
        assert names == {keys} if keys != "auto" else names <= {"all", "kept"}


SIZES = [(1, 0)] * 3 + [(2, 0), (1, 7), (1, 0)]


class TestKept:
    @pytest.mark.parametrize(
        ("strategy", "mode", "drift"),
        [("U1R4", "async", 0.02), ("U2R2", "async", 0.002), ("U4R1", "async", 0.2), ("U2R2", "sync", 0.02)],
    )
    def test_exact_while_masks_drift_and_sizes_change(self, threads, strategy, mode, drift):
        answers = threads(4).run(kept_keys, strategy, mode, drift, SIZES)
        assert all(worst <= 1e-5 for worst, *_ in answers)
        assert all(answer[2] == answers[0][2] for answer in answers), "all ranks keep the same keys"

    @pytest.mark.parametrize("mode", ["sync", "async"])
    def test_keys_are_renewed_where_masks_drift_and_plans_are_not(self, threads, mode):
        for drift, renewed in ((0.0, False), (0.1, True)):
            for _, plans, prints, _ in threads(4).run(kept_keys, "U1R4", mode, drift, SIZES[:3]):
                assert plans == 2 * 2, "one for each layer and pass"
                assert (len(set(map(tuple, prints))) > 1) == renewed

    def test_renewed_keys_stay_within_the_limit_of_memory(self, threads):
        for limit, ahead in (("1GB", False), ("10KB", True)):
            for worst, _, _, found in threads(4).run(kept_keys, "U1R4", "async", 0.1, SIZES[:2], limit):
                assert (worst <= 1e-5, found) == (True, {ahead})

    def test_it_is_wrong_where_nothing_is_added(self, threads):
        with mock.patch.object(AddedKeys, "period", None):
            answers = threads(4).run(kept_keys, "U1R4", "async", 0.02, SIZES[:3])
        assert max(worst for worst, *_ in answers) > 1e-3

    def test_only_the_planning_thread_makes_routes_of_renewed_keys(self, threads):
        made = []

        def of(*args, of=RankPlan.of):
            made.append(threading.current_thread().name)
            return of(*args)

        with mock.patch.object(RankPlan, "of", of):
            threads(4).run(kept_keys, "U1R4", "async", 0.1, SIZES[:3])
        attentions = 4 * 2 * 2
        assert sum(name != "dbsp-planning" for name in made) == attentions, "the first plan of each"
        assert len(made) > attentions


class TestAuto:
    def test_keys_by_need_between_nodes_and_not_where_links_are_fast(self, pool, tmp_path):
        far, near = ({"cost_model": _machine(tmp_path, rate)} for rate in (1e7, 1e15))
        for machine, nodes, by_need, layout in ((far, 2, True, "local"), (near, 1, False, "striped")):
            told = [f"layout {layout}, predicted to be fastest with keys: auto"]
            expected = [("U1R4", by_need, told), *[("U1R4", by_need, [])] * 3]
            assert pool(4).run(way_of_keys, machine, nodes) == expected

    def test_with_the_strategy(self, pool, tmp_path):
        strategy = {"strategy": "auto", "cost_model": _machine(tmp_path, 1e7)}
        answers = pool(4).run(way_of_keys, strategy, 2)
        assert [answer[:2] for answer in answers] == [answers[0][:2]] * 4
        assert answers[0][1]

    def test_all_keys_travel_under_predicted_masks(self):
        config = DbspConfig.load({"mask": {"source": "sparge", "cdf": 0.9}, "keys": "auto"})
        assert [way.name for way in config.key_ways] == ["ring", "all", "kept"]
        assert [way.name for way in DbspConfig.load({"keys": "auto"}).key_ways] == ["ring", "all", "needed"]


def _machine(folder, network) -> str:
    """The shipped one with another network between its nodes; one node's links are as fast as the network is meant to.

    Where that is very fast only packing takes time, of which needed keys ask for more.
    """
    text = (SHIPPED / "h200.yaml").read_text()
    constants = {"network_bytes_per_s": network, "exchange_bytes_per_s": 1e15, "p2p_bytes_per_s": 1e15}
    if network > 1e12:
        latencies = ("exchange_latency_s", "p2p_latency_s", "network_latency_s", "launch_s")
        constants |= dict.fromkeys(("flops_per_s", "merge_bytes_per_s"), 1e18) | dict.fromkeys(latencies, 0.0)
    for name, value in constants.items():
        text, found = re.subn(rf"^  {name}: [0-9.e+-]+$", f"  {name}: {value:.1e}", text, flags=re.MULTILINE)
        assert found == 1
    file = folder / f"machine-{network:g}.yaml"
    file.write_text(text)
    return str(file)


class TestBadInput:
    def test_masks_predicted_from_queries_and_keys(self):
        refusal = "keys: needed is for masks that are known beforehand.*use keys: kept, all"
        with pytest.raises(SettingError, match=refusal):
            DbspConfig.load({"mask": {"source": "sparge", "cdf": 0.9}, "keys": "needed"})

    def test_kept_keys_with_a_kernel_that_cannot_merge(self):
        sparge = {"mask": {"source": "sparge", "cdf": 0.9}, "kernel": "sparge"}
        with pytest.raises(UserError, match="log-sum-exp"):
            DbspConfig.load({**sparge, "keys": "kept"})
        assert "kept" not in [way.name for way in DbspConfig.load({**sparge, "keys": "auto"}).key_ways]

    def test_an_unknown_way(self):
        with pytest.raises(SettingError, match="keys"):
            DbspConfig.load({"keys": "fetch"})
