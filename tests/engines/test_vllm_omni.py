"""vLLM-Omni with backend DBSP: its own Wan on CPU ranks equals one process of it, where stock it refuses or is wrong.

Runs in an environment of its own: `scripts/engines test`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_omni", reason="run scripts/engines test")
from scripts.checks.engines.runs import Case, run
from tests.engines.cases import (
    EVEN,
    KNOWN,
    SPLITS,
    UNEVEN,
    assert_another_mask_is_seen,
    assert_equal_to_one_process,
    assert_exact,
    assert_names_found,
    served_lines,
)

ENGINE = "vllm_omni"


@pytest.mark.parametrize(("ulysses", "ring"), SPLITS)
def test_it_equals_one_process(ulysses, ring):
    found = assert_equal_to_one_process(ENGINE, ulysses, ring)
    assert found[1]["padding"] == -75 % (ulysses * ring), "75 tokens do not divide by the ranks"


def test_on_one_rank_too():
    case = Case(3, (UNEVEN,), KNOWN)
    assert_exact([case], run(ENGINE, 1, 1, case))


def test_another_mask_would_be_seen():
    assert_another_mask_is_seen(ENGINE)


def test_what_vllm_omni_refuses_or_computes_otherwise_without_it():
    heads, padded = run(ENGINE, 2, 1, Case(3, (EVEN,), None), Case(4, (UNEVEN,), None))
    assert "strict mode" in heads["refused"]
    assert padded["error"] > 1e-3, "padding is attended to"
    (ring,) = run(ENGINE, 1, 2, Case(4, (UNEVEN,), None))
    assert "Cannot use Ring attention which does not support attention_mask" in ring["refused"]


def test_a_step_cache_is_refused_on_several_ranks():
    (found,) = run(ENGINE, 2, 1, Case(3, (EVEN,), KNOWN, cache="tea_cache"))
    assert "cache_backend tea_cache decides by the tokens of one rank" in found["refused"]


def test_nothing_changes_where_dbsp_is_not_named():
    case = Case(4, (EVEN, UNEVEN), None)
    assert run(ENGINE, 2, 1, case) == run(ENGINE, 2, 1, case, VLLM_PLUGINS="cpu")


def test_the_names_that_it_uses_are_there():
    assert_names_found(ENGINE)


def test_lines_of_placements_pass_its_parser():
    from vllm_omni.entrypoints.cli.serve import OmniServeCommand
    from vllm_omni.utils.tracking_parser import TrackingArgumentParser

    parser = OmniServeCommand().subparser_init(TrackingArgumentParser().add_subparsers())
    for placement, line in served_lines("vLLM-Omni"):
        args = parser.parse_args(line[3:])
        assert (args.ulysses_degree, args.ring_degree) == (placement.strategy.ulysses, placement.strategy.ring)
        assert (args.cfg_parallel_size or 1) == placement.guidance
        assert (args.vae_patch_parallel_size or 1) == (placement.of_a_video if placement.vae else 1)
