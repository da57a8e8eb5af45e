"""A session through changes of batch, size, mask and settings: what it keeps is never used for something else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbsp_cli.mask_tools.info import MaskSeries, drift_of
from dbsp_core.config import DbspConfig
from dbsp_core.masks.steps import MOST_PASSES
from dbsp_core.runtime.session import MOST_SIZES
from dbsp_core.sources import DenseSource, SpargeSource, SyntheticSource, WindowSource
from dbsp_kernels import KERNELS
from tests.core.runtime.session_cases import (
    PREDICTED,
    Drifting,
    Growing,
    Unread,
    a_shard_that_does_not_fit,
    a_wrong_input,
    agreements,
    an_attention_that_breaks_off,
    an_executor_that_differs,
    computed_again_after_another_size,
    exchanges_before_the_first_attention,
    from_two_threads,
    gradients,
    run_passes,
    settings_on_one_rank,
)
from tests.support.workers import assert_all_raise


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (WindowSource(), "needed"),
        (DenseSource(), "needed"),
        (SyntheticSource(), "needed"),
        (SyntheticSource(drift=0.02), "all"),
        (SpargeSource(cdf=0.9), "all"),
    ],
)
def test_masks_that_never_change_are_sent_the_keys_that_they_need(mask, keys):
    layouts = {planner: DbspConfig(mask=mask, planner=planner).layout for planner in ("dbsp", "paper")}
    assert DbspConfig(mask=mask).keys == keys
    assert layouts == {"dbsp": "contiguous" if keys == "needed" else "striped", "paper": "contiguous"}


def test_plan_with_all_keys_is_kept_for_growing_masks(threads):
    passes = [{"timestep": 900.0 - step} for step in range(8)]
    for found in threads(4).run(run_passes, {"mask": Growing(8, 8), "reuse": 9.0}, "U1R4", passes):
        assert (found.worst <= 1e-5, found.plans[-1], found.keys) == (True, 1, {"all"})


@pytest.mark.parametrize(("ragged", "keys"), [(True, "needed"), (False, "all")])
def test_keys_that_no_row_reads_are_sent_to_kernels_of_whole_heads(monkeypatch, threads, ragged, keys):
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], ragged_rows=ragged))
    settings = {"mask": Unread(16, 16), "kernel": "cpu"}
    for found in threads(5).run(run_passes, settings, "U5R1", [{"timestep": 900.0}], 1):
        assert (found.worst <= 1e-5, found.keys) == (True, {keys})


def test_layout_is_independent_of_the_kernel(monkeypatch):
    monkeypatch.setenv("DBSP_KERNEL", "sparge")
    config = DbspConfig(mask=WindowSource())
    assert (config.keys, config.layout) == ("all", "contiguous")


LAYERS = PASSES = 2
EVEN = 1.02
"""The masks here have plans of their own that are more even, and are less even under others'."""


def steps(count: int, passes: int = 1, **options: object) -> list[dict[str, object]]:
    """Returns arguments of `count` steps of `passes` passes each."""
    return [{"timestep": 900.0 - step} | options for step in range(count) for _ in range(passes)]


@pytest.mark.parametrize(
    ("strategy", "batches"), [("U2R1", [1, 1, 1, 2, 2, 1]), ("U1R2", [2, 2, 2, 1, 1, 2])], ids=["more", "fewer"]
)
def test_plan_for_another_batch_is_not_used(threads, strategy, batches):
    """Switches guidance on or off between calls of one size, after a plan for the old heads was made."""
    passes = [{"timestep": 900.0 - step, "batch": batch, "settle": True} for step, batch in enumerate(batches)]
    for found in threads(2).run(run_passes, PREDICTED | {"reuse": 1.0}, strategy, passes, 1):
        assert found.worst <= 1e-5
        assert found.plans[-1] > 2, "plans must have been waiting"


def test_static_mask_is_planned_once_however_imbalanced(threads):
    """Distributes five equal heads over two ranks: three and two, above P_s."""
    settings = {"mask": WindowSource(16, 16, window=(1, 3, 3)), "planner": "contiguous"}
    for found in threads(2).run(run_passes, settings, "U2R1", steps(3, PASSES)):
        assert (found.worst <= 1e-5, found.calls, found.plans[-1]) == (True, 3 * PASSES * LAYERS, 1)
    growing = {"mask": Growing(16, 16, most=1), "planner": "contiguous"}
    for found in threads(2).run(run_passes, growing, "U2R1", steps(9)):
        assert found.plans[-1] == 2, "one for each of the masks, which layers share"


class TestMasksThatChangeByStep:
    @pytest.mark.parametrize("slope", [0.0, 0.01])
    def test_plans_are_kept_from_step_to_step(self, threads, slope):
        for found in threads(2).run(run_passes, {"mask": Drifting(16, 16, slope=slope)}, "U2R1", steps(8, PASSES)):
            assert found.worst <= 1e-5
            assert found.calls == 8 * PASSES * LAYERS
            assert found.plans[-1] >= LAYERS * PASSES, "each attention has one of its own"
            assert found.plans[-1] <= LAYERS * PASSES * (1 if slope == 0 else 5), "and not one a step"
            assert found.kept == found.prepared == LAYERS * PASSES, "what steps behind had is dropped"

    def test_command_counts_as_many_plans_as_the_runtime_made(self, threads, tmp_path):
        settings = {"mask": Drifting(16, 16, slope=0.02), "record": str(tmp_path), "reuse": 1.10}
        made, same = (found.plans[-1] for found in threads(2).run(run_passes, settings, "U2R1", steps(12)))
        series = MaskSeries.read(tmp_path)
        replans = [drift_of(series, layer, "U2R1", "dbsp", 1.10).replans for layer in range(LAYERS)]
        assert sum(replans) == made == same
        assert LAYERS < made < 12 * LAYERS, "some plans are kept and some are not"

    def test_dense_steps_have_one_plan(self, threads):
        settings = {"mask": Drifting(16, 16), "dense_schedule": {"first_steps": 2, "last_steps": 2}}
        for found in threads(2).run(run_passes, settings, "U2R1", steps(9, PASSES)):
            assert (found.worst <= 1e-5, found.calls) == (True, 9 * PASSES * LAYERS)
            assert found.plans[-1] == LAYERS * PASSES + 1


def test_plans_of_passes_that_cannot_be_distinguished_are_limited(threads):
    for found in threads(2).run(run_passes, PREDICTED | {"reuse": 9.0}, "U2R1", steps(1, 3 * MOST_PASSES)):
        assert found.worst <= 1e-5
        assert found.plans[-1] == found.kept == found.prepared == LAYERS * MOST_PASSES, "kept by later generations"


class TestSizes:
    @pytest.mark.parametrize(
        "settings", [PREDICTED | {"reuse": 1.10}, {"mask": {"source": "window", "block_q": 16, "block_k": 16}}]
    )
    def test_alternating_sizes_keep_their_plans(self, threads, settings):
        passes = [one | {"text_tokens": text} for one in steps(4) for text in (7, 20)]
        for found in threads(2).run(run_passes, settings, "U2R1", passes, 1):
            assert (found.worst <= 1e-5, found.plans[-1]) == (True, 2)

    def test_videos_of_two_sizes_make_the_plans_of_each(self, threads):
        count = 6

        def made(*texts: int) -> list[int]:
            passes = [one for text in texts for one in steps(count, text_tokens=text, settle=True)]
            found = threads(2).run(run_passes, PREDICTED | {"reuse": EVEN}, "U2R1", passes)
            assert max(one.worst for one in found) <= 1e-5
            return found[0].plans[count - 1 :: count]

        one, other = made(7)[0], made(20)[0]
        assert made(7, 20, 7, 20)[:2] == [one, one + other]

    def test_cache_keys_of_dropped_sizes_are_dropped(self, threads):
        settings = {"mask": {"source": "callable", "function": "tests.support.user_masks:band", "depends_on": "step"}}
        passes = [{"timestep": 900.0, "text_tokens": text} for text in range(3 * MOST_SIZES)]
        assert [one.known for one in threads(2).run(run_passes, settings, "U2R1", passes, 1)] == [MOST_SIZES] * 2


class TestSettings:
    @pytest.mark.parametrize("odd", [0, 1])
    @pytest.mark.parametrize(
        "other",
        [{"mask": PREDICTED["mask"] | {"cdf": 0.9}}, {"precision": "int8"}, {"reuse": 1.3}, {"debug": True}],
    )
    def test_other_settings_on_one_rank_raise_on_all(self, threads, odd, other):
        settings = PREDICTED | other
        assert_all_raise(
            threads, 3, f"the settings differ on rank(s) [{odd}]", settings_on_one_rank, odd, settings, PREDICTED
        )

    @pytest.mark.parametrize("odd", [0, 1])
    def test_report_set_on_one_rank_is_made_by_all(self, pool, odd, tmp_path):
        asked = PREDICTED | {"report": str(tmp_path)}
        assert pool(2).run(settings_on_one_rank, odd, asked, PREDICTED) == [(str(tmp_path), True)] * 2


class TestInputs:
    @pytest.mark.parametrize(("odd", "debug"), [(0, False), (2, True)])
    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("batch", "or whether they need gradients, differ on rank(s) [{}]"),
            ("dtype", "or whether they need gradients, differ on rank(s) [{}]"),
            ("shard", "rank(s) [{}]: q of shape (1, 5, 59, 16) does not fit: the model has 5 heads, and the layout"),
            ("size", "differs on rank(s) [{}]"),
            ("scale", "the scale of the scores differs on rank(s) [{}]"),
            ("layer", "another layer's attention is reached on rank(s) [{}]"),
        ],
    )
    def test_input_that_differs_on_one_rank_raises_on_all(self, pool, fault, message, odd, debug):
        assert_all_raise(pool, 3, message.format(odd), a_wrong_input, odd, fault, debug)

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("pass", "the denoising step or CFG pass differs on rank(s) [1]"),
            ("mask", "the mask differs on rank(s) [1]"),
            ("version", "the version of torch differs on rank(s) [1]"),
        ],
    )
    def test_difference_that_debug_alone_finds_raises_at_the_first_attention(self, pool, fault, message):
        assert_all_raise(pool, 3, message, a_wrong_input, 1, fault, True)

    @pytest.mark.parametrize(
        ("when", "message"),
        [
            ("mask", "the mask differs on rank(s) [1]"),
            ("kernel", "rank(s) [1] selected a different attention kernel"),
            ("value", "rank(s) [1]: q, k or v has values that are not finite"),
        ],
    )
    def test_reused_executor_that_differs_raises_under_debug(self, pool, when, message):
        assert_all_raise(pool, 3, message, an_executor_that_differs, 1, when)

    def test_ranks_compare_numbers_as_rarely_as_possible(self, pool):
        """Expects one comparison at the first attention; under debug one per attention, and one per predicted mask."""
        static = {"source": "window", "window": [1, 3, 3], "block_q": 16, "block_k": 16}
        predicted = {"source": "sparge", "cdf": 0.6, "block_q": 16, "block_k": 16}
        workers = pool(2)
        assert workers.run(agreements, static, False) == [[1, 0, 0]] * 2
        assert workers.run(agreements, static, True) == [[1, 1, 1]] * 2
        assert workers.run(agreements, predicted, True) == [[2, 2, 2]] * 2

    @pytest.mark.parametrize(
        ("when", "message"),
        [("prepare", "rank(s) [1]: rank 1 holds 20 tokens, expected 32"), ("call", "rank(s) [1]: q of shape")],
    )
    def test_shard_that_does_not_fit_on_one_rank_raises_on_all(self, pool, when, message):
        assert_all_raise(pool, 3, message, a_shard_that_does_not_fit, 1, when)

    @pytest.mark.parametrize("world", [1, 2])
    def test_output_has_a_graph_only_if_inputs_need_gradients(self, threads, world):
        assert threads(world).run(gradients, False) == [False] * world
        assert threads(world).run(gradients, True) == [True] * world

    @pytest.mark.parametrize("debug", [False, True])
    def test_recomputation_after_a_pass_of_another_size_is_exact(self, threads, debug):
        assert threads(2).run(computed_again_after_another_size, debug) == [[0.0, 0.0]] * 2

    def test_two_threads_at_once_raise(self, pool):
        assert all("UserError: two threads use db-SP" in message for message in pool(2).run(from_two_threads))


@pytest.mark.parametrize("odd", [0, 2])
def test_plans_are_dropped_after_a_pass_that_ranks_left_at_different_calls(pool, odd):
    """Guards against decisions by the counts of different calls."""
    for calls, errors in pool(3).run(an_attention_that_breaks_off, odd):
        assert calls == 0, "as many calls as before the failure, since all plans were dropped"
        assert max(errors) <= 1e-5


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        ({"mask": {"source": "window", "block_q": 16, "block_k": 16}}, "U{}R1"),
        (PREDICTED, "U1R{}"),
        (PREDICTED, "auto"),
        (PREDICTED | {"machine": "a800"}, "auto"),
    ],
    ids=["static", "predicted", "auto", "auto, measured"],
)
def test_ranks_agree_twice_before_the_first_attention(pool, world, settings, strategy):
    """Expects one collective for making the session and one for the attention, none for making the control group."""
    for seen in pool(world).run(exchanges_before_the_first_attention, settings, strategy.format(world)):
        assert seen == ["all_gather"] * 2 + ["q"]
