"""Sizes of the models in the table, and the description of its fields."""

from __future__ import annotations

import inspect

import pytest
import torch

from dbsp_cli.modelled import MODELLED_ONLY, linear_flops, passes
from dbsp_core.models.table import MODEL_SPECS


def test_model_table_has_the_sizes_of_the_paper():
    wan, cog = MODEL_SPECS["wan2.1-t2v-14b"], MODEL_SPECS["cogvideox1.5-5b"]
    assert (wan.tokens, wan.attention_dim, passes(wan)) == (21 * 3600, 5120, 100)
    assert (cog.tokens, cog.attention_dim) == (21 * 4080 + 226, 3072)
    keys = 2 * 40 * 5120**2  # of cross-attention, which are left out
    assert 12e9 < linear_flops(wan) / 2 / wan.tokens < 14.3e9 - keys + 1e9


@pytest.mark.parametrize(
    ("name", "kind"),
    [("hunyuanvideo", "HunyuanVideoTransformer3DModel"), ("minimax-h3", "MiniMaxH3Transformer3DModel")],
)
def test_models_that_are_only_modelled_have_the_sizes_of_diffusers_classes(name, kind):
    diffusers = pytest.importorskip("diffusers")
    if not hasattr(diffusers, kind):
        pytest.skip(f"this diffusers lacks {kind}")
    spec, built = MODELLED_ONLY[name], getattr(diffusers, kind)
    given = {key: one.default for key, one in inspect.signature(built).parameters.items()}
    assert (spec.heads, spec.head_dim) == (given["num_attention_heads"], given["attention_head_dim"])
    assert spec.layers == given["num_layers"] + given.get("num_single_layers", 0)
    assert (spec.hidden or spec.attention_dim) == given.get("hidden_size", spec.attention_dim)
    with torch.device("meta"):
        assert spec.parameters == sum(one.numel() for one in built().parameters())
    weights = linear_flops(spec) / spec.tokens / 2 / spec.layers
    gated = 4 * 5376 * 7168 + 3 * 5376 * given.get("ffn_dim", 0)
    assert weights == (gated if name == "minimax-h3" else 12 * spec.attention_dim**2)
    assert passes(spec) == 50


def test_video_of_minimax_h3_has_the_tokens_of_its_pipeline():
    pipeline = pytest.importorskip("diffusers.modular_pipelines.minimax_h3.modular_pipeline")
    spec = MODELLED_ONLY["minimax-h3"]
    video = spec.video
    assert pipeline.resolve_canvas_size(16, 9, 32, 768, 768 * 1344) == (video.height, video.width)
    assert pipeline.align_num_frames(video.num_frames, 17, 5) == video.num_frames
    frames = pipeline.video_latent_num_frames(video.num_frames, 17, 5)
    assert spec.thw == (frames, video.height // 32, video.width // 32)
    sound = 2 * pipeline.audio_latent_num_frames(video.num_frames)
    assert 0 <= spec.text_tokens - 512 - sound < 16
