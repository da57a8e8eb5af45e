"""SGLang Diffusion with db-SP: its models on CPU ranks equal one process of them, where stock it rejects or is wrong.

Runs in an environment of its own: `scripts/engines test`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="run scripts/engines test")
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum

from dbsp_core.utils.errors import UserError
from dbsp_engines.sglang import EXPECTED, _kernels_of_h3
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
    own_masks,
)

ENGINE = "sglang"


@pytest.mark.parametrize(("ulysses", "ring"), SPLITS)
def test_it_equals_one_process(ulysses, ring):
    assert_equal_to_one_process(ENGINE, ulysses, ring)


@pytest.mark.parametrize(("ulysses", "ring", "heads"), [(1, 2, 5), (2, 1, 4), (2, 2, 4)])
def test_minimax_h3(ulysses, ring, heads):
    """Text, audio and a first frame before the video; of 128 slots, the last of four ranks has padding alone."""
    cases = Case(heads, (UNEQUAL, EVEN), KNOWN, model="h3"), Case(heads, (UNEQUAL,), PREDICTED, model="h3_keyframe")
    assert_exact(cases, run(ENGINE, ulysses, ring, *cases))


def test_minimax_h3_runs_with_heads_that_its_ulysses_rejects(tmp_path):
    """SGLang has a ring of two, and db-SP's configuration says how they share 5 heads."""
    settings = tmp_path / "ulysses.yaml"
    settings.write_text(f"mask: {KNOWN}\nstrategy: U2R1\n", encoding="utf-8")
    case = Case(5, (UNEQUAL,), str(settings), model="h3")
    assert_exact([case], run(ENGINE, 1, 2, case))


def test_minimax_h3_with_more_than_a_softmax_is_rejected():
    sparse = SimpleNamespace(_resolved_attention_backend=AttentionBackendEnum.VIDEO_SPARSE_ATTN_H3)
    sparse._resolve_attention_backend_once = lambda: None
    with pytest.raises(UserError, match="gated branch in addition to its softmax; leave out --attention-backend"):
        _kernels_of_h3(sparse)
    linear = SimpleNamespace(_resolved_attention_backend=None, _resolve_attention_backend_once=lambda: None)
    linear.blocks = [SimpleNamespace(attn=SimpleNamespace(hybrid=object()))]
    with pytest.raises(UserError, match="linear attention in addition to its softmax"):
        _kernels_of_h3(linear)


def test_wan22s_transformers_with_masks_of_their_own(tmp_path):
    case = Case(3, (UNEQUAL,), own_masks(tmp_path), pair=True)
    assert_exact([case], run(ENGINE, 1, 2, case))


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
    supported = "db-SP supports SGLang's own Wan and MiniMax-H3"
    with pytest.raises(RuntimeError, match=f"UserError: {supported}, and this is DiffusersPipeline; "):
        generate(ENGINE, tmp_path, "rejected", 1, True, "--backend", "diffusers")


def test_what_sglang_rejects_or_computes_otherwise_without_it():
    h3 = Case(3, (UNEQUAL,), None, model="h3")
    heads, padded, heads_of_h3 = run(ENGINE, 2, 1, Case(3, (EVEN,), None), Case(4, (UNEQUAL,), None), h3)
    assert "must be divisible by world_size" in heads["rejected"]
    assert padded["error"] > 1e-3, "padding is attended to"
    assert "TP-local heads 3 must be divisible by Ulysses size 2" in heads_of_h3["rejected"]
    ring, ring_of_h3 = run(ENGINE, 1, 2, Case(4, (UNEQUAL,), None), h3)
    assert "requires a backend whose kernel exposes the softmax LSE" in ring["rejected"]
    assert "ring parallelism requires the FlashAttention backend" in ring_of_h3["rejected"]


def test_nothing_changes_where_no_configuration_is_named():
    case = Case(4, (EVEN, UNEQUAL), None)
    assert run(ENGINE, 2, 1, case) == run(ENGINE, 2, 1, case, SGLANG_PLUGINS="none")


def test_the_names_that_it_uses_are_there():
    assert EXPECTED.problem() is None
