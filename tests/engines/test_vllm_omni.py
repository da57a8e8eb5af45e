"""vLLM-Omni with backend DBSP: its own models on CPU ranks equal one process of them.

Runs in an environment of its own: `scripts/engines test`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm_omni", reason="run scripts/engines test")
from vllm_omni.diffusion import registry
from vllm_omni.diffusion.data import DiffusionParallelConfig, parse_attention_config

from dbsp_core.utils.errors import UserError
from dbsp_engines.vllm_omni_plugin import EXPECTED, register, unregister
from scripts.checks.engines.reference import stub_for_torchvision
from scripts.checks.engines.runs import LAYERS, STEPS, Case, run
from tests.engines.cases import (
    EVEN,
    KNOWN,
    SPLITS,
    UNEQUAL,
    EveryEngine,
    assert_exact,
)

ENGINE = "vllm_omni"
PREDICTED = "sparge:cdf=0.35,similarity=-1,block_q=16,block_k=8"
VSA = "vsa:sparsity=0.6"
IMAGES = ((1, 5, 15), (1, 6, 12))
UNCACHED = 2 * LAYERS * STEPS
"""Attentions of two CFG passes a step."""


class TestEveryEngine(EveryEngine):
    engine, expected, without = ENGINE, EXPECTED, {"VLLM_PLUGINS": "cpu"}


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), *SPLITS])
def test_models_with_text_in_self_attention(ulysses, ring):
    """3 and 5 heads, two sizes alternately; padding of text in Qwen-Image and HunyuanVideo-1.5, which is no key.

    Z-Image packs image and text in one sequence, each filled up with tokens that are keys.
    """
    cases = (
        Case(3, IMAGES, KNOWN, model="z_image"),
        Case(5, IMAGES, PREDICTED, passes=2, model="z_image"),
        Case(5, IMAGES, KNOWN, model="longcat_image"),
        Case(3, IMAGES, PREDICTED, passes=2, model="longcat_image"),
        Case(3, IMAGES, KNOWN, model="flux2"),
        Case(5, IMAGES, PREDICTED, passes=2, model="flux2"),
        Case(3, IMAGES, PREDICTED, model="qwen_image"),
        Case(5, IMAGES, PREDICTED, passes=2, model="qwen_image"),
        Case(5, (UNEQUAL, EVEN), KNOWN, model="hunyuan_video_15"),
        Case(3, (UNEQUAL, EVEN), PREDICTED, passes=2, model="hunyuan_video_15"),
    )
    assert_exact(cases, run(ENGINE, ulysses, ring, *cases))


@pytest.mark.parametrize(("ulysses", "strategy"), [(1, None), (2, None), (2, "U1R2"), (4, "U2R2")])
def test_ltx2(ulysses, strategy):
    """db-SP has the video's self-attention; audio attends to the video without its padding. vLLM-Omni has no ring."""
    cases = (
        Case(3, (UNEQUAL, EVEN), KNOWN, strategy=strategy, model="ltx2"),
        Case(5, (UNEQUAL,), PREDICTED, passes=2, strategy=strategy, model="ltx2"),
    )
    found = run(ENGINE, ulysses, 1, *cases)
    assert_exact(cases, found)
    assert found[0]["padding"] == -75 % ulysses


def test_ltx2_has_no_ring_of_vllm_omnis():
    (found,) = run(ENGINE, 1, 2, Case(3, (EVEN,), KNOWN, model="ltx2"))
    assert "requires pure Ulysses" in found["rejected"]


@pytest.mark.parametrize(("ulysses", "ring", "heads"), [(1, 1, 3), (1, 2, 5), (2, 1, 4), (2, 2, 4)])
def test_minimax_h3(ulysses, ring, heads):
    """Text and audio before the video, and references; of 128 slots, the last of four ranks has padding alone."""
    cases = (
        Case(heads, (UNEQUAL, EVEN), KNOWN, model="h3"),
        Case(heads, (UNEQUAL,), PREDICTED, model="h3_references"),
    )
    assert_exact(cases, run(ENGINE, ulysses, ring, *cases))


@pytest.mark.parametrize(("ulysses", "ring", "strategy"), [(1, 2, None), (1, 2, "U2R1"), (2, 2, None), (1, 4, "U4R1")])
def test_fasth3_with_its_coarse_branch(ulysses, ring, strategy):
    """As vLLM-Omni computes it in one process, tiles at the far sides, kinds of text and gates included.

    5 heads on a ring, and by a strategy of the configuration by heads, which vLLM-Omni's degrees would not admit.
    """
    heads, tall, wide = 4 if ulysses > 1 else 5, (5, 9, 6), (5, 6, 7)
    sparse = Case(heads, (tall, wide), VSA, strategy=strategy, model="h3_vsa")
    cases = (sparse, replace(sparse, sizes=(tall,), model="h3_vsa_references"))
    without = replace(sparse, sizes=(tall,), wrong=f"{VSA},coarse=false")
    *found, control = run(ENGINE, ulysses, ring, *cases, without)
    assert_exact(cases, found)
    assert control["error"] > 1e-2, "the coarse branch matters"


@pytest.fixture
def registered():
    stub_for_torchvision()
    register()
    yield
    unregister()


def config_of(backend: str, **degrees: int) -> SimpleNamespace:
    """As much of vLLM-Omni's configuration as FastH3's contracts and `attach` read."""
    ulysses, ring = degrees.get("usp", 1), degrees.get("ring", 1)
    sizes = {"ulysses_degree": ulysses, "ring_degree": ring, "sequence_parallel_size": ulysses * ring}
    return SimpleNamespace(
        parallel_config=DiffusionParallelConfig(**sizes),
        diffusion_attention_config=parse_attention_config({"per_role": {"self": {"backend": backend}}}),
        quantization_config=None,
        cache_backend=None,
    )


def check_contracts(config: SimpleNamespace) -> None:
    """As a pipeline of FastH3 does: the full student's, and that of an adapter with gates."""
    from vllm_omni.diffusion.models.minimax_h3.fasth3 import FastH3WeightFusion
    from vllm_omni.diffusion.models.minimax_h3.fasth3_checkpoint import FastH3CheckpointSpec

    pipeline = type("Pipeline", (), {"__module__": FastH3WeightFusion.__module__})
    registry._prepare_diffusion_quant_config(config, pipeline)
    FastH3CheckpointSpec().check_serving_contract(partition="fl2va", od_config=config)
    adapter = FastH3WeightFusion(source=Path("adapter"), patches={}, head_dim=128, requires_vsa=True)
    adapter.check_serving_contract(partition="fl2va", od_config=config, video_shift=10.0, audio_shift=3.0)


def test_fasth3_admits_dbsp_in_a_ring_with_its_own_mask_alone(registered, monkeypatch):
    monkeypatch.setenv("DBSP_CONFIG", VSA)
    for _ in range(2):  # pipelines of one process
        check_contracts(config_of("DBSP", usp=8, ring=2))
    with pytest.raises(ValueError, match="FASTVIDEO_VSA"):
        check_contracts(config_of("TORCH_SDPA"))
    with pytest.raises(ValueError, match="pure Ulysses sequence parallelism"):
        check_contracts(config_of("FASTVIDEO_VSA", usp=8, ring=2))
    for other in (PREDICTED, f"{VSA},coarse=false"):
        monkeypatch.setenv("DBSP_CONFIG", other)
        with pytest.raises(UserError, match="this FastH3 was trained with VSA; set DBSP_CONFIG=vsa"):
            check_contracts(config_of("DBSP"))


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


def test_magcache_skips_by_the_step():
    """After two steps, whose blocks all ranks compute; what is reused is each rank's own tokens'."""
    options = {"mag_ratios": [1.0] * STEPS, "num_inference_steps": STEPS, "mag_retention_ratio": 0.5}
    case = Case(3, IMAGES[:1], PREDICTED, cache="mag_cache", cache_options=options, model="flux2")
    (found,) = run(ENGINE, 2, 1, case)
    assert found["error"] <= 1e-5
    assert found["calls"] == 2 * LAYERS


def test_a_step_cache_that_is_not_known_is_rejected_on_several_ranks():
    (found,) = run(ENGINE, 2, 1, Case(3, (EVEN,), KNOWN, cache="step_cache"))
    assert "does not know whether cache_backend step_cache skips the same layers" in found["rejected"]


def test_compiled_by_blocks_graphs_are_whole_and_for_all_layers():
    """As without db-SP (2 graphs each, counted), and no step compiles anew. One model has its text in attention."""
    cases = [Case(4, (EVEN,), KNOWN, compiled=True, model=model) for model in ("wan", "hunyuan_video_15")]
    found = run(ENGINE, 2, 1, *cases)
    assert_exact(cases, found)
    for case, one in zip(cases, found, strict=True):
        assert one["breaks"] == {}, case
        assert set(one["graphs"]) == {2}, (case, one)


def test_attention_in_8_bits_is_dbsps_own():
    """vLLM-Omni's two settings for it are rejected; "auto" keeps the model's dtype."""
    cases = [Case(3, (EVEN,), KNOWN, options={"diffusion_kv_cache_dtype": dtype}) for dtype in ("fp8", "auto")]
    rejected, kept = run(ENGINE, 2, 1, *cases)
    assert "set kernel: triton-int8 in db-SP's configuration" in rejected["rejected"]
    assert_exact(cases[1:], [kept])
    backend = {"backend": "DBSP", "quant": {"dtype_qk": "int8"}}
    with pytest.raises(ValueError, match=r"quant is only supported by .* but backend='DBSP'"):
        parse_attention_config({"per_role": {"self": backend}})
