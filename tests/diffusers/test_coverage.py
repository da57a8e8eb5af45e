"""After `enable`, an attention that db-SP does not compute is an error, for any change that took it away."""

from __future__ import annotations

import pytest

from tests.diffusers.coverage_cases import (
    CHANGES,
    LORA_TARGETS,
    changed,
    exchanged,
    failed_on_all,
    hooks_removed,
    layer_skip,
    lora_after_enable,
)

TOLERANCE = 1e-5
SAID = {
    "other attention": "blocks.1.attn1 was put into the WanTransformer3DModel after db-SP was enabled on it",
    "other block": "blocks.0.attn1 was put into the WanTransformer3DModel after db-SP was enabled on it",
    "appended block": "blocks.2.attn1 was put into the WanTransformer3DModel after db-SP was enabled on it",
    "forward reset": "db-SP no longer computes the attention of blocks.1.attn1: an offload hook",
    "forward replaced": "1 of 2 self-attentions did not reach db-SP, blocks.1.attn1: an offload hook",
    "block skipped": "1 of 2 self-attentions did not reach db-SP, blocks.1.attn1: an offload hook",
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_layer_after_enable_raises_on_all_ranks(pool, change):
    for said, difference in pool(2).run(changed, change):
        assert said.startswith(f"UserError: {SAID[change]}"), said
        assert difference <= TOLERANCE


def test_offload_hooks_removed_after_enable_leave_attention_with_db_sp(pool):
    for found in pool(2).run(hooks_removed):
        assert max(found) <= TOLERANCE


@pytest.mark.parametrize("guidance", [False, True])
def test_inputs_are_compared_in_the_pass_after_a_failed_one(pool, guidance):
    for said, compared in pool(2).run(failed_on_all, guidance):
        assert said == "RuntimeError: out of memory"
        assert compared == [True, True, False, True, False]


@pytest.mark.parametrize("everywhere", [True, False])
def test_exchanged_transformer_raises_on_all_ranks(pool, folder, everywhere):
    for first, *others in pool(2).run(exchanged, folder, everywhere):
        assert "another transformer was put into the pipeline after db-SP was enabled on it" in first
        assert others == ["nothing", "nothing"]


@pytest.mark.parametrize("targets", LORA_TARGETS)
def test_lora_after_enable_equals_one_process(pool, targets):
    for found in pool(2).run(lora_after_enable, targets):
        assert max(found) <= TOLERANCE, found


def test_layer_skip_of_diffusers_is_no_error(pool):
    for difference, whole in pool(2).run(layer_skip):
        assert difference <= TOLERANCE
        assert whole > 1e-3
