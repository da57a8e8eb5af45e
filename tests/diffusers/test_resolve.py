"""Settings that hold, on which all ranks agree, and what is logged of them; what `dbsp generate` rejects."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from unittest import mock

import pytest
import torch
import yaml
from diffusers import WanTransformer3DModel

import dbsp_diffusers
from dbsp_core import SequenceGroup
from dbsp_core.config import DEFAULT_ORIGIN, DbspConfig
from dbsp_core.models.signature import model_signature
from dbsp_core.models.table import MODEL_SPECS, model_title, published_model
from dbsp_diffusers import resolve
from dbsp_diffusers.resolve import resolve_config
from dbsp_kernels import KERNELS
from tests.support.models.tiny_transformers import make_tiny_transformer
from tests.support.outcomes import said


def published(name: str):
    """Returns a pipeline with a published checkpoint's transformer, apart from its weights, and the transformer."""
    signature = MODEL_SPECS[name].signature
    layers, heads, head_dim, frames = signature.sizes
    wan = signature.pipeline.startswith("Wan")
    patch = {"patch_size": (1, 2, 2)} if wan else {"patch_size": 2, "patch_size_t": frames if frames > 1 else None}
    config = {"num_layers": layers, "num_attention_heads": heads, "attention_head_dim": head_dim, **patch}
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
        assert config == DbspConfig.load(f"{same}-sparge")
        assert config.model == same


def test_transformer_without_a_pipeline_has_the_configuration_of_its_sizes():
    with torch.device("meta"):
        known = WanTransformer3DModel(**published("wan2.1-t2v-1.3b")[1].config)
    assert resolve_config(None, known) == DbspConfig.load("wan2.1-t2v-1.3b-sparge")
    assert resolve_config(None, make_tiny_transformer("wan")) == DbspConfig()


def test_configuration_of_another_model_is_rejected():
    pipe, transformer = published("wan2.1-t2v-1.3b")
    with pytest.raises(ValueError, match=r"sparge\) is for wan2\.1-t2v-14b, the model is wan2\.1-t2v-1\.3b"):
        resolve_config("wan2.1-t2v-14b-sparge", transformer, pipe=pipe)
    resolve_config({"mask": {"source": "radial"}}, transformer, pipe=pipe)


def attach_to_another_model(rank: int, world: int) -> None:
    """Enables db-SP with a configuration for another model, and with the same one on all ranks."""
    transformer = make_tiny_transformer("wan")
    answer = said(lambda: dbsp_diffusers.enable(transformer, "wan2.1-t2v-14b-window"))
    assert "is for wan2.1-t2v-14b, the model is a WanPipeline with" in answer
    assert dbsp_diffusers.session_of(transformer) is None


def test_configuration_of_another_model_is_rejected_on_all_ranks(pool):
    pool(2).run(attach_to_another_model)


class TestGenerateRejects:
    """Before a process is launched, with one line."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("--prompt x", "nothing says which model; give --model"),
            ("--config tiny-wan --prompt x --model wan2.1-t2v-14b", "is for tiny-wan, the model is wan2.1-t2v-14b"),
            ("--config tiny-wan --prompt x --set mask.density=2", "--set mask.density: density=2.0 must lie between"),
            ("--config tiny-wan --prompt x --set model.x=1", "--set model.x: 'model' is 'tiny-wan', not a mapping"),
            ("--config tiny-wan --prompt x --set generate.steps", "--set generate.steps is not of the form KEY=VALUE"),
            ("--config tiny-wan --prompt x --set mask=[", "--set mask: '[' is not YAML"),
            ("--config tiny-wan --prompt x --set generate.num_frames=32", "generate.num_frames=32 must be 4k + 1"),
            ("--config tiny-wan --prompt x --seed -1", "--seed: generate.seed=-1 must be at least 0"),
            ("--config tiny-wan --prompt x --nproc 0", "Invalid value for '--nproc': "),
            ("--config tiny-wan --prompt x --nproc 3 --set strategy=U2R2", "strategy U2R2 needs 2·2 = 4 GPUs but"),
            ("--config tiny-wan --prompt x --set machine=h300", "--set machine: no hardware 'h300'; use "),
            ("--model Wan21-T2V-14B --prompt x", "did you mean 'wan2.1-t2v-14b'?"),
            (
                "--config tiny-wan --prompt x --set model=tiny-van",
                "--set model: model tiny-van: neither a model that",
            ),
        ],
    )
    def test_one_line(self, mistake, arguments, message, monkeypatch, tmp_path):
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
        said = self.asked(dbsp, "--model", "Wan2.1-T2V-1.3B", "--nproc", 8)
        video = said["generate"]
        assert (video["height"], video["width"], video["num_frames"], video["flow_shift"]) == (480, 832, 81, 3.0)
        assert video["negative_prompt"].startswith("Bright tones")
        assert said["model"] == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        assert said["mask"]["cdf"] == 0.92
        assert said["strategy"] == "U8R1"

    def test_changes_go_before_the_file(self, dbsp):
        changes = ("--set", "mask.density=0.5", "--set", "strategy=auto", "--set", "dense_schedule={first_steps: 1}")
        said = self.asked(dbsp, "--config", "tiny-wan", *changes, "--seed", 3)
        assert (said["mask"]["source"], said["mask"]["density"], said["mask"]["block_q"]) == ("synthetic", 0.5, 32)
        assert (said["strategy"], said["generate"]["seed"]) == ("auto", 3)
        assert said["dense_schedule"]["first_steps"] == 1

    def test_unknown_local_model_runs_dense(self, dbsp, tmp_path):
        folder = tmp_path / "model"
        (folder / "transformer").mkdir(parents=True)
        (folder / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
        sizes = {"num_layers": 3, "num_attention_heads": 5, "attention_head_dim": 8, "patch_size": [1, 2, 2]}
        (folder / "transformer" / "config.json").write_text(json.dumps(sizes))
        code, _, err = dbsp("generate", "--model", folder, "--prompt", "x", "--dry-run")
        assert code == 2
        assert "generate.height is not set, and no default size is known for this model" in err
        size = [part for name in ("height=64", "width=64", "num_frames=5") for part in ("--set", f"generate.{name}")]
        assert self.asked(dbsp, "--model", folder, *size)["mask"]["source"] == "dense"


@pytest.fixture
def log(monkeypatch):
    """Makes log(title, head_dim, dtype) give the line of a model on one process."""
    lines = []
    monkeypatch.setattr(resolve, "_log_once", lines.append)
    monkeypatch.delenv("DBSP_KERNEL", raising=False)

    def line(title, head_dim, dtype):
        lines.clear()
        like = torch.empty(0, dtype=dtype)
        resolve.log_config(DbspConfig(), title, head_dim, SequenceGroup(0, 1), None, like)
        return lines[0]

    return line


def test_model_with_other_names_for_its_sizes_is_logged_with_its_kernel(log):
    ernie = model_signature("ErnieImagePipeline", {"hidden_size": 144, "num_attention_heads": 6, "num_layers": 2})
    line = log(model_title(ernie), ernie.sizes[2], torch.float32)
    assert line.startswith("a ErnieImagePipeline on 1 rank, ")
    assert line.endswith("kernel cpu")


@pytest.mark.parametrize(
    ("model", "dtype", "kernel"),
    [
        ("cogvideox-5b", torch.bfloat16, "narrow"),
        ("cogvideox-5b", torch.float32, "cpu"),
        ("wan2.1-t2v-14b", torch.bfloat16, "cpu"),
    ],
)
def test_kernel_in_the_log_is_chosen_for_the_models_dtype_and_head_size(log, model, dtype, kernel):
    narrow = replace(KERNELS["cpu"], name="narrow", dtypes=frozenset({torch.bfloat16}), head_dims=range(1, 65))
    with mock.patch.dict(KERNELS, {"narrow": narrow, **KERNELS}, clear=True):  # restores their order, which counts
        line = log(model, MODEL_SPECS[model].signature.sizes[2], dtype)
    assert line.startswith(f"{model} on 1 rank")
    assert line.endswith(f"kernel {kernel}")
