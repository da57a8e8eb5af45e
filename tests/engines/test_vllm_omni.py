"""vLLM-Omni with backend DBSP: its own models on CPU ranks equal one process of them, where stock rejects or is wrong.

Runs in an environment of its own: `scripts/engines test`.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm_omni", reason="run scripts/engines test")
from dbsp_engines.vllm_omni_plugin import EXPECTED, register, unregister
from scripts.checks.engines.commands import differences
from scripts.checks.engines.runs import LAYERS, STEPS, Case, run
from tests.engines.cases import (
    EVEN,
    KNOWN,
    SPLITS,
    UNEQUAL,
    assert_another_mask_is_seen,
    assert_equal_to_one_process,
    assert_exact,
)

ENGINE = "vllm_omni"
PREDICTED = "sparge:cdf=0.35,similarity=-1,block_q=16,block_k=8"
IMAGES = ((1, 5, 15), (1, 6, 12))
UNCACHED = 2 * LAYERS * STEPS
"""Attentions of two CFG passes a step."""


@pytest.mark.parametrize(("ulysses", "ring"), SPLITS)
def test_it_equals_one_process(ulysses, ring):
    found = assert_equal_to_one_process(ENGINE, ulysses, ring)
    assert found[1]["padding"] == -75 % (ulysses * ring), "75 tokens do not divide by the ranks"


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), *SPLITS])
def test_models_whose_ranks_all_have_the_text(ulysses, ring):
    """3 and 5 heads, two sizes one after another, padding of text in the last two models, which is no key."""
    cases = (
        Case(3, IMAGES, KNOWN, model="flux2"),
        Case(5, IMAGES, PREDICTED, passes=2, model="flux2"),
        Case(3, IMAGES, PREDICTED, model="qwen_image"),
        Case(5, IMAGES, PREDICTED, passes=2, model="qwen_image"),
        Case(5, (UNEQUAL, EVEN), KNOWN, model="hunyuan_video_15"),
        Case(3, (UNEQUAL, EVEN), PREDICTED, passes=2, model="hunyuan_video_15"),
    )
    assert_exact(cases, run(ENGINE, ulysses, ring, *cases))


@pytest.mark.parametrize(("ulysses", "ring", "heads"), [(1, 1, 3), (1, 2, 5), (2, 1, 4), (2, 2, 4)])
def test_minimax_h3(ulysses, ring, heads):
    """Text and audio before the video, and references; of 128 places, the last of four ranks has padding alone."""
    cases = (
        Case(heads, (UNEQUAL, EVEN), KNOWN, model="h3"),
        Case(heads, (UNEQUAL,), PREDICTED, model="h3_references"),
    )
    assert_exact(cases, run(ENGINE, ulysses, ring, *cases))


def test_on_one_rank_too():
    case = Case(3, (UNEQUAL,), KNOWN)
    assert_exact([case], run(ENGINE, 1, 1, case))


def test_another_mask_would_be_seen():
    assert_another_mask_is_seen(ENGINE)


def test_its_own_entry_makes_the_frames_of_one_process(tmp_path):
    found = differences(ENGINE, tmp_path)
    assert found["ring"] < 1e-2, "of 255, in float32"
    assert found["dense"] > 1


def test_what_vllm_omni_rejects_or_computes_otherwise_without_it():
    heads, padded = run(ENGINE, 2, 1, Case(3, (EVEN,), None), Case(4, (UNEQUAL,), None))
    assert "strict mode" in heads["rejected"]
    assert padded["error"] > 1e-3, "padding is attended to"
    (ring,) = run(ENGINE, 1, 2, Case(4, (UNEQUAL,), None))
    assert "Cannot use Ring attention which does not support attention_mask" in ring["rejected"]


def test_step_caches_skip_on_all_ranks_or_on_none():
    """cache-dit: all would skip, and one would; TeaCache: what has changed is on rank 1, and counts or does not."""
    dit = Case(3, (UNEQUAL,), KNOWN, passes=2, cache="cache_dit", model="hunyuan_video_15")
    unlike = Case(3, (UNEQUAL,), KNOWN, passes=2, cache="cache_dit", unlike=True, model="hunyuan_video_15")
    tea = [
        Case(3, IMAGES[:1], KNOWN, cache="tea_cache", cache_options={"rel_l1_thresh": most}, model="qwen_image")
        for most in (0.5, 100.0)
    ]
    found = run(ENGINE, 2, 1, dit, unlike, *tea)
    assert all(one.get("error", 1) <= 1e-5 for one in found), found
    skipped, *others = [one["calls"] for one in found]
    assert skipped < UNCACHED
    assert others == [UNCACHED, LAYERS * STEPS, LAYERS]


def test_a_step_cache_that_is_not_known_is_rejected_on_several_ranks():
    (found,) = run(ENGINE, 2, 1, Case(3, (EVEN,), KNOWN, cache="step_cache"))
    assert "does not know whether cache_backend step_cache skips the same layers" in found["rejected"]


def test_compiled_by_blocks_it_is_the_same_and_compiles_once():
    case = Case(3, (UNEQUAL,), KNOWN, compiled=True)
    found = run(ENGINE, 2, 1, case)
    assert_exact([case], found)
    first, *later = found[0]["graphs"]
    assert first > 0
    assert set(later) == {first}, "no step compiles anything anew"


def test_nothing_changes_where_dbsp_is_not_named():
    case = Case(4, (EVEN, UNEQUAL), None)
    assert run(ENGINE, 2, 1, case) == run(ENGINE, 2, 1, case, VLLM_PLUGINS="cpu")


def test_outside_a_denoising_its_split_is_its_own_and_wrappers_come_off(monkeypatch):
    from vllm_omni.diffusion.distributed import parallel_state
    from vllm_omni.diffusion.hooks.sequence_parallel import SequenceParallelSplitHook

    monkeypatch.setattr(parallel_state, "get_sequence_parallel_world_size", lambda: 1)
    stock, tokens = SequenceParallelSplitHook._shard_with_auto_pad, torch.zeros(1, 75)
    register()
    try:
        assert SequenceParallelSplitHook._shard_with_auto_pad is not stock
        assert SequenceParallelSplitHook({}, None)._shard_with_auto_pad(tokens, 1, None) is tokens
    finally:
        unregister()
    assert SequenceParallelSplitHook._shard_with_auto_pad is stock


def test_the_names_that_it_uses_are_there():
    assert EXPECTED.problem() is None
