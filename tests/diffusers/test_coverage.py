"""After `enable`, an attention that db-SP does not compute is an error on every rank, whatever took it away."""

from __future__ import annotations

import pytest

from tests.diffusers.coverage_cases import (
    CHANGES,
    LORA_TARGETS,
    callback_fails_on_one,
    changed,
    exchanged,
    hooks_removed,
    layer_skip,
    lora_after_enable,
    skipped_on_one,
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


@pytest.mark.parametrize("strategy", ["U2R1", "U1R2"])
def test_block_skipped_on_one_rank_raises_on_all_ranks(pool, strategy):
    (first, *later), (waiting, *broken) = pool(2).run(skipped_on_one, strategy, "block")
    assert first.startswith("UserError: 1 of 2 self-attentions did not reach db-SP, blocks.1.attn1")
    assert waiting.startswith("UserError: rank(s) [0]: 1 of 2 self-attentions did not reach db-SP, blocks.1.attn1")
    for (said,) in (later, broken):
        assert said.startswith(
            "CommunicationError: communication between the ranks of the sequence broke off; restart"
        )


def test_error_of_another_kind_on_one_rank_ends_the_wait_of_the_others(pool):
    (first, _), (waiting, _) = pool(2).run(skipped_on_one, "U2R1", "raises")
    assert first == "RuntimeError: out of memory on one rank"
    assert waiting.startswith("CommunicationError: ")
    assert "out of memory on one rank" in waiting


def test_callback_that_fails_on_one_rank_ends_the_wait_of_the_others(pool, folder):
    (first,), (waiting,) = pool(2).run(callback_fails_on_one, folder)
    assert first == "ValueError: no room for a preview"
    assert waiting.startswith("CommunicationError: ")
    assert "no room for a preview" in waiting


@pytest.mark.parametrize("everywhere", [True, False])
def test_exchanged_transformer_raises_on_all_ranks(pool, folder, everywhere):
    for first, second in pool(2).run(exchanged, folder, everywhere):
        assert "another transformer was put into the pipeline after db-SP was enabled on it" in first
        assert second == "nothing"


@pytest.mark.parametrize("targets", LORA_TARGETS)
def test_lora_after_enable_equals_one_process(pool, targets):
    for found in pool(2).run(lora_after_enable, targets):
        assert max(found) <= TOLERANCE, found


def test_layer_skip_of_diffusers_is_no_error(pool):
    for difference, whole in pool(2).run(layer_skip):
        assert difference <= TOLERANCE
        assert whole > 1e-3
