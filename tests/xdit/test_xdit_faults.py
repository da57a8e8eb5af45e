"""dbsp_xdit and what does not work: one clear line on every rank before any collective, and a pipe that goes on."""

from __future__ import annotations

import numpy as np
import pytest

from dbsp_cli.tiny_models import make_tiny
from dbsp_core import BlockGrid, BlockMask
from dbsp_core.masks.mask_writer import save_mask
from tests.xdit.xdit_cases import PipelineCase, start_xfuser
from tests.xdit.xdit_fault_cases import (
    attach_error,
    fail_then_generate,
    kept_forward,
    run_until_error,
)

TOLERANCE = 1e-5
BY_STEP = {
    "source": "callable",
    "function": "tests.support.user_masks:band",
    "depends_on": "step",
    "block_q": 8,
    "block_k": 8,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny("cogvideox", tmp_path_factory.mktemp("faults") / "cogvideox"))


def assert_identical(messages, expected):
    assert len(set(messages)) == 1, messages
    assert expected in messages[0]
    assert "\n" not in messages[0]


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("by diffusers", {}, "parallelized by diffusers (enable_parallelism)"),
        ("by para-attn", {}, "parallelized already"),
        ("unknown", {}, "does not know Identity; it knows WanTransformer3DModel, "),
        ("unknown of xfuser", {}, "does not know xFuserStrangeTransformer3DWrapper"),
        ("cached before", {}, "attach db-SP before step caches"),
        ("wrapper", {"kernel": "sparge", "strategy": "U1R2"}, "kernel 'sparge' does not support this plan"),
        ("stock", {"kernel": "sparge", "strategy": "U1R2"}, "kernel 'sparge' does not support this plan"),
        ("wrapper", {"strategy": "U3R1"}, "strategy U3R1 needs 3 GPUs"),
        ("stock", {"mask": {"source": "windwo"}}, "unknown mask source 'windwo'"),
    ],
)
def test_attach_rejects_on_all_ranks_before_any_collective(pool, kind, config, expected):
    if kind == "by para-attn":
        pytest.importorskip("para_attn")
    workers = pool(2)
    workers.run(start_xfuser)
    assert_identical(workers.run(attach_error, kind, config), expected)


def test_guidance_in_parallel_without_a_pipeline_that_has_it_is_rejected(pool):
    workers = pool(2)
    workers.run(start_xfuser, 2)
    for kind in ("stock", "wrapper", "cogvideox"):
        assert_identical(
            workers.run(attach_error, kind, {}),
            "use_cfg_parallel: SimpleNamespace does not run the two CFG passes",
        )
    workers.run(start_xfuser)


def test_size_that_the_mask_rejects_is_an_error_on_all_ranks(pool, tmp_path):
    grid = BlockGrid.uniform(64, block=16)
    save_mask(tmp_path / "masks.safetensors", [BlockMask(np.ones((6, grid.nq, grid.nk), dtype=bool), grid)] * 2)
    workers = pool(2)
    workers.run(start_xfuser)
    config = {"mask": {"source": "file", "path": str(tmp_path / "masks.safetensors")}, "strategy": "U1R2"}
    assert_identical(workers.run(run_until_error, "cogvideox", config), "64")


def test_cache_that_outlives_detach_calls_xfusers_own_forward(pool):
    workers = pool(2)
    workers.run(start_xfuser)
    assert workers.run(kept_forward) == [(True, True)] * 2


@pytest.mark.parametrize(
    ("own", "where"), [(True, "in a layer"), pytest.param(False, "between steps", marks=pytest.mark.long)]
)
def test_generation_after_a_failed_one_equals_one_process(pool, tiny, own, where):
    """Its masks are by step: a step counted on from the one that failed would have another."""
    workers = pool(2)
    workers.run(start_xfuser)
    case = PipelineCase(tiny, {"mask": BY_STEP, "strategy": "U1R2"}, height=64, own=own)
    assert all(difference <= TOLERANCE for difference in workers.run(fail_then_generate, case, where))
