"""FSDP2 and torchao before db-SP and after it, IP-Adapters, backends; tests/simulated has the others."""

from __future__ import annotations

import pytest
from diffusers.models.attention_dispatch import attention_backend

import dbsp_diffusers
from tests.diffusers.models.feature_cases import FEATURES, run_backends, run_feature, run_ip_adapter
from tests.support.models.tiny_transformers import make_tiny_transformer

TOLERANCE = 1e-5


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", FEATURES)
def test_feature_with_db_sp_equals_one_process(pool, name, first):
    if name.startswith("torchao"):
        pytest.importorskip("torchao")
    for from_one_process, effect, left in pool(2).run(run_feature, name, first):
        assert from_one_process <= TOLERANCE
        assert left <= TOLERANCE
        assert effect > 100 * TOLERANCE or name == "FSDP2", "the feature must matter"


def test_image_prompt_of_an_ip_adapter_equals_one_process(pool):
    for from_one_process, effect in pool(2).run(run_ip_adapter):
        assert from_one_process <= TOLERANCE
        assert effect > 1000 * TOLERANCE


def test_backend_set_before_disable_without_a_pass_is_kept():
    transformer = make_tiny_transformer("wan")
    dbsp_diffusers.enable(transformer, "dense")
    with attention_backend():  # else it would be that of all models of this process from now on
        transformer.set_attention_backend("_native_math")
    dbsp_diffusers.disable(transformer)
    attentions = [attention for block in transformer.blocks for attention in (block.attn1, block.attn2)]
    assert {attention.processor._attention_backend for attention in attentions} == {"_native_math"}


def test_backend_of_cross_attention_is_the_users_and_of_self_attention_native(pool):
    for orders in pool(2).run(run_backends):
        for self_attention, cross_attention, difference in orders:
            assert set(self_attention) == {"native"}
            assert set(cross_attention) == {"_native_math"}
            assert difference <= TOLERANCE
