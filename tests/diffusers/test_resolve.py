"""Settings that hold for a model, and what `dbsp generate` rejects and fills in."""

from __future__ import annotations

import json
import types

import diffusers
import pytest
import torch
import yaml

from dbsp_core.config import DEFAULT_ORIGIN, DbspConfig
from dbsp_core.models.table import MODEL_SPECS, published_model
from dbsp_diffusers.resolve import resolve_config
from tests.support.models.tiny_transformers import make_tiny_transformer


def published(name: str):
    """Returns a pipeline with a published checkpoint's transformer, apart from its weights, and the transformer."""
    signature = MODEL_SPECS[name].signature
    layers, heads, head_dim, frames = signature.sizes
    wan = signature.pipeline.startswith("Wan")
    patch = {"patch_size": (1, 2, 2)} if wan else {"patch_size": 2, "patch_size_t": frames if frames > 1 else None}
    if signature.pipeline.startswith(("Hunyuan", "LTX")):
        patch["patch_size_t"] = 1
    single = {"num_layers": 20, "num_single_layers": 40} if name == "hunyuanvideo" else {"num_layers": layers}
    config = {**single, "num_attention_heads": heads, "attention_head_dim": head_dim, **patch}
    transformer = types.SimpleNamespace(config=config)
    both = {"transformer": transformer, "transformer_2": transformer} if signature.variant == "two" else {}
    parts = both | {"config": {"expand_timesteps": signature.variant == "ti2v"}}
    return type(signature.pipeline, (), parts)(), transformer


@pytest.mark.parametrize("name", MODEL_SPECS)
def test_known_model_without_a_configuration_has_its_own(name):
    pipe, transformer = published(name)
    config = resolve_config(None, transformer, pipe=pipe)
    if name == "cogvideox-5b":
        assert (config, config.origin) == (DbspConfig(), DEFAULT_ORIGIN)
    else:
        same = published_model(MODEL_SPECS[name].signature).name
        assert config == DbspConfig.load(f"{same}-{MODEL_SPECS[name].mask if name == same else 'subblock'}")
        assert config.model == same


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("wan2.1-t2v-14b", "WanTransformer3DModel"),
        ("hunyuanvideo", "HunyuanVideoTransformer3DModel"),
        ("hunyuanvideo1.5", "HunyuanVideo15Transformer3DModel"),
        ("ltx-2", "LTX2VideoTransformer3DModel"),
        ("minimax-h3", "MiniMaxH3Transformer3DModel"),
    ],
)
def test_transformer_without_a_pipeline_has_the_configuration_of_its_sizes(name, kind):
    """The default sizes of diffusers' classes are those of these checkpoints."""
    with torch.device("meta"):
        known = getattr(diffusers, kind)()
    assert resolve_config(None, known) == DbspConfig.load(f"{name}-{MODEL_SPECS[name].mask}")


def test_transformer_of_unknown_sizes_is_dense():
    assert resolve_config(None, make_tiny_transformer("wan")) == DbspConfig()


def test_configuration_of_another_model_is_rejected():
    pipe, transformer = published("wan2.1-t2v-1.3b")
    with pytest.raises(ValueError, match=r"sparge\) is for wan2\.1-t2v-14b, the model is wan2\.1-t2v-1\.3b"):
        resolve_config("wan2.1-t2v-14b-sparge", transformer, pipe=pipe)
    resolve_config({"mask": {"source": "radial"}}, transformer, pipe=pipe)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompt x", "no model is given; add --model"),
        ("--config tiny-wan --prompt x --model wan2.1-t2v-14b", "is for tiny-wan, the model is wan2.1-t2v-14b"),
        ("--config tiny-wan --prompt x --set mask.density=2", "--set mask.density: density=2.0 must lie between"),
        ("--config tiny-wan --prompt x --set model.x=1", "--set model.x: 'model' is 'tiny-wan', not a mapping"),
        ("--config tiny-wan --prompt x --set generate.steps", "--set generate.steps is not of the form KEY=VALUE"),
        ("--config tiny-wan --prompt x --set mask=[", "--set mask: '[' is not YAML"),
        ("--config tiny-wan --prompt x --seed -1", "--seed: generate.seed=-1 must be at least 0"),
        ("--config tiny-wan --prompt x --nproc 3 --set strategy=U2R2", "strategy U2R2 needs 2·2 = 4 GPUs, got 3"),
        ("--model Wan21-T2V-14B --prompt x", "did you mean 'wan2.1-t2v-14b'?"),
    ],
)
def test_generate_rejects_a_mistake_before_a_process_is_launched(mistake, arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert message in mistake("generate", *arguments.split(" "))
    assert list(tmp_path.iterdir()) == []


class TestWhatWouldBeMade:
    def asked(self, dbsp, *arguments):
        code, out, err = dbsp("generate", "--prompt", "x", "--dry-run", *arguments)
        warnings = [line for line in err.splitlines() if not line.startswith("dbsp: ")]
        assert (code, warnings) == (0, [])
        return yaml.safe_load(out)

    def test_everything_is_filled_in_from_the_checkpoint(self, dbsp):
        made = self.asked(dbsp, "--model", "Wan2.1-T2V-1.3B", "--nproc", 8)
        video = made["generate"]
        assert (video["height"], video["width"], video["num_frames"], video["flow_shift"]) == (480, 832, 81, 3.0)
        assert video["negative_prompt"].startswith("Bright tones")
        assert made["model"] == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        assert (made["mask"]["sparsity"], made["strategy"]) == (0.75, "U8R1")

    def test_model_with_another_pipeline(self, dbsp):
        made = self.asked(dbsp, "--model", "ltx-2", "--nproc", 8, "--steps", 20)
        video = made["generate"]
        assert (video["height"], video["width"], video["num_frames"]) == (1088, 1920, 241)
        assert (made["mask"]["source"], video["steps"], made["strategy"]) == ("subblock", 20, "U8R1")

    def test_unknown_local_model_runs_dense(self, dbsp, mistake, tmp_path):
        (tmp_path / "transformer").mkdir()
        (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
        sizes = {"num_layers": 3, "num_attention_heads": 5, "attention_head_dim": 8, "patch_size": [1, 2, 2]}
        (tmp_path / "transformer" / "config.json").write_text(json.dumps(sizes))
        answer = mistake("generate", "--model", tmp_path, "--prompt", "x", "--dry-run")
        assert "generate.height is not set, and no default size is known for this model" in answer
        size = ["--height", 64, "--width", 64, "--num-frames", 5]
        assert self.asked(dbsp, "--model", tmp_path, *size)["mask"]["source"] == "dense"
