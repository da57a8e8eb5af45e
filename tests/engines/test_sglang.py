"""SGLang Diffusion with db-SP: its own Wan on CPU ranks equals one process of it, where stock it rejects or is wrong.

Runs in an environment of its own: `scripts/engines test`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="run scripts/engines test")
from dbsp_engines.sglang import EXPECTED
from scripts.checks.engines.commands import differences, generate
from scripts.checks.engines.runs import Case, run
from tests.engines.cases import (
    EVEN,
    KNOWN,
    PREDICTED,
    SPLITS,
    UNEQUAL,
    assert_another_mask_is_seen,
    assert_equal_to_one_process,
    assert_exact,
)

ENGINE = "sglang"


@pytest.mark.parametrize(("ulysses", "ring"), SPLITS)
def test_it_equals_one_process(ulysses, ring):
    assert_equal_to_one_process(ENGINE, ulysses, ring)


def test_on_one_rank_too():
    case = Case(3, (UNEQUAL,), KNOWN)
    assert_exact([case], run(ENGINE, 1, 1, case))


def test_another_mask_would_be_seen():
    assert_another_mask_is_seen(ENGINE)


def test_whole_frames_on_each_rank_and_compiled():
    cases = Case(3, ((4, 5, 5),), KNOWN, frames=True), Case(3, (UNEQUAL,), PREDICTED, compiled=True)
    assert_exact(cases, run(ENGINE, 1, 2, *cases))


def test_cfg_passes_on_ranks_of_their_own():
    case = Case(3, (UNEQUAL,), PREDICTED, passes=2, cfg_parallel=True)
    assert_exact([case], run(ENGINE, 4, 1, case))


def test_its_own_command_makes_the_video_of_one_process(tmp_path):
    found = differences(ENGINE, tmp_path)
    assert found["ring"] < found["dense"] / 10


def test_what_is_not_its_own_wan_stops_the_worker_in_one_line(tmp_path):
    with pytest.raises(
        RuntimeError, match="UserError: db-SP serves SGLang's own Wan, and this is DiffusersPipeline; "
    ):
        generate(ENGINE, tmp_path, "rejected", 1, True, "--backend", "diffusers")


def test_what_sglang_rejects_or_computes_otherwise_without_it():
    heads, padded = run(ENGINE, 2, 1, Case(3, (EVEN,), None), Case(4, (UNEQUAL,), None))
    assert "must be divisible by world_size" in heads["rejected"]
    assert padded["error"] > 1e-3, "padding is attended to"
    (ring,) = run(ENGINE, 1, 2, Case(4, (UNEQUAL,), None))
    assert "requires a backend whose kernel exposes the softmax LSE" in ring["rejected"]


def test_nothing_changes_where_no_configuration_is_named():
    case = Case(4, (EVEN, UNEQUAL), None)
    assert run(ENGINE, 2, 1, case) == run(ENGINE, 2, 1, case, SGLANG_PLUGINS="none")


def test_the_names_that_it_uses_are_there():
    assert EXPECTED.problem() is None
